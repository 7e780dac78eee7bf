"""Which kernel, split or whole: against the fastest variant measured, and for the cases that must not go wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.planner import AttentionShape, size_fa2
from engine.cuda.policy import (
    DecodeRows,
    chunk_kernel,
    decode_chunk_pages,
    max_decode_tiles,
    splits,
    uses_xqa,
)

QWEN3_4B = AttentionShape(heads=32, kv_heads=8, head_dim=128, page_size=16, sm_count=132)
FOUR_KV_HEADS = AttentionShape(heads=20, kv_heads=4, head_dim=128, page_size=16, sm_count=132)
# Microseconds a layer on an H200, page 16: whole rows, split rows (under a graph), XQA.
MEASURED = [
    (QWEN3_4B, 1, 1024, 17.8, 11.5, 8.6),
    (QWEN3_4B, 16, 1024, 27.0, 28.7, 22.9),
    (QWEN3_4B, 64, 1024, 76.0, 80.7, 81.2),
    (QWEN3_4B, 256, 1024, 278.0, 286.9, 299.6),
    (QWEN3_4B, 1, 4096, 56.5, 14.9, 12.5),
    (QWEN3_4B, 16, 4096, 79.8, 76.0, 82.3),
    (QWEN3_4B, 64, 4096, 254.0, 258.1, 298.6),
    (QWEN3_4B, 256, 4096, 991.1, 993.3, 1154.9),
    (FOUR_KV_HEADS, 1, 1024, 17.9, 11.4, 8.6),
    (FOUR_KV_HEADS, 16, 1024, 20.9, 19.5, 15.4),
    (FOUR_KV_HEADS, 64, 1024, 41.0, 44.9, 43.4),
    (FOUR_KV_HEADS, 256, 1024, 143.7, 149.1, 155.8),
    (FOUR_KV_HEADS, 1, 4096, 58.3, 13.2, 11.1),
    (FOUR_KV_HEADS, 16, 4096, 67.4, 44.7, 46.2),
    (FOUR_KV_HEADS, 64, 4096, 132.6, 138.0, 155.0),
    (FOUR_KV_HEADS, 256, 4096, 510.2, 507.6, 585.6),
]


def even(rows: int, length: int) -> DecodeRows:
    return DecodeRows(rows, length, rows * length)


@pytest.mark.parametrize("row", MEASURED)
def test_the_choice_is_the_fastest_that_was_measured_or_nearly(row: tuple[AttentionShape, int, int, float]) -> None:
    shape, rows, length, whole, split, xqa = row
    step = even(rows, length)
    chosen = xqa if uses_xqa(step, shape) else split if splits(step, shape) else whole
    assert chosen <= 1.03 * min(whole, split, xqa)


@pytest.mark.parametrize(("rows", "short"), [(2, 100), (20, 1024), (33, 1024), (64, 1024), (256, 512)])
@pytest.mark.parametrize("shape", [QWEN3_4B, FOUR_KV_HEADS, AttentionShape(40, 8, 128, 64, 132)])
def test_one_long_row_among_short_ones_is_split_into_fair_shares(shape: AttentionShape, rows: int, short: int) -> None:
    lengths = np.array([short] * (rows - 1) + [32768], np.int64)
    step = DecodeRows(rows, 32768, int(lengths.sum()))
    assert splits(step, shape)
    assert not uses_xqa(step, shape)
    chunk = decode_chunk_pages(-(-lengths // shape.page_size), shape, 1) * shape.page_size
    fair = step.total * shape.kv_heads / (2 * shape.sm_count)
    assert chunk <= 1.6 * fair + shape.page_size


def test_a_row_that_would_be_waited_for_is_split_even_if_it_is_no_longer_than_a_share_of_the_card() -> None:
    lengths = [1000] * 127 + [5000]
    share = sum(lengths) * QWEN3_4B.kv_heads / QWEN3_4B.sm_count
    assert max(lengths) < 0.7 * share
    assert splits(DecodeRows(128, 5000, sum(lengths)), QWEN3_4B)


def test_even_rows_that_fill_the_card_stay_whole() -> None:
    for rows in (48, 64, 100, 256):
        assert not splits(even(rows, 2000), QWEN3_4B)


@settings(deadline=None)
@given(
    pages=st.lists(st.integers(1, 3000), min_size=1, max_size=80),
    kv_heads=st.sampled_from([1, 2, 4, 8, 40, 300]),
    group=st.sampled_from([1, 4, 5, 6, 20]),
    page_size=st.sampled_from([16, 64]),
    sm_count=st.sampled_from([8, 84, 132]),
)
def test_split_decode_plans_never_exceed_the_bound(
    pages: list[int], kv_heads: int, group: int, page_size: int, sm_count: int
) -> None:
    shape = AttentionShape(kv_heads * group, kv_heads, 128, page_size, sm_count)
    lists, row_tiles = np.array(pages, np.int64), -(-group // 16)
    chunk = decode_chunk_pages(lists, shape, row_tiles)
    assert chunk >= shape.min_chunk_pages
    size = size_fa2(np.ones_like(lists), lists, shape, 16, chunk)
    assert size.tiles <= max_decode_tiles(len(pages), row_tiles, shape)
    assert int(size.row_chunks.sum()) <= max_decode_tiles(len(pages), 1, shape)


def test_xqa_is_taken_for_short_even_steps_of_shapes_that_were_measured() -> None:
    assert uses_xqa(even(16, 1024), QWEN3_4B)
    assert not uses_xqa(even(16, 4096), QWEN3_4B)
    assert uses_xqa(even(8, 4096), AttentionShape(40, 8, 128, 64, 132))
    assert not uses_xqa(even(1, 64), AttentionShape(9, 3, 64, 16, 132))
    assert not uses_xqa(even(1, 64), AttentionShape(56, 8, 128, 16, 132))


def test_chunks_take_fa3_where_it_fills_more_than_half_of_the_card() -> None:
    def kernel(*queries: int) -> str:
        return chunk_kernel(np.array(queries, np.int64), QWEN3_4B)

    assert kernel(2048) == kernel(512) == kernel(300) == kernel(64, 64, 64) == "fa3"
    assert kernel(1) == kernel(128) == kernel(256) == "fa2"
