"""Bounds of a step, and the arena that is sized by them."""

from dataclasses import replace

import numpy as np
import pytest

from engine.cpu.arena import PlanArena
from engine.cpu.inputs import StepInputs
from engine.messages import Sampling
from engine.plan import ALIGNMENT, INT32_MAX, PlanCapacity, PlanError, PlanLayout
from engine.step import Chunk, RowStart, StepPlan
from kv.table import TableUpdate

CAPACITY = PlanCapacity(
    max_bucket=4, max_step_tokens=32, context_limit=64, page_size=16, heads=6, kv_heads=3, head_dim=8
)
PAGES = 20


def step(**changes: object) -> StepPlan:
    empty = StepPlan(0, [], [], [], [], [])
    return replace(empty, **changes)


def test_pages_cover_the_surplus_token_behind_the_context_limit() -> None:
    assert CAPACITY.max_context == 65
    assert CAPACITY.max_pages_per_row == 5
    assert replace(CAPACITY, context_limit=63).max_pages_per_row == 4


def test_page_lists_are_bounded_by_rows_not_by_the_pool() -> None:
    assert CAPACITY.max_pages == 4 * 5
    assert CAPACITY.max_pages > 7  # a pool of 7 pages shared by every row still fits


@pytest.mark.parametrize(
    ("changes", "dimension"),
    [
        ({"context_limit": INT32_MAX}, "max_context"),
        ({"context_limit": 1 << 30, "max_bucket": 32}, "max_pages"),
        ({"context_limit": 1 << 26, "max_bucket": 32}, "slots of the page lists"),
        ({"max_step_tokens": 1 << 26}, "query elements"),
    ],
)
def test_what_does_not_fit_int32_is_refused_with_both_numbers(changes: dict[str, int], dimension: str) -> None:
    with pytest.raises(PlanError, match=dimension) as caught:
        replace(CAPACITY, **changes)
    assert caught.value.value > caught.value.limit == INT32_MAX
    assert str(caught.value.value) in str(caught.value)
    assert str(INT32_MAX) in str(caught.value)


