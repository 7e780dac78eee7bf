"""Every dimension that a step can exceed, by one: what is refused, and a lane's planning half to try it on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cuda.attention import FlashInferAttention
from engine.cuda.inputs import StepInputs, step_rows
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.cuda.policy import chunk_kernel
from engine.kernels.step_head import write_step
from engine.messages import Sampling
from engine.plan import PlanCapacity, PlanError
from engine.step import Chunk, RowStart, StepPlan
from kv.table import TableUpdate

POOL = 120
"""Pages, the padding page included: fewer than the rows' lists have together, so that rows share pages."""


class Card(NamedTuple):
    """What the lane's capacity takes from the card."""

    sm_count: int
    sm90: bool


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Excess:
    """A step that is one beyond `dimension`."""

    dimension: str
    plan: StepPlan
    value: int | None = None
    """What the step has; None: learned from a lane that holds next to nothing."""
    tight: str | None = None
    """Property of `AttentionCapacity` to set to one less than the step needs: derived bounds cannot be exceeded."""
    bucket: int | None = None


def step_capacity(heads: Heads, page_size: int) -> PlanCapacity:
    """Four rows, 300 tokens a step, 1199 tokens of context."""
    return PlanCapacity(4, 300, 1199, page_size, *heads)


def plan_of(decode: Mapping[int, int], *chunks: Chunk, table: tuple[TableUpdate, ...] = ()) -> StepPlan:
    """A step of decode rows (row slot: length) and chunks."""
    starts = [RowStart(row, Sampling()) for row in (*decode, *(chunk.row for chunk in chunks))]
    return StepPlan(1, starts, list(table), list(decode), list(decode.values()), list(chunks))


def excesses(capacity: AttentionCapacity) -> Iterator[Excess]:
    """One for each dimension."""
    last_page = capacity.step.max_pages_per_row
    whole = Chunk(1, 0, [5] * 300, True)
    yield Excess("rows of the step", plan_of({0: 9, 1: 9, 2: 9, 3: 9, 4: 9}), 5)
    yield Excess("tokens of the step", plan_of({0: 9}, whole), 301)
    yield Excess("row slot", plan_of({4: 9}), 4)
    yield Excess("row slot of a table update", plan_of({0: 9}, table=(TableUpdate(4, 0, 1),)), 4)
    yield Excess("page index of row 0", plan_of({0: 9}, table=(TableUpdate(0, last_page, 1),)), last_page)
    yield Excess("page of row 0", plan_of({0: 9}, table=(TableUpdate(0, 0, POOL),)), POOL)
    yield Excess("length of row 0", plan_of({0: 1201}), 1201)
    yield Excess("length of row 2", plan_of({0: 9}, Chunk(2, 1191, [5] * 10, True)), 1201)
    yield Excess("decode rows in a bucket", plan_of({0: 9, 1: 9}), 2, bucket=1)
    yield Excess("rows of the step", plan_of({0: 9}), 5, bucket=5)
    split, narrow = plan_of({0: 1200, 1: 40}), plan_of({0: 9}, Chunk(2, 1000, [5] * 40, True))
    yield Excess("tiles of the decode plan", split, tight="max_decode_tiles")
    yield Excess("partial rows of the decode plan", split, tight="decode_partial_rows")
    yield Excess("tiles of the chunk plan", narrow, tight="max_chunk_tiles")
    yield Excess("partial rows of the chunk plan", narrow, tight="chunk_partial_rows")
    if capacity.sm90 and chunk_kernel(np.array([299]), capacity.shape) == "fa3":
        yield Excess("works of the FA3 plan", plan_of({0: 9}, Chunk(2, 1, [5] * 299, True)), tight="max_works")


def capacity_of(step: PlanCapacity, card: Card, tight: str | None = None, limit: int = 0) -> AttentionCapacity:
    """The lane's capacity, with the property `tight` set to `limit`."""
    kind = AttentionCapacity
    if tight is not None:
        kind = type("Tight", (AttentionCapacity,), {tight: property(lambda self: limit)})
    return kind(step, card.sm_count, card.sm90, xqa=False)


