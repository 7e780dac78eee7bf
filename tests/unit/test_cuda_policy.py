"""Which kernel, split or whole: against the fastest variant measured, and for the cases that must not go wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.attention_plan import AttentionPlans
from engine.cuda.flashinfer_raw import signatures
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.cuda.planner import AttentionShape, size_fa2
from engine.cuda.policy import (
    DecodeRows,
    chunk_kernel,
    decode_chunk_pages,
    max_decode_tiles,
    splits,
    uses_xqa,
)
from engine.cuda.staging import HostDevice
from engine.plan import PlanCapacity

QWEN3_4B = AttentionShape(heads=32, kv_heads=8, head_dim=128, page_size=16, sm_count=132)
FOUR_KV_HEADS = AttentionShape(heads=20, kv_heads=4, head_dim=128, page_size=16, sm_count=132)
# Microseconds a layer on an H200, page 16: whole rows, split rows under a graph.
MEASURED = [
    (QWEN3_4B, 1, 1024, 17.8, 11.5),
    (QWEN3_4B, 16, 1024, 27.0, 28.7),
    (QWEN3_4B, 64, 1024, 76.0, 80.7),
    (QWEN3_4B, 256, 1024, 278.0, 286.9),
    (QWEN3_4B, 1, 4096, 56.5, 14.9),
    (QWEN3_4B, 16, 4096, 79.8, 76.0),
    (QWEN3_4B, 64, 4096, 254.0, 258.1),
    (QWEN3_4B, 256, 4096, 991.1, 993.3),
    (FOUR_KV_HEADS, 1, 1024, 17.9, 11.4),
    (FOUR_KV_HEADS, 16, 1024, 20.9, 19.5),
    (FOUR_KV_HEADS, 64, 1024, 41.0, 44.9),
    (FOUR_KV_HEADS, 256, 1024, 143.7, 149.1),
    (FOUR_KV_HEADS, 1, 4096, 58.3, 13.2),
    (FOUR_KV_HEADS, 16, 4096, 67.4, 44.7),
    (FOUR_KV_HEADS, 64, 4096, 132.6, 138.0),
    (FOUR_KV_HEADS, 256, 4096, 510.2, 507.6),
]
KERNELS = json.loads((Path(__file__).parent / "golden" / "attention_kernels.json").read_text())
"""Times of XQA and FA3 over FA2's, as `tests/gpu/check_plan.py` measured them on an H200."""


def shape_of(heads: int, kv_heads: int, page_size: int) -> AttentionShape:
    return AttentionShape(heads, kv_heads, 128, page_size, sm_count=132)


def even(rows: int, length: int) -> DecodeRows:
    return DecodeRows(rows, length, rows * length)


@pytest.mark.parametrize("row", MEASURED)
def test_split_or_whole_is_the_faster_that_was_measured_or_nearly(
    row: tuple[AttentionShape, int, int, float, float],
) -> None:
    shape, rows, length, whole, split = row
    chosen = split if splits(even(rows, length), shape) else whole
    assert chosen <= 1.03 * min(whole, split)


def test_xqa_is_taken_where_it_was_measured_to_win_clearly_and_nowhere_else() -> None:
    taken, winners = [], []
    for heads, kv_heads, page_size, rows, length, ratio in KERNELS["xqa"]["rows"]:
        chosen = uses_xqa(even(rows, length), shape_of(heads, kv_heads, page_size))
        if chosen:
            taken.append(ratio)
        if ratio <= 0.95:
            winners.append(chosen)
    assert max(taken) <= 0.97
    assert sum(winners) >= 0.9 * len(winners)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("length", [1, 64, 1000, 4096, 8192, 40000])
def test_xqa_never_computes_a_lone_row(length: int, page_size: int) -> None:
    assert not uses_xqa(even(1, length), shape_of(32, 8, page_size))
    assert not uses_xqa(even(3, length), shape_of(20, 4, page_size))


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


def test_where_chunks_take_fa3_it_was_measured_to_be_the_faster_one() -> None:
    for heads, kv_heads, page_size, tokens, _, ratio in KERNELS["chunks"]["rows"]:
        if chunk_kernel(np.array([tokens], np.int64), shape_of(heads, kv_heads, page_size)) == "fa3":
            assert ratio < 1, (heads, kv_heads, page_size, tokens)


@pytest.mark.parametrize("context", [1500, 8192, 40000])
@pytest.mark.parametrize("shape", [shape_of(32, 8, 16), shape_of(20, 4, 64)])
def test_probes_find_xqa_in_every_bucket_whose_steps_may_take_it(shape: AttentionShape, context: int) -> None:
    step = PlanCapacity(64, 2048, context, shape.page_size, shape.heads, shape.kv_heads, shape.head_dim)
    layout = AttentionLayout(AttentionCapacity(step, shape.sm_count, sm90=True, xqa=True))
    plans = AttentionPlans(layout, signatures("0.6.18.post1"), HostDevice(layout.nbytes))
    for bucket in (1, 2, 3, 4, 8, 12, 16, 24, 32, 48):
        launches = [plans.update(rows, bucket).decode for rows in plans.probes(bucket)]
        found = any(launch is not None and launch.kernel == "xqa" for launch in launches)
        assert found == any(uses_xqa(even(bucket, length), shape) for length in range(1, context + 1))
