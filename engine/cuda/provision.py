"""Gives a lane's KV pool the memory that everything else leaves, exactly and without estimates.

The cache's addresses are reserved for as many pages as the lane's whole share of the card would hold, and two pages get
memory: the padding page, and one that all rows of every measured step lie on. Then everything runs that will ever take
memory: the largest steps, the graphs' capture, the warm-up. What is then free of the lane's share is put behind the
rest of the addresses, in whole granules and whole pages. Where addresses cannot be had before memory, the graphs are
captured twice: over two pages to see what they take, and over the real pool.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.cuda.budget import most_pages
from engine.cuda.driver import DriverError
from engine.cuda.executor import CudaExecutor
from engine.cuda.kv_memory import SCRATCH_PAGES, KvMemory, MappedKv
from engine.memory import MemoryPlan
from engine.messages import Sampling
from engine.plan import PlanCapacity
from engine.step import Chunk, RowContext, RowStart, StepPlan
from kv.budget import KvBudget, KvBudgetError
from kv.table import TableUpdate

if TYPE_CHECKING:
    from engine.cuda.lane import CudaBuild

log = logging.getLogger(__name__)

_SCRATCH_PAGE = SCRATCH_PAGES - 1
_SPARE_BLOCKS, _SPARE_BYTES = 8, 1 << 19
"""Kept in torch's cache, so that what steps take for a moment, some kilobytes each, never asks the driver: blocks of
other sizes than those of the measured steps lie otherwise.
"""


@dataclass(frozen=True, slots=True)
class Provided:
    """A lane's executor with its pool."""

    executor: CudaExecutor
    memory: KvMemory
    budget: KvBudget
    measured: MemoryPlan


class _Taken(NamedTuple):
    """Bytes that captured graphs have of the card; those of them that torch has."""

    used: int
    held: int


class PlainKv:
    """`KvMemory` without virtual memory management: an ordinary tensor, with memory from the beginning."""

    nbytes = 0
    """The allocator counts it."""

    def __init__(self, build: "CudaBuild", pages: int) -> None:
        self.kv = build.cache(pages)

    def grow(self, pages: int) -> None:
        """See `KvMemory`."""
        if pages > self.kv.shape[0]:
            raise ValueError(f"a cache of {self.kv.shape[0]} pages cannot grow to {pages}")

    def close(self) -> None:
        """See `KvMemory`. The memory goes with the tensor."""


def provide(build: "CudaBuild") -> Provided:
    """Make the executor, its graphs and its pool. Raises `KvBudgetError`, `PlanError` or `GraphError`."""
    try:
        memory = build.gpu.virtual_memory()
        pages = most_pages(build.geometry, build.sizer.allowance.own)
        cache = MappedKv(memory, build.geometry, build.dtype, pages)
    except DriverError as error:
        log.warning("graphs are captured twice, since the KV cache's memory cannot come last: %s", error)
        return _provide_twice(build)
    try:
        return _provide_last(build, cache, memory.granularity)
    except BaseException:
        cache.close()
        raise


def _provide_last(build: "CudaBuild", cache: MappedKv, granule: int) -> Provided:
    executor = build.executor(cache.kv, SCRATCH_PAGES)
    graphs = _exercise(build, executor)
    budget = _budget(build, cache.nbytes, granule)
    try:
        cache.grow(budget.total_pages)
    except DriverError as error:
        raise KvBudgetError(
            f"{error}: the GPU has less memory free than it reported; lower gpu_memory_utilization, or start again "
            "when other processes have settled"
        ) from None
    executor.parts = replace(executor.parts, pages=budget.total_pages)
    return Provided(executor, cache, budget, _measure(build, graphs, mapped=cache.nbytes))


def _provide_twice(build: "CudaBuild") -> Provided:
    graphs = _exercise(build, build.executor(build.cache(SCRATCH_PAGES), SCRATCH_PAGES))
    budget = _budget(build)
    # The scratch cache's graphs are gone; what they took has to be free before the pool takes the rest. The driver
    # keeps their memory for the next ones, so that these count as the first did.
    build.gpu.settle()
    cache = PlainKv(build, budget.total_pages)
    executor = build.executor(cache.kv, budget.total_pages)
    _exercise(build, executor)
    measured = _measure(build, graphs, cached=cache.kv.nbytes)
    return Provided(executor, cache, budget, measured)


