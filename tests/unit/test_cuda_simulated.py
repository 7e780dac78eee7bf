"""The plans as FlashInfer's kernels read them: simulated on numpy, from the arena's bytes and `plan_info` alone.

The simulation follows the indexing of `BatchPrefillWithPagedKVCacheDevice` and `VariableLengthMergeStates`
(include/flashinfer/attention/prefill.cuh) and of the FA3 kernel's work lists, and reads nothing else of the planner.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from engine.cuda.attention_plan import AttentionPlans, Launch, StepRows
from engine.cuda.flashinfer_raw import signatures
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.cuda.staging import HostDevice
from engine.plan import PlanCapacity

STEP = PlanCapacity(
    max_bucket=24, max_step_tokens=700, context_limit=4000, page_size=16, heads=10, kv_heads=2, head_dim=128
)
HOPPER = AttentionCapacity(STEP, sm_count=20, sm90=True, xqa=False)
RAW = signatures("0.6.18.post1")
DIM = 4
"""Head dim of the simulated numbers; the plan does not look at it."""
POOL = 600


@dataclass
class Rows:
    """Queries of some rows, and where their keys lie."""

    queries: np.ndarray
    """`[tokens, heads, DIM]`."""
    query_indptr: np.ndarray
    page_indptr: np.ndarray
    page_indices: np.ndarray
    lengths: np.ndarray


def softmax_parts(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Attention of one query, and log2 of its sum of exponentials."""
    scores = keys @ query
    weights = np.exp2(scores - scores.max())
    return weights @ values / weights.sum(), float(np.log2(weights.sum()) + scores.max())