def test_a_pool_with_slots_beyond_int32_is_refused() -> None:
    CAPACITY.check_pool(INT32_MAX // 16)
    with pytest.raises(PlanError, match="slots of the KV pool"):
        CAPACITY.check_pool(INT32_MAX // 16 + 1)


@pytest.mark.parametrize(
    "changes", [{"max_bucket": 0}, {"heads": 4}, {"max_step_tokens": 3}, {"page_size": -1}, {"context_limit": 0}]
)
def test_senseless_bounds_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be at least|evenly"):
        replace(CAPACITY, **changes)


def test_buffers_are_aligned_and_do_not_overlap() -> None:
    layout = PlanLayout(CAPACITY)
    end = 0
    for buffer in layout.buffers:
        assert buffer.offset % ALIGNMENT == 0
        assert buffer.offset >= end
        end = buffer.offset + buffer.nbytes
    assert end <= layout.nbytes < end + ALIGNMENT
    assert len({buffer.name for buffer in layout.buffers}) == len(layout.buffers)


def test_the_arena_has_exactly_the_bytes_of_the_layout_and_every_view_is_writable_on_its_own() -> None:
    layout = PlanLayout(CAPACITY)
    arena = PlanArena(layout)
    assert arena.memory.nbytes == layout.nbytes
    for number, buffer in enumerate(layout.buffers):
        arena.tensor(buffer.name).fill_(number + 1)
    for number, buffer in enumerate(layout.buffers):
        assert arena.tensor(buffer.name).shape == buffer.shape
        assert (arena.array(buffer.name) == number + 1).all()


BAD = [
    (step(decode_rows=[0, 1, 2, 3, 0], decode_lengths=[1] * 5), "rows of the step is 5, but at most 4"),
    (step(chunks=[Chunk(0, 0, [1] * 33, True)]), "tokens of the step is 33, but at most 32"),
    (step(decode_rows=[0], decode_lengths=[66]), "length of row 0 is 66, but at most 65"),
    (step(chunks=[Chunk(1, 60, [1] * 6, True)]), "length of row 1 is 66, but at most 65"),
    (step(decode_rows=[4], decode_lengths=[1]), "row slot is 4, but at most 3"),
    (step(starts=[RowStart(-1, Sampling())]), "row slot is -1"),
    (step(table=[TableUpdate(0, 5, 1)]), "page index of row 0 is 5, but at most 4"),
    (step(table=[TableUpdate(0, 0, PAGES)]), "page of row 0 is 20, but at most 19"),
    (step(table=[TableUpdate(9, 0, 1)]), "row slot of a table update is 9"),
    (step(decode_rows=[2, 2], decode_lengths=[1, 1]), "stands twice"),
    (step(decode_rows=[2], decode_lengths=[1], chunks=[Chunk(2, 0, [1], True)]), "stands twice"),
    (step(decode_rows=[2], decode_lengths=[]), "1 decode rows, but 0 lengths"),
    (step(decode_rows=[2], decode_lengths=[0]), "length of row 2 is 0"),
    (step(chunks=[Chunk(2, 0, [], True)]), "has 0 tokens"),
    (step(chunks=[Chunk(2, -1, [1], True)]), "at position -1"),
]


@pytest.mark.parametrize(("plan", "message"), BAD, ids=[message for _, message in BAD])
def test_a_step_that_does_not_fit_is_refused_by_name(plan: StepPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CAPACITY.check(plan, PAGES)


def test_the_largest_step_fits_exactly() -> None:
    CAPACITY.check(step(decode_rows=[0, 1, 2], decode_lengths=[65] * 3, chunks=[Chunk(3, 36, [1] * 29, True)]), PAGES)


def written(plan: StepPlan, earlier: StepPlan | None = None) -> PlanArena:
    arena = PlanArena(PlanLayout(CAPACITY))
    inputs = StepInputs(CAPACITY, arena)
    if earlier is not None:
        inputs.write(earlier)
    inputs.write(plan)
    return arena


TABLE = [TableUpdate(0, 0, 5), TableUpdate(0, 1, 6), TableUpdate(0, 2, 7), TableUpdate(1, 0, 5), TableUpdate(1, 1, 9)]


@pytest.mark.parametrize(
    ("length", "pages", "last"), [(1, [5], 1), (15, [5], 15), (16, [5], 16), (17, [5, 6], 1), (33, [5, 6, 7], 1)]
)
def test_a_row_lists_exactly_the_pages_of_its_length(length: int, pages: list[int], last: int) -> None:
    """Pages allocated ahead of need stay out: kernels derive the length from the list."""
    arena = written(step(decode_rows=[0], decode_lengths=[length], table=TABLE))
    count = int(arena.array("page_indptr")[1])
    assert arena.array("page_indices")[:count].tolist() == pages
    assert (count - 1) * 16 + int(arena.array("last_page_len")[0]) == length
    assert arena.array("last_page_len")[0] == last


def test_a_step_of_decode_rows_and_chunks_is_written_in_order() -> None:
    plan = step(decode_rows=[1], decode_lengths=[17], chunks=[Chunk(0, 14, [100, 101, 102, 103], True)], table=TABLE)
    arena = written(plan)
    assert arena.array("query_indptr")[:3].tolist() == [0, 1, 5]
    assert arena.array("page_indptr")[:3].tolist() == [0, 2, 4]
    assert arena.array("page_indices")[:4].tolist() == [5, 9, 5, 6]
    assert arena.array("positions")[:5].tolist() == [16, 14, 15, 16, 17]
    assert arena.array("slot_mapping")[:5].tolist() == [9 * 16, 5 * 16 + 14, 5 * 16 + 15, 6 * 16, 6 * 16 + 1]
    assert arena.array("token_ids")[1:5].tolist() == [100, 101, 102, 103]
    assert arena.array("sampled_tokens_at")[:2].tolist() == [0, 4]
    assert arena.array("sampled_slots")[:2].tolist() == [1, 0]
    assert arena.array("sampled_positions")[:2].tolist() == [17, 18]


def test_a_row_start_sets_all_parameters_and_keeps_the_bits_of_the_seed() -> None:
    sampling = Sampling(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=(1 << 64) - 2)
    arena = written(step(starts=[RowStart(2, sampling)]))
    row = [arena.array(name)[2] for name in ("temperature", "top_k", "top_p", "min_p")]
    assert row == [0.5, 7, 0.25, 0.125]
    assert np.uint64(arena.array("seed").view(np.uint64)[2]) == np.uint64((1 << 64) - 2)
