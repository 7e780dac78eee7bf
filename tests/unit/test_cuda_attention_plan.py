"""A step's attention plans in the arena: capacities, places, errors, fixed launches, FlashInfer's signatures."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.attention_plan import AttentionPlans, StepRows
from engine.cuda.flashinfer_raw import FlashInferError, PagedCall, XqaCall, signatures
from engine.cuda.layout import AttentionCapacity, AttentionLayout, Range
from engine.cuda.staging import HostDevice
from engine.plan import ALIGNMENT, INT32_MAX, PlanCapacity, PlanError

STEP = PlanCapacity(
    max_bucket=24, max_step_tokens=700, context_limit=4000, page_size=16, heads=20, kv_heads=4, head_dim=128
)
HOPPER = AttentionCapacity(STEP, sm_count=132, sm90=True, xqa=False)
AMPERE = replace(HOPPER, sm_count=84, sm90=False)
RAW = signatures("0.6.18.post1")


def lane(capacity: AttentionCapacity) -> tuple[AttentionPlans, HostDevice]:
    layout = AttentionLayout(capacity)
    device = HostDevice(layout.nbytes)
    return AttentionPlans(layout, RAW, device), device


def rows(decode: list[int], chunks: list[tuple[int, int]] = ()) -> StepRows:  # type: ignore[assignment]
    """Decode rows by length, and chunks by tokens and length of their row."""
    pairs = np.array(chunks, np.int64).reshape(-1, 2)
    return StepRows(np.array(decode, np.int64), pairs[:, 0], pairs[:, 1])


def read(plans: AttentionPlans, device: HostDevice, name: str, count: int) -> list[int]:
    buffer = plans.layout.buffers[name]
    values = device.arena[buffer.offset : buffer.offset + buffer.nbytes].view(buffer.dtype)
    return [int(value) for value in values.reshape(-1)[:count]]


@pytest.mark.parametrize("capacity", [HOPPER, AMPERE, replace(HOPPER, xqa=True)])
def test_the_layout_is_one_arena_without_overlaps_in_which_a_step_is_one_range(capacity: AttentionCapacity) -> None:
    layout = AttentionLayout(capacity)
    ends = 0
    for buffer in layout.buffers.values():
        assert buffer.offset % ALIGNMENT == 0
        assert ends <= buffer.offset < ends + ALIGNMENT
        ends = buffer.offset + buffer.nbytes
    assert ends <= layout.nbytes < ends + ALIGNMENT
    ranges = list(layout.ranges.values())
    assert list(layout.ranges) == ["whole", "chunks", "decode", *(["fa3"] if capacity.sm90 else []), "device"]
    assert all(before.end == after.begin for before, after in pairwise(ranges))
    assert layout.staged_nbytes == layout.ranges["device"].begin
    assert ("xqa_page_table" in layout.buffers) == capacity.xqa


def test_partial_results_take_what_the_kernel_writes_and_no_more() -> None:
    buffers = AttentionLayout(HOPPER).buffers
    assert buffers["decode_partials"].nbytes == (24 + 2 * 66 + 1) * 20 * 128 * 2
    assert buffers["decode_lse"].nbytes == (24 + 2 * 66 + 1) * 20 * 4
    assert buffers["chunk_partials"].nbytes == (2 * 132 // 4) * 128 // 5 * 20 * 128 * 2


STEPS = st.tuples(
    st.lists(st.one_of(st.integers(1, 100), st.integers(1, 4001)), max_size=24),
    st.lists(st.tuples(st.integers(1, 120), st.integers(0, 3800)), max_size=5),
).filter(lambda step: 0 < len(step[0]) + len(step[1]) <= 24)


@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=3),
    sm90=st.booleans(),
    shape=st.sampled_from([(20, 4, 128), (24, 4, 256), (9, 3, 64), (40, 1, 128)]),
    sms=st.sampled_from([4, 84, 132]),
)
def test_no_step_exceeds_the_capacity_and_every_list_is_of_its_step(
    steps: list[tuple[list[int], list[tuple[int, int]]]], sm90: bool, shape: tuple[int, int, int], sms: int
) -> None:
    heads, kv_heads, head_dim = shape
    step = replace(STEP, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    plans, device = lane(AttentionCapacity(step, sm_count=sms, sm90=sm90, xqa=False))
    for decode, chunks in steps:
        sizes = [(tokens, tokens + cached) for tokens, cached in chunks]
        planned = plans.update(rows(decode, sizes))
        assert (planned.decode is None) == (not decode)
        assert (planned.chunks is None) == (not chunks)
        if planned.decode:
            plan = "decode" if planned.decode.split else "whole"
            tiles, last = planned.decode.info[0], read(plans, device, f"{plan}_request_indices", 4096)
            assert sorted(set(last[:tiles])) == list(range(len(decode)))
            ends = read(plans, device, f"{plan}_o_indptr", len(decode) + 1)
            assert ends[-1] * (-(-(heads // kv_heads) // planned.decode.info[3])) == tiles
        if planned.chunks and planned.chunks.kernel == "fa3":
            works = read(plans, device, "fa3_work_indptr", sms + 1)[-1]
            assert set(read(plans, device, "fa3_batch_indices", works)) == set(range(len(chunks)))
            firsts = np.cumsum([-(-length // 16) for length in [*decode, *(end for _, end in sizes)]])
            expected = {0, *firsts.tolist()} if not decode else set(firsts.tolist())
            assert set(read(plans, device, "fa3_kv_indptr", works)) <= expected
        elif planned.chunks:
            assert set(read(plans, device, "chunk_request_indices", planned.chunks.info[0])) == set(range(len(chunks)))
            assert read(plans, device, "chunk_total_num_rows", 1) == [planned.chunks.tokens]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (rows([5] * 25), "rows of the step is 25, but at most 24 fit"),
        (rows([5] * 4, [(697, 697)]), "tokens of the step is 701, but at most 700 fit"),
        (rows([4002]), "length of a row is 4002, but at most 4001 fit"),
        (rows([1], [(9, 4002)]), "length of a row is 4002, but at most 4001 fit"),
        (rows([3, 0]), "length of a decode row is 0"),
        (rows([3], [(5, 4)]), "1 <= query tokens <= length"),
        (rows([3], [(0, 4)]), "1 <= query tokens <= length"),
    ],
)
def test_a_step_beyond_a_capacity_by_one_names_both_numbers_and_leaves_the_last_plan(
    step: StepRows, message: str
) -> None:
    plans, device = lane(HOPPER)
    for before in (rows([700, 3000], [(300, 900)]), rows([5] * 24), rows([4001], [(699, 4001)])):
        kept = plans.update(before)
        memory = device.arena.copy()
        with pytest.raises(ValueError, match=message):
            plans.update(step)
        assert plans.current is kept
        assert np.array_equal(device.arena, memory)
        assert plans.update(before) == kept
        assert kept.decode is not None
        plan = "decode" if kept.decode.split else "whole"
        assert read(plans, device, f"{plan}_request_indices", kept.decode.info[0])[-1] == len(before.decode_lengths) - 1


@pytest.mark.parametrize(
    ("smaller", "message"),
    [
        ("max_decode_tiles", "tiles of the decode plan is"),
        ("decode_partial_rows", "partial rows of the decode plan is"),
        ("max_works", "works of the FA3 plan is"),
    ],
)
def test_every_plan_is_checked_against_its_buffers_before_anything_is_written(
    smaller: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttentionCapacity, smaller, property(lambda self: 3))
    plans, device = lane(HOPPER)
    memory = device.arena.copy()
    with pytest.raises(PlanError, match=rf"{message} \d+, but at most 3 fit"):
        plans.update(rows([4000, 30], [(600, 600)]))
    assert np.array_equal(device.arena, memory)


def test_launches_of_a_bucket_are_the_same_in_every_step() -> None:
    plans, device = lane(HOPPER)
    seen: dict[bool, list[list[int]]] = {False: [], True: []}
    for decode in ([4000], [100] * 13, [16] * 16, [1, 4001, 7], [900] * 16, [1000] * 15 + [4000]):
        launch = plans.update(rows(decode), bucket=16).decode
        assert launch is not None
        assert launch.rows == launch.tokens == 16
        seen[launch.split].append(launch.info)
        if launch.split:
            chunk = read(plans, device, "decode_kv_chunk_size", 1)[0]
            tiles = sum(-(-length // chunk) for length in [*decode, *[1] * (16 - len(decode))])
            mask = read(plans, device, "decode_block_valid_mask", launch.info[0])
            assert mask == [1] * tiles + [0] * (launch.info[0] - tiles)
        always = plans.update(rows(decode), bucket=16, always_split=True).decode
        assert always is not None
        seen[True].append(always.info)
    assert len(seen[False]) >= 2
    for infos in seen.values():
        assert all(info == infos[0] for info in infos)
    assert len(plans.probes(16)) == 2
    assert len(plans.probes(16, always_split=True)) == 1


def test_a_bucket_takes_decode_rows_only() -> None:
    plans, _ = lane(HOPPER)
    with pytest.raises(PlanError, match="decode rows in a bucket is 9, but at most 8 fit"):
        plans.update(rows([5] * 9), bucket=8)
    with pytest.raises(ValueError, match="but has 1 chunks"):
        plans.update(rows([5], [(4, 4)]), bucket=8)


def test_a_step_is_one_copy_of_the_sections_that_it_uses() -> None:
    layout = AttentionLayout(HOPPER)
    copies: list[Range] = []

    class Counting(HostDevice):
        def copy(self, source: np.ndarray, at: Range) -> None:
            copies.append(at)

    plans = AttentionPlans(layout, RAW, Counting(layout.nbytes))
    long, behind_much, prompt = [4000], [(9, 4000)], [(600, 600)]
    for step in (rows(long), rows([5]), rows(long, behind_much), rows([5], behind_much), rows(long, prompt)):
        plans.update(step)
    for step in (rows([5], prompt), rows([], prompt), rows([], behind_much), rows([])):
        plans.update(step)
    at = layout.ranges
    assert copies == [
        at["whole"],
        at["decode"],
        Range(at["chunks"].begin, at["decode"].end),
        at["chunks"],
        Range(at["decode"].begin, at["fa3"].end),
        at["fa3"],
        at["fa3"],
        at["chunks"],
    ]


def test_many_small_tiles_fit_the_chunk_plan() -> None:
    """A mean of few packed queries makes tiles of 16; one longer chunk among rows of one token makes most of them."""
    plans, _ = lane(AttentionCapacity(replace(STEP, max_step_tokens=81), sm_count=4, sm90=False, xqa=False))
    launch = plans.update(rows([], [(1, 1)] * 23 + [(58, 58)])).chunks
    assert launch is not None
    assert (launch.info[0], launch.info[3]) == (23 + 19, 16)


def test_xqa_needs_no_plan() -> None:
    plans, device = lane(replace(HOPPER, xqa=True))
    launch = plans.update(rows([1100] * 8)).decode
    assert launch is not None
    assert (launch.kernel, launch.info, launch.rows) == ("xqa", [], 8)
    mixed = plans.update(rows([1100] * 8, [(30, 3000)]))
    assert mixed.decode is not None
    assert mixed.decode.kernel == "xqa"
    assert read(plans, device, "chunk_request_indices", 1) == [0]


@pytest.mark.parametrize(
    ("change", "dimension"),
    [
        (lambda: replace(HOPPER, sm_count=1 << 28), "partial results"),
        (lambda: replace(HOPPER, sm_count=0), "at least 1"),
    ],
)
def test_what_does_not_fit_int32_is_refused(change: Callable[[], AttentionCapacity], dimension: str) -> None:
    with pytest.raises(ValueError, match=dimension) as caught:
        change()
    if isinstance(caught.value, PlanError):
        assert caught.value.limit == INT32_MAX


def test_other_versions_of_flashinfer_are_refused_by_name() -> None:
    with pytest.raises(FlashInferError, match=r"FlashInfer 0\.7\.0 is installed.*0\.6\.18\.post1 only"):
        signatures("0.7.0")
    with pytest.raises(FlashInferError, match=r"pagelane\[cuda\]"):
        signatures(None)


class Recorder:
    """Stands for a FlashInfer module."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def paged_run(self, *arguments: object) -> None:
        self.calls.append(arguments)

    xqa_wrapper = paged_run