class Kernels:
    """Reads plans out of the arena."""

    def __init__(self, arena: np.ndarray, kv: np.ndarray, group: int) -> None:
        self.arena = arena
        self.kv = kv
        self.group = group

    def ints(self, offset: int, count: int) -> np.ndarray:
        return self.arena[offset : offset + 4 * count].view(np.int32)

    def part(
        self, rows: Rows, row: int, at: tuple[int, int], keys: tuple[int, int] | None = None
    ) -> tuple[np.ndarray, float] | None:
        """One query (token, head) of a row against those of `keys` (all: None) that it may see."""
        (token, head), (begin, end) = at, keys or (0, int(rows.lengths[row]))
        length = int(rows.lengths[row])
        queries = int(rows.query_indptr[row + 1] - rows.query_indptr[row])
        end = min(end, length, length - queries + token + 1)
        if begin >= end:
            return None
        pages = rows.page_indices[rows.page_indptr[row] :]
        slots = np.arange(begin, end)
        found = self.kv[pages[slots // 16], :, slots % 16, head // self.group]
        return softmax_parts(rows.queries[rows.query_indptr[row] + token, head], found[:, 0], found[:, 1])

    def fa2(self, info: list[int], rows: Rows) -> np.ndarray:
        grid, tile_q, masked, split = info[0], info[3], info[13], info[14]
        request, q_tile, kv_tile = (self.ints(offset, grid) for offset in info[4:7])
        o_indptr, chunk = self.ints(info[8], len(rows.lengths) + 1), int(self.ints(info[9], 1)[0])
        heads = rows.queries.shape[1]
        partial: dict[tuple[int, int], tuple[np.ndarray, float] | None] = {}
        for tile in range(grid):
            if split and masked and not self.arena[info[12] + tile]:
                continue
            row, kv = int(request[tile]), int(kv_tile[tile])
            length = int(rows.lengths[row])
            chunks = -(-length // chunk) if split else 1
            keys = (kv * chunk, (kv + 1) * chunk) if split else None
            queries = int(rows.query_indptr[row + 1] - rows.query_indptr[row])
            first = int(q_tile[tile]) * tile_q
            for packed in range(first, min(first + tile_q, queries * self.group)):
                token, member = divmod(packed, self.group)
                place = int(o_indptr[row]) + token * chunks + kv
                for kv_head in range(heads // self.group):
                    head = kv_head * self.group + member
                    assert (place, head) not in partial, "two tiles write one result"
                    partial[place, head] = self.part(rows, row, (token, head), keys)
        out = np.full_like(rows.queries, np.nan)
        tokens = len(rows.queries)
        merge = self.ints(info[7], tokens + 1) if split else np.arange(tokens + 1)
        for token in range(tokens):
            for head in range(heads):
                parts = [partial[place, head] for place in range(merge[token], merge[token + 1])]
                known = [part for part in parts if part is not None]
                weights = np.exp2([sums for _, sums in known])
                out[token, head] = weights @ np.array([value for value, _ in known]) / weights.sum()
        return out

    def fa3(self, info: list[int], rows: Rows, ctas: int) -> np.ndarray:
        works = int(self.ints(info[6], ctas + 1)[-1])
        columns = (self.ints(info[place], works) for place in (0, 1, 2, 3, 4, 5))
        out = np.full_like(rows.queries, np.nan)
        for tile, first, first_page, queries, length, head in zip(*columns, strict=True):
            row = int(np.flatnonzero(rows.query_indptr[:-1] == first)[0])
            assert rows.page_indptr[row] == first_page
            assert (rows.lengths[row], np.diff(rows.query_indptr)[row]) == (length, queries)
            for token in range(tile * 128, min((tile + 1) * 128, queries)):
                assert np.isnan(out[first + token, head]).all(), "two works write one result"
                part = self.part(rows, row, (token, int(head)))
                assert part is not None
                out[first + token, head] = part[0]
        return out


class Lane:
    """A cache, random steps over it, and the attention of each as the kernels would compute it."""

    def __init__(self, capacity: AttentionCapacity, seed: int = 5) -> None:
        layout = AttentionLayout(capacity)
        self.device = HostDevice(layout.nbytes)
        self.plans = AttentionPlans(layout, RAW, self.device)
        self.random = np.random.default_rng(seed)
        self.capacity = capacity
        self.kv = self.random.standard_normal((POOL, 2, 16, 2, DIM))
        self.kernels = Kernels(self.device.arena, self.kv, 5)

    def rows(self, counts: np.ndarray, lengths: np.ndarray, first_page: int, listed: np.ndarray) -> Rows:
        queries = self.random.standard_normal((int(counts.sum()), 10, DIM))
        indptr = np.concatenate(([0], np.cumsum(counts)))
        pages = first_page + np.concatenate(([0], np.cumsum(-(-lengths // 16))))
        return Rows(queries, indptr, pages, listed, lengths)

    def step(self, step: StepRows, bucket: int | None = None) -> list[tuple[Launch, Rows]]:
        planned = self.plans.update(step, bucket)
        padding = np.ones((bucket or len(step.decode_lengths)) - len(step.decode_lengths), np.int64)
        decode = np.concatenate([step.decode_lengths, padding])
        lengths = np.concatenate([decode, step.chunk_lengths])
        # Every row begins with the same pages, so that the lists are longer than the pool.
        shared = self.random.permutation(POOL)
        counts = -(-lengths // 16)
        lists = [np.concatenate([shared[:3], self.random.permutation(POOL)])[:count] for count in counts]
        listed = np.concatenate(lists)
        chunks_at = int((-(-decode // 16)).sum())
        parts = [
            (planned.decode, self.rows(np.ones_like(decode), decode, 0, listed)),
            (planned.chunks, self.rows(step.chunk_tokens, step.chunk_lengths, chunks_at, listed)),
        ]
        return [(launch, rows) for launch, rows in parts if launch is not None]

    def error(self, launch: Launch, rows: Rows) -> float:
        if launch.kernel == "fa3":
            got = self.kernels.fa3(launch.info, rows, self.capacity.sm_count)
        else:
            got = self.kernels.fa2(launch.info, rows)
        want = np.empty_like(got)
        for row in range(len(rows.lengths)):
            for token in range(int(rows.query_indptr[row + 1] - rows.query_indptr[row])):
                for head in range(10):
                    part = self.kernels.part(rows, row, (token, head))
                    assert part is not None
                    want[rows.query_indptr[row] + token, head] = part[0]
        return float(np.abs(got - want).max())


def decode_rows(*lengths: int) -> StepRows:
    none = np.zeros(0, np.int64)
    return StepRows(np.array(lengths, np.int64), none, none)


def chunk_rows(*chunks: tuple[int, int], decode: tuple[int, ...] = ()) -> StepRows:
    tokens, lengths = (np.array(column, np.int64) for column in zip(*chunks, strict=True))
    return StepRows(np.array(decode, np.int64), tokens, lengths)


STEPS = {
    "whole": (decode_rows(*range(90, 114)), [("fa2", False)], [("fa2", False)]),
    "split": (decode_rows(3000, 5, 700), [("fa2", True)], [("fa2", True)]),
    "skewed": (decode_rows(*[30] * 23, 4001), [("fa2", True)], [("fa2", True)]),
    "chunks": (
        chunk_rows((130, 140), (140, 400), decode=(60, 9)),
        [("fa2", False), ("fa3", False)],
        [("fa2", False), ("fa2", True)],
    ),
    "narrow chunk": (chunk_rows((11, 1500)), [("fa2", True)], [("fa2", True)]),
}
"""Steps, and their launches (kernel, split) on sm90 and elsewhere."""


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("sm90", [True, False])
def test_kernels_that_read_the_plans_compute_attention(name: str, sm90: bool) -> None:
    lane = Lane(replace(HOPPER, sm90=sm90, sm_count=132 if name == "narrow chunk" else 20))
    step, on_sm90, elsewhere = STEPS[name]
    launches = lane.step(step)
    assert [(launch.kernel, launch.split) for launch, _ in launches] == (on_sm90 if sm90 else elsewhere)
    for launch, rows in launches:
        assert lane.error(launch, rows) < 1e-9


def test_steps_of_a_bucket_compute_attention_whatever_an_earlier_step_left() -> None:
    lane = Lane(HOPPER)
    for step in (decode_rows(2500, 40, 7), decode_rows(100), decode_rows(900, 3, 5, 7, 9, 11), decode_rows(*[60] * 8)):
        ((launch, rows),) = lane.step(step, bucket=8)
        assert lane.error(launch, rows) < 1e-9


def test_a_stale_plan_and_a_missing_merge_go_red() -> None:
    lane = Lane(HOPPER)
    ((stale, _),) = lane.step(decode_rows(2500, 40, 7), bucket=8)
    before = lane.device.arena.copy()
    ((launch, rows),) = lane.step(decode_rows(3900, 3800, 20), bucket=8)
    assert lane.error(launch, rows) < 1e-9
    fresh = lane.device.arena.copy()
    assert stale.info == launch.info
    lane.device.arena[:] = before
    with pytest.raises((KeyError, AssertionError, IndexError)):
        assert lane.error(launch, rows) < 1e-9
    lane.device.arena[:] = fresh
    merge = lane.plans.layout.buffers["decode_merge_indptr"]
    lane.device.arena[merge.offset : merge.offset + 4 * 9].view(np.int32)[:] = np.arange(9)
    with pytest.raises(AssertionError):
        assert lane.error(launch, rows) < 1e-9
