"""Attention through FlashInfer's kernels: FA2 for decode rows, FA3 or FA2 for chunks, a plan for each."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cuda.inputs import STAGES, Array, StepInputs
from engine.plan import PlanCapacity

_INT_WORKSPACE_BYTES = 16 << 20
_TILE_Q = 128
_CAUSAL = 1
_NHD = 0
_NO_WINDOW = -1


def fa3_fills(chunk_tokens: Array, heads: int, sm_count: int) -> bool:
    """True if the chunks' query tiles of 128, for every head, give each SM one at least.

    Below that FA2 is faster, since it splits the KV and FA3 does not.
    """
    return int((-(-chunk_tokens // _TILE_Q)).sum()) * heads >= sm_count


def float_workspace_bytes(capacity: PlanCapacity, sm_count: int) -> int:
    """Partial results and their sums of a split FA2 plan: FlashInfer puts at most two CTAs on an SM."""
    tiles = max(2 * sm_count // capacity.kv_heads, 1)
    return tiles * _TILE_Q * capacity.heads * (capacity.head_dim + 1) * 4 + (1 << 20)


class Plan:
    """One plan over one of FlashInfer's modules, with workspaces of its own that never move."""

    def __init__(self, module: Any, float_workspace: Tensor, extra: tuple[Any, ...]) -> None:
        device = float_workspace.device
        self.module = module
        self.info: Any = None
        self._extra = extra
        self._float = float_workspace
        self._int = torch.zeros(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(_INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]
        self._read = [torch.cuda.Event() for _ in range(STAGES)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def update(self, queries: Array, lengths: Array, capacity: PlanCapacity) -> None:
        """Plan rows with `queries` query tokens at the end of `lengths` tokens each (int64 `[rows]`)."""
        self._turn = (self._turn + 1) % STAGES
        self._read[self._turn].synchronize()
        pages = -(-lengths // capacity.page_size)
        self.info = self.module.plan(
            self._float,
            self._int,
            self._pinned[self._turn],
            _indptr(queries),
            _indptr(pages),
            torch.from_numpy(lengths.astype(np.int32)),
            int(queries.sum()),
            len(queries),
            capacity.heads,
            capacity.kv_heads,
            capacity.page_size,
            False,
            capacity.head_dim,
            capacity.head_dim,
            True,
            _NO_WINDOW,
            *self._extra,
        )
        self._read[self._turn].record()

    def run(
        self, queries: Tensor, kv: tuple[Tensor, Tensor], pages: tuple[Tensor, ...], out: Tensor, tail: tuple[Any, ...]
    ) -> None:
        """Attend; `pages` are query_indptr, page_indptr, page_indices and last_page_len of the plan's rows."""
        head = (self._float, self._int, self.info, queries, *kv, *pages, out, None, _CAUSAL, _NHD, _NO_WINDOW, False)
        self.module.paged_run(*head, *tail)


def _indptr(counts: Array) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))


class FlashInferAttention:
    """`engine.cuda.executor.Attention` over FlashInfer's own planner."""

    def __init__(self, capacity: PlanCapacity, kv: Tensor, float_workspace: Tensor) -> None:
        from flashinfer.jit.attention.modules import gen_batch_prefill_module

        properties = torch.cuda.get_device_properties(kv.device)
        self._capacity = capacity
        self._kv = kv
        self._sm_count = properties.multi_processor_count
        dim = capacity.head_dim
        shape = (kv.dtype, kv.dtype, kv.dtype, torch.int32, dim, dim, 0, False, False, False)
        fa2 = gen_batch_prefill_module("fa2", *shape).build_and_load()
        scale = 1.0 / math.sqrt(dim)
        self._fa2_tail = (*(None,) * 8, 0.0, scale, 1.0, 1.0, 0)
        self._fa3_tail = (None, None, None, None, 0.0, scale, 1.0, 0)
        whole = (-1, False, 0, 0)
        self._decode = Plan(fa2, float_workspace, whole)
        self._chunks_fa2 = Plan(fa2, float_workspace, whole)
        self._chunks_fa3: Plan | None = None
        if properties.major == 9:
            fa3 = gen_batch_prefill_module("fa3", *shape).build_and_load()
            self._chunks_fa3 = Plan(fa3, float_workspace, ())
        self._chunks = self._chunks_fa2
        self._inputs: StepInputs | None = None

    def begin(self, inputs: StepInputs) -> None:
        """See `engine.cuda.executor.Attention`."""
        shape = inputs.shape
        self._inputs = inputs
        if len(shape.decode_lengths):
            self._decode.update(np.ones_like(shape.decode_lengths), shape.decode_lengths, self._capacity)
        if len(shape.chunk_tokens):
            fills = fa3_fills(shape.chunk_tokens, self._capacity.heads, self._sm_count)
            self._chunks = self._chunks_fa3 if fills and self._chunks_fa3 is not None else self._chunks_fa2
            self._chunks.update(shape.chunk_tokens, shape.chunk_lengths, self._capacity)

    def __call__(self, layer: int, queries: Tensor, out: Tensor) -> None:
        """See `engine.cuda.decoder.StepAttention`."""
        if self._inputs is None:
            raise ValueError("begin a step before its attention")
        shape, device, staged = self._inputs.shape, self._inputs.device, self._inputs.staged
        kv = (self._kv[:, layer, 0], self._kv[:, layer, 1])
        decode, rows = len(shape.decode_lengths), shape.rows
        listed, last = device["page_indices"], device["last_page_len"]
        if decode:
            pages = (device["decode_indptr"][: decode + 1], device["page_indptr"][: decode + 1], listed, last[:decode])
            self._decode.run(queries[:decode], kv, pages, out[:decode], self._fa2_tail)
        if rows > decode:
            chunks = rows - decode
            indptr = staged["chunk_indptr"][: chunks + 1]
            pages = (indptr, device["page_indptr"][decode : rows + 1], listed, last[decode:rows])
            tail = self._fa3_tail if self._chunks is self._chunks_fa3 else self._fa2_tail
            self._chunks.run(queries[decode:], kv, pages, out[decode:], tail)