def test_raw_calls_have_the_arguments_of_their_version() -> None:
    """Counts and places as in csrc/batch_prefill*.cu and csrc/flashinfer_xqa_binding.cu of the wheel."""
    q = np.zeros((3, 20, 128))
    k, v, out = np.ones((7, 16, 4, 128)), np.full((7, 16, 4, 128), 2), np.full_like(q, 3)
    call = PagedCall(q, k, v, "qo", "pages", "indices", "last", out, 0.1, causal=True)  # type: ignore[arg-type]
    module = Recorder()
    RAW.run_fa2(module, "arena", [1], call, True)  # type: ignore[arg-type]
    RAW.run_fa3(module, "arena", [1], call, False)  # type: ignore[arg-type]
    fa2, fa3 = module.calls
    for got, count, pdl in ((fa2, 29, True), (fa3, 24, False)):
        assert len(got) == count
        assert got[:2] == ("arena", "arena")
        assert got[3] is q
        assert got[4] is k
        assert got[5] is v
        assert got[6:10] == ("qo", "pages", "indices", "last")
        assert got[11:16] == (None, 1, 0, -1, pdl)
    assert fa2[16:] == (*[None] * 8, 0.0, 0.1, 1.0, 1e-4, 0)
    assert fa3[16:] == (*[None] * 4, 0.0, 0.1, 1.0, 0)
    table = np.zeros((3, 9), np.int32)
    RAW.run_xqa(module, XqaCall(q, k, v, table, "lengths", out, "semaphores", "scratch"), 132, True)  # type: ignore[arg-type]
    xqa = module.calls[-1]
    assert len(xqa) == 26
    assert xqa[:6] == (False, 132, 4, 0, 1.0, None)
    assert xqa[15:18] == (144, "lengths", 3)
    assert xqa[20:] == (1, None, None, "semaphores", "scratch", True)
