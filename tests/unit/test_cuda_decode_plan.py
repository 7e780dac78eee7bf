"""Decode plans against the general planner, which equals FlashInfer's recorded ones, in every slot of a ring."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.attention_plan import AttentionPlans, StepRows
from engine.cuda.flashinfer_raw import signatures
from engine.cuda.layout import AttentionCapacity, AttentionLayout, Range
from engine.cuda.planner import (
    AttentionShape,
    Fa2Buffers,
    Fa2Size,
    fill_fa2,
    search_chunk_pages,
    search_even_chunk_pages,
    size_fa2,
    summary,
)
from engine.cuda.policy import DecodeRows, decode_chunk_pages, max_decode_tiles, splits
from engine.cuda.staging import HostDevice
from engine.plan import PlanCapacity

STEP = PlanCapacity(
    max_bucket=24, max_step_tokens=100, context_limit=4000, page_size=16, heads=20, kv_heads=4, head_dim=128
)
NONE = np.zeros(0, np.int64)
SHAPES = [(32, 8, 128), (20, 4, 128), (24, 4, 256), (9, 3, 64), (40, 1, 128), (142, 1, 256)]
"""The last has two query tiles a decode row."""


class DirtyDevice(HostDevice):
    """Pinned memory holds rubbish: a plan may rely on nothing that it did not write."""

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, 0x5A, np.uint8)


def general(lengths: list[int], bucket: int | None, capacity: AttentionCapacity, always_split: bool) -> Fa2Size:
    """What `size_fa2` makes of decode rows under the same policy."""
    filled = np.array(lengths + [1] * ((bucket or len(lengths)) - len(lengths)), np.int64)
    pages, ones, shape = -(-filled // capacity.step.page_size), np.ones_like(filled), capacity.shape
    split = always_split or splits(DecodeRows(len(filled), int(filled.max()), int(filled.sum())), shape)
    chunk = decode_chunk_pages(pages, shape, capacity.decode_row_tiles)
    if not split or (chunk * capacity.step.page_size >= filled.max() and not always_split):
        return size_fa2(ones, pages, shape, capacity.decode_tile_q, None)
    grid = None if bucket is None else max_decode_tiles(bucket, capacity.decode_row_tiles, shape)
    return size_fa2(ones, pages, shape, capacity.decode_tile_q, chunk, padded_tiles=grid)


def arrays_of(size: Fa2Size, page_size: int) -> Fa2Buffers:
    rows, tiles = len(size.queries), size.padded_tiles
    counts = [tiles, tiles, tiles, rows + 1, rows + 1, tiles, 1, 1]
    kinds = [np.uint8 if name == "block_valid_mask" else np.int32 for name in Fa2Buffers.__slots__]
    out = Fa2Buffers(*(np.zeros(count, kind) for count, kind in zip(counts, kinds, strict=True)))
    fill_fa2(size, page_size, out)
    return out


ROWS = st.lists(st.one_of(st.integers(1, 100), st.integers(1, 4001)), min_size=1, max_size=24)


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(st.tuples(ROWS, st.sampled_from(["free", "bucket", "always split"])), min_size=1, max_size=7),
    shape=st.sampled_from(SHAPES),
    page_size=st.sampled_from([16, 64]),
    sms=st.sampled_from([4, 20, 132]),
)
def test_the_kernel_finds_what_the_general_planner_writes(
    steps: list[tuple[list[int], str]], shape: tuple[int, int, int], page_size: int, sms: int
) -> None:
    heads, kv_heads, head_dim = shape
    step = replace(STEP, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)
    capacity = AttentionCapacity(step, sm_count=sms, sm90=False, xqa=False)
    layout = AttentionLayout(capacity)
    device = DirtyDevice(layout.nbytes)
    plans = AttentionPlans(layout, signatures("0.6.18.post1"), device)
    for lengths, way in steps:
        bucket, always_split = None if way == "free" else min(24, len(lengths) + 3), way == "always split"
        rows = StepRows(np.array(lengths, np.int64), NONE, NONE)
        launch = plans.update(rows, bucket, always_split=always_split).decode
        want = general(lengths, bucket, capacity, always_split)
        assert launch is not None
        info = launch.info
        found = (launch.rows, launch.split, info[0], info[1], info[3], info[13], info[14])
        grid = (want.padded_tiles, want.query_rows, want.tile_q, int(want.masked), int(want.split))
        assert found == (len(want.queries), want.split, *grid)
        places = {"request_indices": 4, "qo_tile_indices": 5, "kv_tile_indices": 6, "o_indptr": 8}
        if want.split:
            places |= {"merge_indptr": 7, "kv_chunk_size": 9, "block_valid_mask": 12}
        if want.masked:
            places["total_num_rows"] = 2
        expected = arrays_of(want, page_size)
        for name, place in places.items():
            mine = getattr(expected, name)
            there = device.arena[info[place] : info[place] + mine.nbytes].view(mine.dtype)
            assert there.tolist() == mine.tolist(), name


def test_a_step_that_splits_no_row_copies_nothing() -> None:
    capacity = AttentionCapacity(STEP, sm_count=20, sm90=True, xqa=False)
    layout = AttentionLayout(capacity)
    copies: list[Range] = []

    class Counting(HostDevice):
        def copy(self, source: np.ndarray, at: Range) -> None:
            copies.append(at)

    plans = AttentionPlans(layout, signatures("0.6.18.post1"), Counting(layout.nbytes))
    for lengths in ([900] * 24, [1000] * 20, [901] * 24):
        launch = plans.update(StepRows(np.array(lengths, np.int64), NONE, NONE)).decode
        assert launch is not None
        assert not launch.split
    assert copies == [layout.ranges["whole"]]


@settings(deadline=None)
@given(
    pages=st.lists(st.integers(1, 2501), min_size=1, max_size=140),
    row_tiles=st.sampled_from([1, 2, 5]),
    kv_heads=st.sampled_from([1, 2, 4, 8, 40]),
    page_size=st.sampled_from([16, 64]),
)
def test_a_search_for_even_rows_ends_where_the_general_one_does(
    pages: list[int], row_tiles: int, kv_heads: int, page_size: int
) -> None:
    shape = AttentionShape(kv_heads * 4, kv_heads, 128, page_size, 132)
    lists = np.array(pages, np.int64)
    found = search_chunk_pages(np.full(len(pages), row_tiles), lists, shape)
    # As FlashInfer does it: halve until nothing is left.
    low, high = shape.min_chunk_pages, max(pages)
    while low < high:
        middle = (low + high) // 2
        if row_tiles * sum(-(-count // middle) for count in pages) > shape.split_budget:
            low = middle + 1
        else:
            high = middle
    assert found == low
    for most in (low - 1, low, low + 7, 10**6):
        even = search_even_chunk_pages(lists, summary(lists), row_tiles, shape, most)
        assert even == low if low <= most else even > most


@pytest.mark.parametrize("bucket", [None, 24])
@pytest.mark.parametrize(("rows", "length"), [(1, 100), (24, 100), (24, 290)])
def test_rows_of_one_chunk_each_are_not_merged(rows: int, length: int, bucket: int | None) -> None:
    capacity = AttentionCapacity(STEP, sm_count=132, sm90=False, xqa=False)
    layout = AttentionLayout(capacity)
    plans = AttentionPlans(layout, signatures("0.6.18.post1"), HostDevice(layout.nbytes))
    launch = plans.update(StepRows(np.full(rows, length, np.int64), NONE, NONE), bucket).decode
    assert launch is not None
    assert not launch.split
