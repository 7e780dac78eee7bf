"""QK-norm, rotary embedding and KV append of one layer in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS_PER_PROGRAM = 8
"""48 heads (Qwen3-4B) in 6 programs a token: enough of them at one token, and 2 KiB of loads each."""


@triton.jit
def _rope_append(
    qkv,
    queries,
    kv,
    cos_sin,
    positions,
    slots,
    q_weight,
    k_weight,
    eps,
    page_stride,
    value_offset,
    QKV_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    HALF: tl.constexpr = HEAD_DIM // 2
    lane = tl.arange(0, HALF)
    exists = (head < HEADS + 2 * KV_HEADS)[:, None]
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]

    source = qkv + token * QKV_STRIDE + head[:, None] * HEAD_DIM + lane[None, :]
    low = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=exists, other=0.0).to(tl.float32)
    turned_low, turned_high = low, high
    if NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        weight_low = tl.where(is_query, tl.load(q_weight + lane)[None, :], tl.load(k_weight + lane)[None, :])
        weight_high = tl.where(
            is_query, tl.load(q_weight + HALF + lane)[None, :], tl.load(k_weight + HALF + lane)[None, :]
        )
        turned_low = low * scale * weight_low.to(tl.float32)
        turned_high = high * scale * weight_high.to(tl.float32)
    turn = cos_sin + tl.load(positions + token).to(tl.int64) * HEAD_DIM + lane
    cos = tl.load(turn)[None, :]
    sin = tl.load(turn + HALF)[None, :]
    out_low = tl.where(is_value, low, turned_low * cos - turned_high * sin)
    out_high = tl.where(is_value, high, turned_high * cos + turned_low * sin)

    to_query = queries + (token * HEADS + head[:, None]) * HEAD_DIM + lane[None, :]
    kind = queries.dtype.element_ty
    tl.store(to_query, out_low.to(kind), mask=is_query)
    tl.store(to_query + HALF, out_high.to(kind), mask=is_query)

    slot = tl.load(slots + token)
    row = (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
    kv_head = tl.where(is_value, head[:, None] - HEADS - KV_HEADS, head[:, None] - HEADS)
    to_cache = kv + row + tl.where(is_value, value_offset, 0) + kv_head * HEAD_DIM + lane[None, :]
    cached = exists & (head >= HEADS)[:, None]
    tl.store(to_cache, out_low.to(kind), mask=cached)
    tl.store(to_cache + HALF, out_high.to(kind), mask=cached)


def rope_append(
    qkv: Tensor,
    queries: Tensor,
    kv: Tensor,
    layer: int,
    *,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    """Turn the queries of a step into `queries` and append its keys and values to the cache.

    `qkv` is `[tokens, (heads + 2 * kv_heads) * head_dim]`, rows contiguous; `queries` `[tokens, heads, head_dim]`,
    contiguous; `kv` `[pages, layers, 2, page_size, kv_heads, head_dim]`, all of one type. `cos_sin` is float32
    `[positions, head_dim]`: cosines of the first half of the dimensions, then their sines. `positions` is int32
    `[tokens]`, `slots` int64 `[tokens]` (page * page_size + offset). `q_weight` and `k_weight` `[head_dim]` are the
    weights of the RMSNorm over head_dim, or None for no norm. Dimension i is paired with i + head_dim / 2, as in
    transformers. The arithmetic is float32; the result is rounded once.
    """
    tokens, heads, head_dim = queries.shape
    _, _, _, page_size, kv_heads, _ = kv.shape
    if head_dim & (head_dim - 1):
        raise ValueError(f"head_dim is {head_dim}, but the kernel wants a power of two (64, 128 or 256)")
    total = heads + 2 * kv_heads
    grid = (tokens, triton.cdiv(total, _HEADS_PER_PROGRAM))
    norm = q_weight is not None and k_weight is not None
    target = kv[:, layer]
    _rope_append[grid](
        qkv,
        queries,
        target,
        cos_sin,
        positions,
        slots,
        q_weight if norm else cos_sin,
        k_weight if norm else cos_sin,
        eps,
        kv.stride(0),
        kv.stride(2),
        QKV_STRIDE=qkv.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        NORM=norm,
        TILE=_HEADS_PER_PROGRAM,
        num_warps=4 if head_dim >= 128 else 2,
    )


def rope_append_reference(
    qkv: Tensor,
    queries: Tensor,
    kv: Tensor,
    layer: int,
    *,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    """The same in plain torch, float32: what the kernel is tested against."""
    tokens, heads, head_dim = queries.shape
    _, _, _, page_size, kv_heads, _ = kv.shape
    split = qkv.float().view(tokens, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    turned = []
    for part, weight in ((split[0], q_weight), (split[1], k_weight)):
        normed = part
        if weight is not None:
            normed = torch.nn.functional.rms_norm(part, (head_dim,), weight.float(), eps)
        low, high = normed.chunk(2, dim=-1)
        turned.append(
            torch.cat((low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]), -1)
        )
    queries.copy_(turned[0])
    page, offset = slots // page_size, slots % page_size
    kv[page, layer, 0, offset] = turned[1].to(kv.dtype)
    kv[page, layer, 1, offset] = split[2].to(kv.dtype)
