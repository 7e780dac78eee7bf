"""The FA2 plan against plans that FlashInfer's own scheduler made, and against what every plan must satisfy."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.planner import (
    AttentionShape,
    Fa2Buffers,
    Fa2Size,
    fill_fa2,
    search_chunk_pages,
    size_fa2,
    tile_q_for,
)

GOLDEN = Path(__file__).parent / "golden" / "flashinfer_plans.json.gz"
Case = dict[str, Any]


def recorded(kind: str) -> list[Case]:
    """Cases of one kind, each with FlashInfer's plan."""
    header, *rows = (json.loads(line) for line in gzip.decompress(GOLDEN.read_bytes()).splitlines())
    assert header == {"flashinfer": "0.6.18.post1"}
    return [row for row in rows if row["kind"] == kind]


def shape_of(case: Case) -> AttentionShape:
    return AttentionShape(*(case[name] for name in ("heads", "kv_heads", "head_dim", "page_size", "sm_count")))


def buffers(tiles: int, rows: int, query_rows: int, fill: int = -7) -> Fa2Buffers:
    """Buffers that hold rubbish where a plan writes nothing."""

    def ints(count: int) -> np.ndarray:
        return np.full(count, fill, np.int32)

    mask = np.full(tiles, 9, np.uint8)
    tile_arrays = [ints(tiles) for _ in range(3)]
    return Fa2Buffers(*tile_arrays, ints(rows + 1), ints(query_rows + 1), mask, ints(1), ints(1))


