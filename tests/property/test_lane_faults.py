"""The real lane with an executor that fails now and then, at launch or at collect, at lag 0, 1 and 2."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.lane import MAX_FAILED_STEPS, Lane, LaneBroken
from engine.scheduler import Scheduler
from engine.scheduling import SchedulerConfig
from engine.step import StepPlan, StepResult
from kv.events import replay
from kv.hashing import event_hash
from tests.sim import Job, SimExecutor, SimLane, expected_output

PAGE_SIZE = 16
FAULTS = st.sampled_from([None, "launch", "collect"])
ERRORS = (RuntimeError, MemoryError)


class FaultyExecutor:
    """Fails the steps that `faults` says, before they run or after; the others it passes on."""

    def __init__(self, inner: SimExecutor, scheduler: Scheduler, faults: list[str | None]) -> None:
        self.inner = inner
        self.scheduler = scheduler
        self.parameters = frozenset()
        self.faults = faults
        self.in_step: dict[int, set[int]] = {}
        """Keys of the requests of each step by its number."""

    def fault(self, number: int) -> str | None:
        return self.faults[number] if number < len(self.faults) else None

    def launch(self, plan: StepPlan) -> tuple[int, StepResult]:
        launched = self.scheduler.in_flight[-1]
        self.in_step[plan.number] = {request.key for request in (*launched.decoding, *launched.chunked)}
        if self.fault(plan.number) == "launch":
            raise ERRORS[plan.number % 2](f"step {plan.number}")
        return plan.number, self.inner.launch(plan)

    def collect(self, handle: tuple[int, StepResult]) -> StepResult:
        number, result = handle
        if self.fault(number) == "collect":
            raise ERRORS[number % 2](f"step {number}")
        return result


class Driver:
    """A worker's view of a lane: submits, takes what comes, checks the invariants after every turn."""

    def __init__(self, config: SchedulerConfig, pages: int, faults: list[str | None]) -> None:
        self.sim = SimLane(config, pages)
        self.executor = FaultyExecutor(self.sim.executor, self.sim.scheduler, faults)
        self.lane = Lane(self.sim.scheduler, self.executor, lambda: 0.0)

    def turn(self) -> None:
        effects = self.lane.advance()
        for end in effects.finished:
            if end.retryable:  # the message names the step
                assert end.key in self.executor.in_step[int(end.message.rpartition(" ")[2])]
        self.sim._take(effects)
        self.sim.check()

    def run(self) -> None:
        while not self.lane.idle:
            self.turn()
        self.sim._take(self.sim.scheduler.take_effects())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lag=st.integers(0, 2),
    bucket=st.integers(1, 4),
    chunk=st.sampled_from([7, 16, 64]),
    pages=st.integers(8, 40),
    faults=st.lists(FAULTS, max_size=30),
    jobs=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12),
    cancels=st.lists(st.integers(0, 11), max_size=3),
)
def test_a_failed_step_ends_its_own_requests_once_and_leaks_no_page(
    *, lag, bucket, chunk, pages, faults, jobs, cancels
):
    faults = _at_most_two_in_a_row(faults)
    config = SchedulerConfig(
        page_size=PAGE_SIZE,
        servable_length=min(pages * PAGE_SIZE, 128),
        max_bucket=bucket,
        max_step_tokens=bucket + chunk,
        max_chunk_tokens=chunk,
        max_in_flight=lag + 1,
    )
    driver = Driver(config, pages, faults)
    for prompt, max_tokens, family in jobs:
        driver.sim.submit(Job([(family * 7 + i) % 50 for i in range(prompt)], min(max_tokens, 128 - prompt)))
    for key in cancels:
        driver.turn()
        if key in driver.sim.jobs and not driver.lane.idle:
            driver.sim.cancel(key)
    driver.run()
    driver.sim.check_at_rest()
    for job in driver.sim.jobs.values():
        assert job.finished.retryable is (job.finished.reason == "error")
    if not any(faults):
        assert all(job.finished.reason != "error" for job in driver.sim.jobs.values())


def _at_most_two_in_a_row(faults: list[str | None]) -> list[str | None]:
    kept: list[str | None] = []
    for fault in faults:
        kept.append(None if fault and all(kept[-2:]) and len(kept) >= 2 else fault)
    return kept


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_three_failures_in_a_row_break_the_lane_and_two_do_not(lag, where):
    config = SchedulerConfig(
        page_size=PAGE_SIZE,
        servable_length=128,
        max_bucket=2,
        max_step_tokens=64,
        max_chunk_tokens=64,
        max_in_flight=lag + 1,
    )
    for failures in (MAX_FAILED_STEPS - 1, MAX_FAILED_STEPS):
        driver = Driver(config, 20, [where] * failures)
        for number in range(8):
            driver.sim.submit(Job([number] * 20, 10))
        if failures < MAX_FAILED_STEPS:
            driver.run()
            driver.sim.check_at_rest()
            ends = [job.finished.reason for job in driver.sim.jobs.values()]
            assert set(ends) == {"error", "length"}
        else:
            with pytest.raises(LaneBroken, match=rf"{MAX_FAILED_STEPS} steps in a row failed, the last with: step"):
                driver.run()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_text_of_who_was_not_in_the_failed_step_is_right_and_its_pages_are_cached(lag):
    config = SchedulerConfig(
        page_size=PAGE_SIZE,
        servable_length=128,
        max_bucket=1,
        max_step_tokens=64,
        max_chunk_tokens=64,
        max_in_flight=lag + 1,
    )
    driver = Driver(config, 20, [None, None, None, "collect"])
    for number in range(3):
        driver.sim.submit(Job([number] * 40, 12))
    driver.run()
    driver.sim.check_at_rest()
    first, *others = driver.sim.jobs.values()
    assert first.finished.retryable
    assert first.output == expected_output(first.prompt, 12, ())[: len(first.output)]
    for job in others:
        assert job.output == expected_output(job.prompt, 12, ())
    held = replay(driver.sim.events)
    assert {event_hash(digest) for digest in driver.sim.pool.index.digests()} == held