class PlanningLane:
    """What a lane does with a step, but for the model: check, plan, bring the inputs over, attend."""

    def __init__(self, capacity: AttentionCapacity, modules: dict[str, Any], device: str, dtype: torch.dtype) -> None:
        step = capacity.step
        self.capacity = capacity
        shape = (POOL, 1, 2, step.page_size, step.kv_heads, step.head_dim)
        self.kv = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(device, dtype)
        self.inputs = StepInputs(step, torch.device(device), write_step)
        self.arena = torch.zeros(AttentionLayout(capacity).nbytes, dtype=torch.uint8, device=device)
        self.attention = FlashInferAttention(capacity, self.kv, self.inputs, self.arena, modules)
        # Row r's pages: 1 + r, 4 + r, ... around the pool.
        width = step.max_pages_per_row
        self.pages = [[1 + (row + 3 * index) % (POOL - 1) for index in range(width)] for row in range(4)]
        table = [TableUpdate(row, index, page) for row in range(4) for index, page in enumerate(self.pages[row])]
        self.launch(plan_of({0: 5}, table=tuple(table)))

    def launch(self, plan: StepPlan, bucket: int | None = None) -> None:
        """Check, plan and queue the step, as the executor does."""
        self.capacity.step.check(plan, POOL)
        rows = step_rows(plan)
        if bucket is None:
            self.attention.begin(rows)
        else:
            self.attention.plans.update(rows, bucket)
        self.inputs.write(plan, rows)

    def memory(self) -> list[Tensor]:
        """All that a step writes, copied."""
        tensors = [self.arena, *self.inputs.staged.values(), *self.inputs.device.values()]
        return [tensor.cpu().clone() for tensor in tensors]

    def error(self, plan: StepPlan) -> float:
        """Launch a step and compare its attention with float64: the norm of the difference over that of the result."""
        self.launch(plan)
        step = self.capacity.step
        queries = torch.randn(plan.tokens, step.heads, step.head_dim, generator=torch.Generator().manual_seed(9))
        queries = queries.to(self.kv)
        got = torch.full_like(queries, torch.nan)
        self.attention(0, queries, got)
        want = self._reference(plan, queries.cpu())
        return float((got.cpu().double() - want).norm() / want.norm())

    def _reference(self, plan: StepPlan, queries: Tensor) -> Tensor:
        rows = [(row, 1, length) for row, length in zip(plan.decode_rows, plan.decode_lengths, strict=True)]
        rows += [(chunk.row, len(chunk.tokens), chunk.start + len(chunk.tokens)) for chunk in plan.chunks]
        kv, results, at = self.kv.cpu().double(), [], 0
        for row, count, length in rows:
            listed = self.pages[row][: -(-length // kv.shape[3])]
            group = queries.shape[1] // kv.shape[4]
            k, v = (kv[listed, 0, part].flatten(0, 1)[:length].repeat_interleave(group, 1) for part in (0, 1))
            scores = torch.einsum("qhd,khd->hqk", queries[at : at + count].double(), k) / queries.shape[-1] ** 0.5
            seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            results.append(torch.einsum("hqk,khd->qhd", weights, v))
            at += count
        return torch.cat(results)


ENOUGH = 4
"""Tiles, partial rows or works with which a lane takes the steps that are launched before one that is refused."""

NEXT = {
    "decode": plan_of({0: 9, 3: 8}),
    "split": plan_of({1: 600, 2: 3}),
    "chunks": plan_of({0: 30}, Chunk(2, 100, [5] * 20, True)),
}
"""Steps that fit every lane of `excesses`."""


def refusal(lane: PlanningLane, excess: Excess) -> PlanError:
    """The error of a step that is one beyond. Raises `AssertionError` if there is none, or if it left a trace."""
    lane.launch(NEXT["decode"])
    kept, memory = lane.attention.plans.current, lane.memory()
    try:
        lane.launch(excess.plan, excess.bucket)
    except PlanError as error:
        if lane.attention.plans.current is not kept:
            raise AssertionError(f"{excess.dimension}: the last plan is not what it was") from error
        if not all(torch.equal(now, before) for now, before in zip(lane.memory(), memory, strict=True)):
            raise AssertionError(f"{excess.dimension}: something was written") from error
        return error
    raise AssertionError(f"{excess.dimension}: a step one beyond it was accepted")