def as_flashinfer_would(case: Case) -> Fa2Size:
    """The size that FlashInfer chooses for a recorded case."""
    shape = shape_of(case)
    queries = np.array(case["queries"], np.int64)
    pages = -(-np.array(case["lengths"], np.int64) // shape.page_size)
    packed = queries * shape.group
    if case["graph"] and case["uniform"]:
        longest = case["uniform"] * shape.group
        tile_q = tile_q_for(longest, shape.head_dim)
        most_tiles = len(queries) * -(-longest // tile_q)
    elif case["graph"]:
        tile_q = tile_q_for((case["total_rows"] - len(queries) + 1) * shape.group, shape.head_dim)
        most_tiles = -(-case["total_rows"] * shape.group // tile_q) + len(queries) - 1
    else:
        tile_q = tile_q_for(int(packed.sum()) // len(queries), shape.head_dim)
        most_tiles = 0
    chunk = None if case["no_split"] else case["fixed_pages"]
    if chunk == -1:
        chunk = search_chunk_pages(-(-packed // tile_q), pages, shape)
    padded = max(shape.split_budget, most_tiles) if case["graph"] else None
    return size_fa2(queries, pages, shape, tile_q, chunk, padded_tiles=padded)


@pytest.mark.parametrize("mode", ["search", "graph", "never", "fixed"])
def test_plans_equal_those_of_flashinfer(mode: str) -> None:
    def mode_of(case: Case) -> str:
        named = {"graph": case["graph"], "never": case["no_split"], "fixed": case["fixed_pages"] > 0}
        return next((name for name, is_it in named.items() if is_it), "search")

    cases = [case for case in recorded("fa2") if mode_of(case) == mode]
    assert len(cases) > 40
    for case in cases:
        size, want = as_flashinfer_would(case), case["plan"]
        got = buffers(size.padded_tiles, len(case["queries"]), size.query_rows)
        fill_fa2(size, case["page_size"], got)
        info = want["info"]
        assert [size.padded_tiles, size.tile_q, size.masked, size.split] == [info[0], info[3], info[13], info[14]]
        assert size.tiles == want["tiles"]
        for name in ("request_indices", "qo_tile_indices", "kv_tile_indices"):
            surplus = [0] * (size.padded_tiles - size.tiles)
            assert getattr(got, name).tolist() == want[name] + surplus
        assert got.o_indptr.tolist() == want["o_indptr"]
        assert got.total_num_rows.tolist() == [sum(case["queries"])]
        if mode != "never":  # there FlashInfer's number overflows, and the kernel does not look at it
            assert got.kv_chunk_size.tolist() == want["kv_chunk_size"]
        if size.split:
            assert got.merge_indptr.tolist() == want["merge_indptr"]
            assert got.block_valid_mask.tolist() == [1] * size.tiles + [0] * (size.padded_tiles - size.tiles)


def test_there_are_recorded_plans_enough_and_of_every_kind() -> None:
    cases = recorded("fa2")
    assert len(cases) + len(recorded("fa3")) >= 300
    assert {case["heads"] // case["kv_heads"] for case in cases} >= {1, 3, 4, 5, 6}
    assert {case["plan"]["info"][14] for case in cases} == {0, 1}
    assert {case["plan"]["info"][3] for case in cases} == {16, 64, 128}


SHAPES = st.builds(
    lambda kv_heads, group, head_dim, page_size, sm_count: AttentionShape(
        kv_heads * group, kv_heads, head_dim, page_size, sm_count
    ),
    st.sampled_from([1, 2, 4, 8, 40]),
    st.sampled_from([1, 3, 4, 5, 6, 8, 20]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([16, 64]),
    st.sampled_from([16, 84, 132]),
)
ROWS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8)


@settings(deadline=None)
@given(shape=SHAPES, rows=ROWS, tile_q=st.sampled_from([16, 64, 128]), chunk=st.integers(1, 70), graph=st.booleans())
def test_every_query_meets_every_page_once(
    shape: AttentionShape, rows: list[tuple[int, int]], tile_q: int, chunk: int, graph: bool
) -> None:
    queries, pages = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    exact = size_fa2(queries, pages, shape, tile_q, chunk)
    size = size_fa2(queries, pages, shape, tile_q, chunk, padded_tiles=exact.tiles + 3 if graph else None)
    got = buffers(size.padded_tiles, len(rows), size.query_rows)
    fill_fa2(size, shape.page_size, got)
    tiles = list(zip(got.request_indices, got.qo_tile_indices, got.kv_tile_indices, strict=True))[: size.tiles]
    assert len(set(tiles)) == size.tiles
    step = int(got.kv_chunk_size[0]) // shape.page_size
    for row, (query, count) in enumerate(rows):
        mine = {(q, kv) for of, q, kv in tiles if of == row}
        query_tiles, chunks = -(-query * shape.group // tile_q), -(-count // step)
        assert mine == {(q, kv) for q in range(query_tiles) for kv in range(chunks)}
        assert got.o_indptr[row + 1] - got.o_indptr[row] == query * chunks
    assert size.split or step >= max(count for _, count in rows)
    if size.split:
        assert got.merge_indptr[0] == 0
        assert np.diff(got.merge_indptr).tolist() == [-(-count // step) for query, count in rows for _ in range(query)]
        assert got.merge_indptr[-1] == got.o_indptr[-1] == size.partial_rows
        assert got.block_valid_mask.tolist() == [1] * size.tiles + [0] * (size.padded_tiles - size.tiles)


@settings(deadline=None)
@given(shape=SHAPES, rows=ROWS)
def test_a_searched_chunk_is_the_smallest_that_fills_the_card_once(
    shape: AttentionShape, rows: list[tuple[int, int]]
) -> None:
    queries, pages = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    row_tiles = -(-queries * shape.group // 64)
    chunk = search_chunk_pages(row_tiles, pages, shape)

    def tiles(size: int) -> int:
        return int((row_tiles * -(-pages // size)).sum())

    if chunk < pages.max():
        assert tiles(chunk) <= shape.split_budget
    if shape.min_chunk_pages < chunk:
        assert tiles(chunk - 1) > shape.split_budget


def test_an_unsplit_plan_leaves_the_buffers_of_the_merge_alone() -> None:
    shape = AttentionShape(32, 8, 128, 16, 132)
    ones = np.ones(3, np.int64)
    got = buffers(3, 3, 3)
    fill_fa2(size_fa2(ones, ones * 50, shape, 16, None), 16, got)
    assert set(got.merge_indptr) == {-7}
    assert set(got.block_valid_mask) == {9}


def test_what_no_plan_can_hold_is_refused() -> None:
    shape = AttentionShape(32, 8, 128, 16, 132)
    ones = np.ones(2, np.int64)
    for queries, pages in ((ones * 0, ones), (ones, ones * 0), (ones[:0], ones[:0])):
        with pytest.raises(ValueError, match="at least one"):
            size_fa2(queries, pages, shape, 16, None)
    with pytest.raises(ValueError, match="12 tiles, but the graph's grid 11"):
        size_fa2(ones, ones * 6, shape, 16, 1, padded_tiles=11)
    with pytest.raises(ValueError, match="must be split"):
        size_fa2(ones, ones, shape, 16, None, padded_tiles=11)
