"""The Triton kernels, in Triton's interpreter, against plain torch in float32."""

from typing import NamedTuple

import pytest
import torch

import tests.interpreter  # noqa: F401
from engine.kernels.rope_append import rope_append, rope_append_reference
from engine.kernels.step_head import write_step

LAYERS = 2


def cos_sin(positions: int, head_dim: int) -> torch.Tensor:
    inverse = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(positions)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), -1)


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    norm: bool


SHAPES = [
    Shape(9, 3, 64, 16, False),
    Shape(8, 2, 128, 16, True),
    Shape(10, 2, 128, 64, True),
    Shape(6, 1, 256, 64, True),
    Shape(2, 2, 64, 64, True),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_rope_append(dtype: torch.dtype, shape: Shape) -> None:
    heads, kv_heads, head_dim, page_size, norm = shape
    generator = torch.Generator().manual_seed(heads)
    tokens, pages = 5, 4

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim)
    weights = (random(head_dim), random(head_dim)) if norm else (None, None)
    positions = torch.tensor([0, 1, 17, 300, 299], dtype=torch.int32)
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    before = random(pages, LAYERS, 2, page_size, kv_heads, head_dim)
    got, wanted = before.clone(), before.clone()
    queries, expected = (torch.full((tokens, heads, head_dim), torch.nan, dtype=dtype) for _ in range(2))
    common = {
        "cos_sin": cos_sin(512, head_dim),
        "positions": positions,
        "slots": slots,
        "q_weight": weights[0],
        "k_weight": weights[1],
        "eps": 1e-6,
    }
    rope_append(qkv, queries, got, 1, **common)
    rope_append_reference(qkv, expected, wanted, 1, **common)
    torch.testing.assert_close(queries, expected)
    torch.testing.assert_close(got, wanted)
    touched = torch.zeros(pages * page_size, dtype=torch.bool)
    touched[slots] = True
    by_slot = lambda kv: kv.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)  # noqa: E731
    assert torch.equal(by_slot(got)[~touched], by_slot(before)[~touched])
    assert torch.equal(got[:, 0], before[:, 0])
    assert not torch.equal(by_slot(got)[touched], by_slot(before)[touched])


def test_rope_append_refuses_a_head_dim_that_is_no_power_of_two() -> None:
    kv, unused = torch.zeros(1, 1, 2, 16, 1, 96), torch.zeros(1)
    tensors = dict.fromkeys(("cos_sin", "positions", "slots", "q_weight", "k_weight"), unused)
    with pytest.raises(ValueError, match="head_dim is 96"):
        rope_append(torch.zeros(1, 288), torch.zeros(1, 1, 96), kv, 0, **tensors, eps=1e-6)


@pytest.mark.parametrize("page_size", [16, 64])
def test_write_step(page_size: int) -> None:
    generator = torch.Generator().manual_seed(page_size)
    max_rows, per_row = 6, 80
    table = torch.randperm(1000, generator=generator)[: max_rows * per_row].view(max_rows, per_row).int()
    last_tokens = torch.arange(100, 100 + max_rows).int()
    slots, counts = [4, 0, 5, 2], [1, 1, 700, 3]
    lengths = [1, 3 * page_size, 700 + 5, page_size + 1]
    decode_rows, rows, tokens = 2, 4, sum(counts)

    def padded(values: list[int], size: int) -> torch.Tensor:
        return torch.tensor(values + [-7] * (size - len(values)), dtype=torch.int32)

    indptr = [0, 1, 2, 702, 705]
    chunk_tokens = torch.arange(tokens).int() + 5000
    out = {name: torch.full((max_rows + 1,), -1, dtype=torch.int32) for name in ("page_indptr", "last_page_len")}
    out["page_indices"] = torch.full((max_rows * per_row,), -1, dtype=torch.int32)
    for name in ("token_ids", "positions"):
        out[name] = torch.full((tokens + 4,), -1, dtype=torch.int32)
    out["slot_mapping"] = torch.full((tokens + 4,), -1, dtype=torch.int64)
    write_step(
        block_table=table,
        last_tokens=last_tokens,
        row_slots=padded(slots, max_rows),
        lengths=padded(lengths, max_rows),
        query_indptr=padded(indptr, max_rows + 1),
        chunk_tokens=chunk_tokens,
        **out,
        rows=rows,
        decode_rows=decode_rows,
        page_size=page_size,
    )
    pages = [-(-length // page_size) for length in lengths]
    ends = torch.tensor(pages).cumsum(0).tolist()
    assert out["page_indptr"].tolist() == [0, *ends, *[-1] * (max_rows - rows)]
    listed = [page for slot, count in zip(slots, pages, strict=True) for page in table[slot, :count].tolist()]
    assert out["page_indices"].tolist() == listed + [-1] * (max_rows * per_row - len(listed))
    assert out["last_page_len"].tolist()[:rows] == [
        length - (count - 1) * page_size for length, count in zip(lengths, pages, strict=True)
    ]
    positions = [
        position for length, count in zip(lengths, counts, strict=True) for position in range(length - count, length)
    ]
    assert out["positions"].tolist() == positions + [-1] * 4
    owners = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
    mapping = [
        int(table[slot, position // page_size]) * page_size + position % page_size
        for slot, position in zip(owners, positions, strict=True)
    ]
    assert out["slot_mapping"].tolist() == mapping + [-1] * 4
    assert out["token_ids"].tolist() == [104, 100, *chunk_tokens[2:].tolist(), *[-1] * 4]