def _exercise(build: "CudaBuild", executor: CudaExecutor) -> _Taken | None:
    """Do everything that may compile, load or allocate; returns what graphs took, None if the lane has none.

    All rows lie on the scratch page, so that what this takes does not grow with the page size.
    """
    steps = list(_largest_steps(build.capacity))
    # Lengths between these take the same kernels of cuBLAS, which the driver loads on first use.
    _run(executor, [_chunks(build.capacity, 1, tokens) for tokens in _lengths(build.capacity)])
    _run(executor, steps)
    build.gpu.settle()
    before = build.gpu.held()
    taken = build.capture(executor)
    graphs = None if taken is None else _Taken(taken, build.gpu.held() - before)
    # Capturing gives back what steps without a graph take for a moment. They will take it again, so it counts.
    _run(executor, steps)
    spare = [torch.empty(_SPARE_BYTES, dtype=torch.uint8, device=build.device) for _ in range(_SPARE_BLOCKS)]
    del spare
    return graphs


def _run(executor: CudaExecutor, plans: list[StepPlan]) -> None:
    for plan in plans:
        executor.collect(executor.launch(plan))


def _largest_steps(capacity: PlanCapacity) -> Iterator[StepPlan]:
    """Steps with as many tokens as a step may have, on all rows and on one, and one in which all rows decode.

    All rows draw, and the first asks for all that a request may ask for: what is compiled on first use is so here.
    """
    rows = capacity.max_bucket
    yield _chunks(capacity, rows, min(capacity.max_step_tokens // rows, capacity.context_limit))
    yield _chunks(capacity, 1, min(capacity.max_step_tokens, capacity.context_limit))
    yield StepPlan(2, [RowStart(row, Sampling()) for row in range(rows)], [], list(range(rows)), [2] * rows, [])


def _lengths(capacity: PlanCapacity) -> list[int]:
    """Powers of two and what lies halfway between them, below the largest chunk."""
    longest = min(capacity.max_step_tokens, capacity.context_limit)
    powers = [1 << power for power in range(longest.bit_length())]
    return sorted(length for power in powers for length in {power, power + power // 2} if length < longest)


def _chunks(capacity: PlanCapacity, rows: int, tokens: int) -> StepPlan:
    pages = -(-tokens // capacity.page_size)
    table = [TableUpdate(row, index, _SCRATCH_PAGE) for row in range(rows) for index in range(pages)]
    asking = Sampling(temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.1, min_tokens=1, logprobs=1)
    starts = [RowStart(0, asking, RowContext([0], [0], [0], tokens + 1))]
    starts += [RowStart(row, Sampling(temperature=1.0)) for row in range(1, rows)]
    chunks = [Chunk(row, 0, [0] * tokens, True) for row in range(rows)]
    chunks[0] = chunks[0]._replace(targets=chunks[0].tokens, top_logprobs=1)
    return StepPlan(0, starts, table, [], [], chunks)


def _budget(build: "CudaBuild", pool: int = 0, granule: int = 1) -> KvBudget:
    """The pool that the card has room for now, if `pool` bytes of what is taken are the pool's already."""
    taken = build.gpu.used() - pool
    budget = build.sizer.budget(taken, build.gpu.card.memory - build.gpu.others - taken, granule)
    build.capacity.check_pool(budget.total_pages)
    return budget


def _measure(build: "CudaBuild", graphs: _Taken | None, *, mapped: int = 0, cached: int = 0) -> MemoryPlan:
    """Bytes by part, which sum up to what the device shows. The pool has `mapped` bytes or `cached` of torch's."""
    used, held = build.gpu.used(), build.gpu.held()
    taken = graphs or _Taken(0, 0)
    weights, rope_table = build.design.weights.nbytes, build.cos_sin.nbytes
    plan_arena, activations = build.inputs.nbytes + build.plan_arena.nbytes, build.arena.nbytes
    return MemoryPlan(
        weights=weights,
        rope_table=rope_table,
        plan_arena=plan_arena,
        activations=activations,
        kv_pool=mapped + cached,
        graphs=None if graphs is None else graphs.used,
        workspaces=held - cached - weights - rope_table - plan_arena - activations - taken.held,
        context=used - held - mapped - (taken.used - taken.held),
    )
