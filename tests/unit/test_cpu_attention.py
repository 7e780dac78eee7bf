"""Paged attention against a plain float64 computation over contiguous keys and values."""

from typing import NamedTuple

import pytest
import torch

from engine.cpu.arena import Arena
from engine.cpu.attention import PagedAttention, StepPages, batch_rows, workspace_pages
from engine.plan import PlanCapacity

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 8
POOL = 200


class Row(NamedTuple):
    """A row of `length` tokens, the last `queries` of which are computed in the step."""

    length: int
    queries: int


def plain(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64: queries `[q, heads, d]` are the last q of the `[length, kv_heads, d]` tokens."""
    count, heads, head_dim = queries.shape
    length, kv_heads, _ = keys.shape
    out = torch.empty(count, heads, head_dim, dtype=torch.float64)
    for query in range(count):
        for head in range(heads):
            seen = length - count + query + 1
            kv_head = head // (heads // kv_heads)
            scores = keys[:seen, kv_head].double() @ queries[query, head].double() / head_dim**0.5
            out[query, head] = scores.softmax(0) @ values[:seen, kv_head].double()
    return out


def run(
    rows: list[Row], decode_rows: int, group: int, page_size: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's attention in layer 1, paged and plain. Rows lie scattered among pages that are not finite."""
    torch.manual_seed(len(rows) + group + page_size)
    heads = group * KV_HEADS
    capacity = PlanCapacity(8, 512, 1024, page_size, heads, KV_HEADS, HEAD_DIM)
    kv = torch.full((POOL, LAYERS, 2, page_size, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)
    kv[0] = 0
    arena = Arena()
    PagedAttention.reserve(arena, capacity, dtype)
    arena.allocate()
    attention = PagedAttention(kv, capacity, arena)
    free = (torch.randperm(POOL - 1) + 1).tolist()
    tokens = sum(row.queries for row in rows)
    queries = torch.randn(tokens, heads, HEAD_DIM).to(dtype)
    listed, slots, last, expected, keys, values = [], [], [], [], [], []
    at = 0
    for row in rows:
        count = -(-row.length // page_size)
        pages, free = free[:count], free[count:]
        own = torch.randn(2, row.length, KV_HEADS, HEAD_DIM).to(dtype)
        if row.length - row.queries > (count - 1) * page_size:
            kv[pages[-1]] = 0  # an earlier step began this page
        for position in range(row.length):
            slot = pages[position // page_size], position % page_size
            if position < row.length - row.queries:
                kv[slot[0], 1, :, slot[1]] = own[:, position]
            else:
                slots.append(slot[0] * page_size + slot[1])
        keys.append(own[0, -row.queries :])
        values.append(own[1, -row.queries :])
        expected.append(plain(queries[at : at + row.queries], own[0], own[1]))
        listed.append(pages)
        last.append(row.length - (count - 1) * page_size)
        at += row.queries
    step = StepPages(
        torch.tensor([0, *torch.tensor([row.queries for row in rows]).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor([0, *torch.tensor([len(pages) for pages in listed]).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor([page for pages in listed for page in pages], dtype=torch.int32),
        torch.tensor(last, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int64),
        decode_rows,
    )
    attention.begin(step)
    untouched = kv.clone()
    out = attention(1, queries, torch.cat(keys), torch.cat(values))
    changed = (kv.nan_to_num(7e4) != untouched.nan_to_num(7e4)).flatten(3).any(-1).any(-1)
    assert not changed[:, [0, 2]].any(), "a layer wrote into another one's part of a page"
    assert not changed[0].any(), "the padding page was written"
    return out.view(tokens, heads, HEAD_DIM).double(), torch.cat(expected)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 8])
def test_a_step_of_decode_rows_and_chunks(group: int, page_size: int) -> None:
    """First tokens, full pages, one more than full, a long row among short ones; chunks cold and behind a prefix."""
    rows = [Row(1, 1), Row(16, 1), Row(65, 1), Row(300, 1), Row(20, 20), Row(90, 33), Row(64, 1)]
    own, expected = run(rows, 4, group, page_size)
    torch.testing.assert_close(own, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_types_stay_within_their_rounding(dtype: torch.dtype, tolerance: float) -> None:
    own, expected = run([Row(33, 1), Row(200, 1), Row(70, 50)], 2, 3, 16, dtype)
    torch.testing.assert_close(own, expected, rtol=0, atol=tolerance)


def test_masks_that_do_not_fit_are_built_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedAttention, "_room", lambda self, elements: None)
    own, expected = run([Row(5, 1), Row(40, 1), Row(100, 60)], 2, 2, 16)
    torch.testing.assert_close(own, expected, rtol=0, atol=2e-6)


def test_a_chunk_is_cut_into_tiles_when_its_mask_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cpu.attention._LEAST_MASK_ELEMENTS", 1)
    monkeypatch.setattr("engine.cpu.attention._LEAST_WORKSPACE_PAGES", 1)
    monkeypatch.setattr(PagedAttention, "_room", lambda self, elements: None)
    own, expected = run([Row(400, 300)], 0, 2, 16)
    torch.testing.assert_close(own, expected, rtol=0, atol=2e-6)


def test_batches_hold_every_row_once_within_the_budget_and_half_padding() -> None:
    pages = [1, 40, 3, 22, 100, 7, 60, 1, 55, 12]
    batches = batch_rows(pages, 128)
    assert sorted(row for batch in batches for row in batch) == list(range(len(pages)))
    for batch in batches:
        own = [pages[row] for row in batch]
        assert len(own) * max(own) <= 128
        assert max(own) <= 8 or 2 * min(own) >= max(own)


def test_alike_rows_are_one_batch_in_their_order() -> None:
    assert batch_rows([3, 8, 1, 5], 64) == [[0, 1, 2, 3]]
    assert batch_rows([], 64) == []


def test_the_longest_row_fits_the_workspace() -> None:
    capacity = PlanCapacity(2, 64, 100_000, 16, 2, 2, 8)
    assert workspace_pages(capacity) == capacity.max_pages_per_row == 6251
