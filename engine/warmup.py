"""Measures what a step costs, before the first request and on an empty pool."""

import statistics
from collections.abc import Callable
from itertools import accumulate

from engine.chunking import StepCosts
from engine.config import CoreConfig
from engine.messages import Sampling
from engine.step import Chunk, Executor, RowStart, StepPlan
from kv.table import TableUpdate

REPEATS = 3
CHUNK_TOKENS = (64, 256, 1024, 4096)
"""Chunk sizes to measure, as far as a step holds them."""
CONTEXT_TOKENS = 1024
"""Context of the measured decode rows, as far as the lane serves it. Rows with much longer contexts take longer."""
SCRATCH_PAGE = 1
"""All measured rows lie on this one page, so that the measurement needs no memory that grows with the page size."""


def measure_step_costs(
    executor: Executor, config: CoreConfig, servable_length: int, clock: Callable[[], float]
) -> StepCosts:
    """Run steps of several row and token counts and take the median time of each.

    What the steps write lies on a page that is still free, so nothing of it is ever read. A step never costs less than
    one with fewer prompt tokens: where it was faster, the clock says less than the budgets need.
    """
    decode_rows = config.max_bucket - 1  # the last row slot takes the chunks
    # Without active rows nobody waits: a lane of one row is measured for its table alone.
    rows = tuple(sorted({min(1, decode_rows), decode_rows // 2, decode_rows} - {0})) or (0,)
    room = min(config.max_step_tokens - decode_rows, servable_length)
    tokens = (0, *sorted({min(size, room) for size in CHUNK_TOKENS} - {0}))
    length = min(CONTEXT_TOKENS, servable_length)
    _start_rows(executor, config, decode_rows, length)
    seconds = [[_time(executor, _plan(config, count, length, size), clock) for size in tokens] for count in rows]
    return StepCosts(rows, tokens, tuple(tuple(accumulate(line, max)) for line in seconds))


def _start_rows(executor: Executor, config: CoreConfig, rows: int, length: int) -> None:
    """Give every decode row a first token by a prompt of one token, and a page list of `length` tokens."""
    if not rows:
        return
    starts = [RowStart(row, Sampling()) for row in range(rows)]
    pages = -(-length // config.kv_page_size)
    table = [TableUpdate(row, index, SCRATCH_PAGE) for row in range(rows) for index in range(pages)]
    chunks = [Chunk(row, 0, [0], True) for row in range(rows)]
    executor.collect(executor.launch(StepPlan(0, starts, table, [], [], chunks)))


def _time(executor: Executor, plan: StepPlan, clock: Callable[[], float]) -> float:
    if not plan.tokens:
        return 0.0
    times = []
    for _ in range(REPEATS + 1):
        began = clock()
        executor.collect(executor.launch(plan))
        times.append(clock() - began)
    return statistics.median(times[1:])  # the first one may allocate


def _plan(config: CoreConfig, rows: int, length: int, tokens: int) -> StepPlan:
    """`rows` decode rows of `length` tokens, and on the last row the first `tokens` tokens of a prompt."""
    last = config.max_bucket - 1
    if not tokens:
        return StepPlan(0, [], [], list(range(rows)), [length] * rows, [])
    pages = -(-tokens // config.kv_page_size)
    table = [TableUpdate(last, index, SCRATCH_PAGE) for index in range(pages)]
    chunk = Chunk(last, 0, [0] * tokens, True)
    return StepPlan(0, [RowStart(last, Sampling())], table, list(range(rows)), [length] * rows, [chunk])
