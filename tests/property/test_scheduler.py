"""Invariants 1 to 7 of the scheduler under random arrivals, cancels, failures, pool sizes and lag 0, 1 and 2."""

import os

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.scheduling import SchedulerConfig
from tests.sim import Job, SimLane

LONG = bool(os.environ.get("PAGELANE_LONG_PROPERTY_TESTS"))
"""Set for the nightly form, `make property`: 3,000 runs of up to 60 operations."""

PAGE_SIZE = 16


def lengths_around_pages(limit: int) -> st.SearchStrategy[int]:
    """Lengths from 1 to `limit`, mostly one short of, at, or one past a page boundary."""
    boundaries = [n for page in range(limit // PAGE_SIZE + 1) for n in (page * PAGE_SIZE + d for d in (-1, 0, 1))]
    near = sorted({n for n in boundaries if 1 <= n <= limit})
    return st.one_of(st.sampled_from(near), st.integers(1, limit))


class SchedulerMachine(RuleBasedStateMachine):
    """Random work against the simulated executor, which fails on any misuse of a page."""

    @initialize(
        limits=st.fixed_dictionaries(
            {
                "max_bucket": st.integers(1, 6),
                "max_chunk_tokens": st.sampled_from([1, 7, 16, 64, 1000]),
                "max_in_flight": st.integers(1, 3),
                "lifetime": st.booleans(),
                "max_preemptions": st.integers(0, 3),
                "low_water_pages": st.integers(0, 2),
                "max_queue": st.sampled_from([2, 100]),
                "priority_aging_s": st.sampled_from([None, 1.0, 20.0]),
                "max_bypass": st.integers(0, 3),
                "lookahead": st.sampled_from([1, 2, 64]),
                "max_queue_s": st.sampled_from([None, 3.0, 30.0]),
            }
        ),
        usable_pages=st.integers(2, 50),
        extra_step_tokens=st.sampled_from([0, 1, 7, 16, 64, 1000]),
        budget=st.sampled_from([0, 1, 16, 48]),
    )
    def build(self, limits, usable_pages, extra_step_tokens, budget):
        self.limit = min(usable_pages * PAGE_SIZE, 200)
        rows = limits["max_bucket"]
        if budget:
            limits = limits | {"chunk_budgets": (rows + extra_step_tokens, *[min(budget, extra_step_tokens)] * rows)}
        config = SchedulerConfig(
            page_size=PAGE_SIZE,
            servable_length=self.limit,
            max_step_tokens=limits["max_bucket"] + extra_step_tokens,
            **limits,
        )
        self.lane = SimLane(config, usable_pages)

    @rule(
        data=st.data(),
        family=st.integers(0, 2),
        salt=st.sampled_from([None, "tenant"]),
        stops=st.booleans(),
        priority=st.integers(-2, 2),
        expected=st.sampled_from([None, None, 0, 20, 10_000]),
    )
    def submit(self, data, family, salt, stops, priority, expected):  # noqa: PLR0917 (hypothesis names them)
        prompt_length = data.draw(lengths_around_pages(self.limit - 1), label="prompt")
        max_tokens = data.draw(lengths_around_pages(min(self.limit - prompt_length, 120)), label="max_tokens")
        prompt = [(family * 7 + i * (family + 1)) % 50 for i in range(prompt_length)]
        stop = tuple(data.draw(st.sets(st.integers(0, 49), max_size=6), label="stop")) if stops else ()
        self.lane.submit(Job(prompt, max_tokens, stop, salt, priority, expected))

    @rule(copies=st.integers(2, 3), length=st.integers(1, 40))
    def submit_duplicates(self, copies, length):
        for _ in range(copies):
            self.lane.submit(Job(list(range(min(length, self.limit - 1))), 1))

    @precondition(lambda self: self.lane.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        self.lane.cancel(data.draw(st.sampled_from(sorted(self.lane.jobs)), label="key"))

    @rule()
    def fail_next_step(self):
        self.lane.fail_step(len(self.lane.executor.launched))

    @rule(turns=st.integers(1, 30))
    def turn(self, turns):
        for _ in range(turns):
            self.lane.turn()

    def teardown(self):
        if not hasattr(self, "lane"):
            return
        note(f"python -c 'from tests.sim import SimLane; SimLane.replay({self.lane.record()!r}).run()'")
        self.lane.run()
        self.lane.check_at_rest()
        limit = self.lane.config.max_preemptions
        for key, job in self.lane.jobs.items():
            assert self.lane.preempted[key] <= limit
            if job.finished.reason == "cancelled":
                assert job.cancelled
        if self.lane.config.lifetime:
            assert self.lane.scheduler.counters.preemptions == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=3000 if LONG else 150,
    stateful_step_count=60 if LONG else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
