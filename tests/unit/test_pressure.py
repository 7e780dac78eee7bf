"""The scheduler under more load than it can hold: no thrash, no collapse, and the same decisions every time."""

import pytest

from engine.admission import lifetime_pages
from engine.scheduling import SchedulerConfig
from engine.step import StepResult
from tests.bench.chunk_targets import CARDS, closed_loop, gaps_ms, long_prompts, quantile
from tests.sim import Job, SimLane
from tests.traffic import Arrival, Traffic, poisson

PROMPT, OUTPUT = (64, 512), (64, 512)
MEAN_LIFETIME_PAGES = lifetime_pages(sum(PROMPT) // 2, sum(OUTPUT) // 2, 16)
ROWS = 64


def config(**changes):
    limits = {"servable_length": 2048, "max_bucket": ROWS, "max_step_tokens": 2048, "max_chunk_tokens": 2048}
    return SchedulerConfig(page_size=16, **(limits | {"max_queue": 100_000, "max_in_flight": 2} | changes))


def play(usable_pages, arrivals, **changes):
    changes.setdefault("low_water_pages", usable_pages // 100)
    return Traffic(config(**changes), usable_pages).run(arrivals)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_over_committed_pool_does_not_thrash(seed):
    """Every row full and the pool holding two thirds of what they will need: at least 0.8 of the work is useful."""
    pages = int(ROWS * MEAN_LIFETIME_PAGES / 1.5)
    run = play(pages, poisson(1e6, 600, seed, PROMPT, OUTPUT))
    assert run.scheduler.counters.preemptions > 0
    assert run.useful_share >= 0.8
    assert len(run.ended) == 600


def test_throughput_at_twice_the_arrivals_is_that_of_saturation():
    """Arrivals at just what the lane can serve, and at twice that: within 5 %."""
    pages = int(ROWS * MEAN_LIFETIME_PAGES / 1.2)
    closed = play(pages, poisson(1e6, 600, 5, PROMPT, OUTPUT))
    rate = 600 / closed.seconds
    at_capacity = play(pages, poisson(rate, 1200, 6, PROMPT, OUTPUT))
    doubled = play(pages, poisson(2 * rate, 1200, 6, PROMPT, OUTPUT))
    assert doubled.tokens_per_second >= 0.95 * at_capacity.tokens_per_second


def test_a_trace_gives_the_same_decisions_every_time():
    arrivals = [Arrival(a.time, a.prompt_tokens, a.max_tokens, n % 3, n % 5) for n, a in
                enumerate(poisson(200, 300, 9, PROMPT, OUTPUT))]  # fmt: skip
    runs = [play(1500, arrivals, priority_aging_s=0.5, max_bypass=4) for _ in range(2)]
    assert runs[0].decisions == runs[1].decisions
    assert play(1500, arrivals[:-1], priority_aging_s=0.5, max_bypass=4).decisions != runs[0].decisions


def test_nobody_starves_behind_a_stream_of_higher_priority():
    arrivals = poisson(120, 400, 4, PROMPT, OUTPUT)
    low = Arrival(0.5, 300, 100, priority=-1)
    high = [Arrival(a.time, a.prompt_tokens, a.max_tokens, priority=1) for a in arrivals]
    waited = []
    for aging in (0.2, None):
        run = play(800, [low, *high], priority_aging_s=aging)
        waited.append(run.first_token[0] - low.time)
    assert waited[0] < 0.7 * waited[1]


def test_a_chunk_target_bounds_the_longest_step_beside_active_rows():
    arrivals = [Arrival(0.0, 64, 400) for _ in range(16)] + [Arrival(0.2 + n / 10, 1900, 4) for n in range(8)]
    free = play(3000, arrivals)
    bounded = play(3000, arrivals, chunk_budgets=(2048, *[448] * ROWS))

    def longest(run):
        return max(b.time - a.time for a, b in zip(run.samples, run.samples[1:], strict=False) if a.active and b.active)

    assert longest(bounded) < 0.5 * longest(free)
    assert len(bounded.ended) == len(free.ended) == 24


@pytest.mark.parametrize(("card", "longest_ms"), [(CARDS[0], 11.5), (CARDS[1], 20.0)], ids=["quick host", "slow host"])
def test_a_target_of_ten_milliseconds_keeps_streams_going_and_costs_few_tokens(card, longest_ms):
    assert quantile(gaps_ms(long_prompts(card, None)), 0.99) > 28
    assert quantile(gaps_ms(long_prompts(card, 10.0)), 0.99) < longest_ms
    free, bounded = (closed_loop(card, target, 64).tokens_per_second for target in (None, 10.0))
    assert bounded >= 0.98 * free


@pytest.mark.parametrize("lag", [0, 2])
def test_the_lifetime_formula_is_the_peak_that_the_allocator_sees(lag):
    """Every prompt and output length across two page boundaries."""
    for prompt in range(1, 36):
        for output in range(1, 36):
            lane = SimLane(config(max_bucket=2, max_in_flight=lag + 1), 8)
            lane.submit(Job([1] * prompt, output))
            peak = 0
            scheduler = lane.scheduler
            while not scheduler.idle:
                while (plan := scheduler.plan(0.0)) is not None:
                    lane.results.append(StepResult([2] * len(plan.sampled_rows)))
                peak = max(peak, lane.pool.referenced_pages)
                scheduler.resolve(lane.results.pop(0))
            assert peak == lifetime_pages(prompt, output, 16), f"{prompt} + {output}"
