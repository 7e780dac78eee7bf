"""What a step costs, measured before the first request."""

from typing import Any

import pytest

from engine.chunking import ChunkLimits, chunk_budgets
from engine.config import CoreConfig
from engine.step import StepPlan, StepResult
from engine.warmup import SCRATCH_PAGE, measure_step_costs


class Clocked:
    """An executor whose steps take 4 ms, 0.05 ms a row and 0.01 ms a prompt token, on a clock of its own."""

    parameters = frozenset[str]()

    def __init__(self, speed: float = 1.0) -> None:
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self._speed = speed

    def launch(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        prompt = sum(len(chunk.tokens) for chunk in plan.chunks)
        self.now += self._speed * (4e-3 + 5e-5 * len(plan.decode_rows) + 1e-5 * prompt)
        return plan

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, StepPlan)
        return StepResult([0] * len(handle.sampled_rows))


def config(**values: Any) -> CoreConfig:
    return CoreConfig(model="m", **{"max_bucket": 64, "max_step_tokens": 2048, **values})


def test_the_table_has_the_times_that_steps_take() -> None:
    executor = Clocked()
    costs = measure_step_costs(executor, config(), 8192, lambda: executor.now)
    assert (costs.rows, costs.tokens) == ((1, 31, 63), (0, 64, 256, 1024, 1985))
    for rows in costs.rows:
        for tokens in costs.tokens:
            assert costs.of(rows, tokens) == pytest.approx(4e-3 + 5e-5 * rows + 1e-5 * tokens)
    assert costs.as_text().splitlines()[:2] == [
        "rows / prompt tokens        0       64      256     1024     1985",
        "                   1      4.0      4.7      6.6     14.3     23.9",
    ]
    pages = {update.page for plan in executor.plans for update in plan.table}
    assert pages == {SCRATCH_PAGE}
    assert executor.now < 1.0, "a start has to wait for it"


def test_a_step_that_the_machine_held_up_changes_no_budget() -> None:
    executor = Clocked()
    quiet = measure_step_costs(executor, config(), 8192, lambda: executor.now)
    launch, calls = executor.launch, 0

    def held_up(plan: StepPlan) -> StepPlan:
        nonlocal calls
        calls += 1
        executor.now += 0.1 * (calls % 4 == 2)  # one of the steps that are timed at each point
        return launch(plan)

    executor.launch = held_up  # type: ignore[method-assign]
    noisy = measure_step_costs(executor, config(), 8192, lambda: executor.now)
    assert [time for *_, time in noisy.points()] == pytest.approx([time for *_, time in quiet.points()])


def test_more_prompt_tokens_never_cost_less() -> None:
    executor = Clocked()

    def collect(handle: object) -> StepResult:
        assert isinstance(handle, StepPlan)
        executor.now += 0.02 * (handle.tokens - len(handle.decode_rows) == 64)
        return StepResult([0] * len(handle.sampled_rows))

    executor.collect = collect  # type: ignore[method-assign]
    for line in measure_step_costs(executor, config(), 8192, lambda: executor.now).seconds:
        assert list(line) == sorted(line)
        assert line[1] == pytest.approx(line[2])


@pytest.mark.parametrize("speed", [1.0, 0.0])
@pytest.mark.parametrize(
    ("values", "servable"),
    [
        ({"max_bucket": 1}, 8192),
        ({"max_bucket": 2, "max_step_tokens": 2}, 8192),
        ({"max_bucket": 4, "max_step_tokens": 16}, 17),
        ({}, 1),
        ({"max_step_tokens": 8192, "kv_page_size": 64}, 40_000),
    ],
)
def test_any_lane_can_be_measured_and_gets_a_budget(values: dict[str, Any], servable: int, speed: float) -> None:
    given, executor = config(**values), Clocked(speed)
    costs = measure_step_costs(executor, given, servable, lambda: executor.now)
    limits = ChunkLimits(given.max_step_tokens, given.kv_page_size, given.min_chunk_tokens, 0.010)
    budgets = chunk_budgets(costs, limits, given.max_bucket)
    assert budgets[0] == given.max_step_tokens
    for rows, budget in enumerate(budgets):
        room = max(0, given.max_step_tokens - rows)
        assert min(room, given.min_chunk_tokens) <= budget <= room
    for plan in executor.plans:
        assert plan.tokens <= given.max_step_tokens
        assert max([*plan.decode_lengths, *(len(chunk.tokens) for chunk in plan.chunks)], default=0) <= servable
