"""FA3's work lists against FlashInfer's recorded loads, and complete."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.fa3 import Fa3Buffers, Fa3Size, fill_fa3, max_works_per_head, size_fa3
from engine.cuda.planner import AttentionShape
from tests.unit.test_cuda_planner import recorded, shape_of


def plan(queries: list[int], lengths: list[int], shape: AttentionShape) -> tuple[Fa3Buffers, int, np.ndarray]:
    """Work lists, their number, and the loads of the CTAs."""
    query, length = np.array(queries, np.int64), np.array(lengths, np.int64)
    pages = -(-length // shape.page_size)
    size = size_fa3(query, length, shape)
    out = Fa3Buffers(np.full(shape.sm_count + 1, -7, np.int32), *(np.full(size.works, -7, np.int32) for _ in range(7)))
    fill_fa3(size, np.cumsum(pages) - pages, shape.sm_count, out)
    tile = 192 if shape.head_dim == 64 else 128
    seen = np.minimum(out.kv_lens - out.qo_lens + (out.qo_tile_indices + 1) * tile, out.kv_lens) + 2 * tile
    of_cta = np.repeat(np.arange(shape.sm_count), np.diff(out.work_indptr))
    return out, size.works, np.bincount(of_cta, weights=seen, minlength=shape.sm_count)


def test_loads_equal_those_of_flashinfer() -> None:
    cases = recorded("fa3")
    assert len(cases) >= 40
    for case in cases:
        _, works, loads = plan(case["queries"], case["lengths"], shape_of(case))
        assert works == case["plan"]["works"]
        assert sorted(loads.tolist()) == case["plan"]["loads"]


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 900)), min_size=1, max_size=6),
    head_dim=st.sampled_from([64, 128, 256]),
)
def test_every_tile_of_every_head_is_computed_once(rows: list[tuple[int, int]], head_dim: int) -> None:
    shape = AttentionShape(6, 2, head_dim, 16, 20)
    tile = 192 if head_dim == 64 else 128
    queries, lengths = [query for query, _ in rows], [query + old for query, old in rows]
    out, works, _ = plan(queries, lengths, shape)
    got = set(zip(out.batch_indices, out.qo_tile_indices, out.head_indices, strict=True))
    want = {(row, t, h) for row, query in enumerate(queries) for t in range(-(-query // tile)) for h in range(6)}
    assert got == want
    assert works == len(want) == out.work_indptr[-1]
    assert works <= 6 * max_works_per_head(sum(queries), len(queries), head_dim)
    row = out.batch_indices
    assert out.qo_lens.tolist() == np.array(queries)[row].tolist()
    assert out.kv_lens.tolist() == np.array(lengths)[row].tolist()
    assert out.qo_indptr.tolist() == (np.cumsum(queries) - queries)[row].tolist()
    pages = -(-np.array(lengths) // 16)
    assert out.kv_indptr.tolist() == (np.cumsum(pages) - pages)[row].tolist()


def test_beyond_4096_tiles_every_head_follows_one_list() -> None:
    def size(tiles: int) -> Fa3Size:
        tokens = np.full(1, 128 * tiles)
        return size_fa3(tokens, tokens, AttentionShape(32, 8, 128, 16, 132))

    assert size(4097).same_schedule
    assert size(4097).works == 4097
    assert not size(4096).same_schedule


def test_rows_that_cannot_be_are_refused() -> None:
    shape = AttentionShape(32, 8, 128, 16, 132)
    for queries, lengths in (([], []), ([0], [4]), ([5], [4])):
        with pytest.raises(ValueError, match="1 <= query tokens <= length"):
            size_fa3(np.array(queries, np.int64), np.array(lengths, np.int64), shape)
