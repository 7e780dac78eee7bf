"""One case per rule of the scheduler; the property test mixes them all."""

import pytest

from engine.messages import Sampling, Submit
from engine.queue import WaitingQueue
from engine.request import Request
from engine.scheduler import Scheduler
from engine.scheduling import SchedulerConfig
from engine.sealing import seal
from engine.step import StepResult
from kv.table import PageTables
from tests.sim import Job, SimLane, expected_output


def config(**changes):
    limits = {"servable_length": 256, "max_bucket": 4, "max_step_tokens": 64, "max_chunk_tokens": 64}
    return SchedulerConfig(page_size=16, **(limits | changes))


def prompt(length, first=1):
    return [(first + i) % 50 for i in range(length)]


def test_one_request_runs_to_its_length():
    lane = SimLane(config(), 20)
    lane.submit(Job(prompt(20), 30))
    lane.run()
    lane.check_at_rest()
    assert lane.jobs[0].output == expected_output(prompt(20), 30, ())
    assert lane.jobs[0].finished.reason == "length"


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_row_that_ends_by_length_gets_no_surplus_step(lag):
    lane = SimLane(config(max_in_flight=lag + 1), 20)
    lane.submit(Job(prompt(20), 5))
    lane.run()
    decoded = sum(len(plan.decode_rows) for plan in lane.executor.launched)
    assert decoded == 4  # the chunk samples the first of the five tokens


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_surplus_tokens_of_a_stop_are_dropped(lag):
    stop = expected_output(prompt(20), 6, ())[3]
    lane = SimLane(config(max_in_flight=lag + 1), 20)
    lane.submit(Job(prompt(20), 30, (stop,)))
    lane.run()
    lane.check_at_rest()
    first = expected_output(prompt(20), 6, ()).index(stop)
    assert lane.jobs[0].output == expected_output(prompt(20), first + 1, ())
    assert lane.jobs[0].finished.reason == "stop"
    assert sum(len(plan.decode_rows) for plan in lane.executor.launched) == first + lag


def test_a_draining_row_holds_its_slot_and_its_pages_until_its_last_step_resolves():
    lane = SimLane(config(max_bucket=1, max_in_flight=3), 20)
    lane.submit(Job(prompt(20), 30))
    lane.submit(Job(prompt(20, 7), 30))
    for _ in range(3):
        lane.plan()
    lane.cancel(0)
    rows = lane.scheduler.rows
    assert len(rows.draining) == 1
    assert lane.pool.referenced_pages == 2
    assert not lane.plan()  # the only row is draining: nothing is admitted
    for _ in range(3):
        lane.resolve()
    assert not rows.draining
    assert lane.pool.referenced_pages == 0
    lane.run()
    lane.check_at_rest()


def test_a_prompt_in_prefill_counts_against_max_bucket():
    lane = SimLane(config(max_bucket=1, max_step_tokens=16), 20)
    lane.submit(Job(prompt(60), 2))
    lane.submit(Job(prompt(5), 2))
    lane.plan()
    assert len(lane.scheduler.rows.prefilling) == 1
    assert len(lane.scheduler.waiting) == 1


def test_active_rows_come_first_and_chunks_take_what_is_left_of_the_step():
    lane = SimLane(config(max_step_tokens=20), 20)
    lane.submit(Job(prompt(10), 20))
    lane.turn()
    lane.submit(Job(prompt(50, 9), 2))
    lane.turn()
    plan = lane.executor.launched[-1]
    assert len(plan.decode_rows) == 1
    assert [len(chunk.tokens) for chunk in plan.chunks] == [16]  # 19 tokens are left; the chunk ends on a page boundary
    assert plan.tokens <= 20


def test_a_hit_leaves_a_token_to_compute_and_is_counted():
    lane = SimLane(config(), 20)
    lane.submit(Job(prompt(32), 1))
    lane.run()
    lane.submit(Job(prompt(32), 1))
    lane.run()
    lane.check_at_rest()
    assert lane.jobs[0].finished.cached_tokens == 0
    assert lane.jobs[1].finished.cached_tokens == 16
    assert lane.scheduler.counters.cached_tokens == 16


def test_generated_tokens_are_shared_with_the_next_turn_of_a_conversation():
    lane = SimLane(config(), 20)
    lane.submit(Job(prompt(20), 20))
    lane.run()
    history = prompt(20) + lane.jobs[0].output
    lane.submit(Job([*history, 3, 4], 2))
    lane.run()
    lane.check_at_rest()
    assert lane.jobs[1].finished.cached_tokens == 32  # 39 of the 40 tokens are in the cache, two full pages


def test_salts_do_not_share():
    lane = SimLane(config(), 20)
    lane.submit(Job(prompt(40), 1, salt="a"))
    lane.run()
    lane.submit(Job(prompt(40), 1, salt="b"))
    lane.run()
    assert lane.jobs[1].finished.cached_tokens == 0


def test_a_request_is_admitted_only_if_its_pages_suffice_beside_those_it_hits():
    lane = SimLane(config(servable_length=64), 4)
    lane.submit(Job(prompt(32), 1))
    lane.run()
    assert lane.pool.cached_pages == 2
    lane.submit(
        Job(prompt(49), 1)
    )  # hits both cached pages and needs both free ones: its hit pages are not counted twice
    lane.run()
    lane.check_at_rest()
    assert lane.jobs[1].finished.cached_tokens == 32


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_preemption_gives_way_to_the_older_request_and_loses_no_token(lag):
    lane = SimLane(config(servable_length=96, max_in_flight=lag + 1, low_water_pages=0), 8)
    for first in (1, 11, 21):
        lane.submit(Job(prompt(17, first), 70))
    lane.run()
    lane.check_at_rest()
    assert lane.scheduler.counters.preemptions > 0
    assert lane.preempted[0] == 0  # the oldest is never the victim
    assert all(job.finished.reason == "length" for job in lane.jobs.values())


def test_after_max_preemptions_the_whole_lifetime_is_reserved():
    lane = SimLane(config(servable_length=128, max_preemptions=1), 9)
    for first in range(4):
        lane.submit(Job(prompt(17, first * 9), 100))
    lane.run()
    lane.check_at_rest()
    assert max(lane.preempted.values()) == 1


def test_lifetime_reservation_never_preempts():
    lane = SimLane(config(servable_length=128, lifetime=True), 9)
    for first in range(4):
        lane.submit(Job(prompt(17, first * 9), 100))
    lane.run()
    lane.check_at_rest()
    assert lane.scheduler.counters.preemptions == 0


def test_requests_that_can_never_be_served_are_refused_with_both_numbers():
    lane = SimLane(config(), 20)
    lane.submit(Job(prompt(200), 57))
    lane.run()
    finished = lane.jobs[0].finished
    assert finished.reason == "error"
    assert "257" in finished.message
    assert "256" in finished.message


def test_a_full_queue_refuses_at_once_and_what_a_free_row_awaits_is_not_in_the_queue():
    lane = SimLane(config(max_bucket=3, max_queue=2), 20)
    for _ in range(6):
        lane.submit(Job(prompt(5), 1))
    lane._take(lane.scheduler.take_effects())
    finished = lane.jobs[5].finished
    assert finished.refused
    assert "5 requests are waiting, rows are free for 3 of them and max_queue is 2" in finished.message
    lane.run()
    assert [lane.jobs[key].finished.reason for key in range(5)] == ["length"] * 5
    assert lane.scheduler.counters.refused_queue_full == 1


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_closed_lane_refuses_what_waits_and_what_comes_and_ends_what_runs(lag):
    lane = SimLane(config(max_bucket=2, max_in_flight=lag + 1), 20)
    for _ in range(4):
        lane.submit(Job(prompt(5), 20))
    lane.turn()
    lane.scheduler.close()
    lane.submit(Job(prompt(5), 20))
    lane._take(lane.scheduler.take_effects())
    assert [job.finished.refused for job in list(lane.jobs.values())[2:]] == [True] * 3
    lane.run()
    lane.check_at_rest()
    assert [lane.jobs[key].finished.reason for key in range(2)] == ["length"] * 2


@pytest.mark.parametrize("closed_after_preemption", [False, True])
def test_a_closed_lane_ends_what_it_preempts_too(closed_after_preemption):
    lane = SimLane(config(max_bucket=4), 8)
    for number in range(4):
        lane.submit(Job([number] * 20, 40))
    scheduler = lane.scheduler
    while not scheduler.counters.preemptions if closed_after_preemption else scheduler.rows.occupied() < 3:
        lane.turn()
    started = [job for job in lane.jobs.values() if job.output]
    lane.scheduler.close()
    lane.run()
    lane.check_at_rest()
    assert lane.scheduler.counters.preemptions > 0
    assert {job.finished.reason for job in started} == {"length"}


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_only_what_a_failed_step_took_may_be_tried_elsewhere(lag):
    lane = SimLane(config(max_bucket=2, max_in_flight=lag + 1), 20)
    lane.fail_step(0)
    for _ in range(3):
        lane.submit(Job(prompt(5), 20))
    lane.run()
    lane.check_at_rest()
    ends = [(job.finished.reason, job.finished.refused, job.finished.retryable) for job in lane.jobs.values()]
    assert ends == [("error", False, True), ("error", False, True), ("length", False, False)]


def test_a_request_that_waits_too_long_is_refused_and_one_that_runs_is_not():
    lane = SimLane(config(max_bucket=1, max_queue_s=5.0), 20)
    lane.submit(Job(prompt(5), 20))
    lane.submit(Job(prompt(5), 20))
    lane.run()
    assert lane.jobs[0].finished.reason == "length"
    assert lane.jobs[1].finished.refused
    assert lane.scheduler.counters.refused_queue_time == 1


def test_a_cancelled_request_that_waits_is_never_computed():
    lane = SimLane(config(max_bucket=1), 20)
    lane.submit(Job(prompt(5), 3))
    lane.submit(Job(prompt(30, 9), 3))
    lane.turn()
    lane.cancel(1)
    lane.run()
    assert lane.jobs[1].finished.reason == "cancelled"
    assert sum(len(chunk.tokens) for plan in lane.executor.launched for chunk in plan.chunks) == 5


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_failed_step_ends_the_requests_in_it_and_no_other(lag):
    lane = SimLane(config(max_bucket=2, max_in_flight=lag + 1), 20)
    lane.submit(Job(prompt(20), 10))
    lane.submit(Job(prompt(20, 5), 10))
    lane.submit(Job(prompt(20, 9), 10))
    lane.executor.fail_steps.add(2)
    lane.run()
    lane.check_at_rest()
    reasons = [job.finished.reason for job in lane.jobs.values()]
    assert reasons == ["error", "error", "length"]
    assert "planted failure" in lane.jobs[0].finished.message


def test_pages_of_a_failed_step_are_not_shared():
    lane = SimLane(config(max_in_flight=2), 20)
    lane.submit(Job(prompt(40), 10))
    lane.executor.fail_steps.add(0)
    lane.run()
    assert lane.pool.cached_pages == 0


def test_hashes_that_do_not_belong_to_the_prompt_are_refused():
    lane = SimLane(config(), 20)
    lane.jobs[0] = Job(prompt(20), 1)
    lane.scheduler.submit(Submit(0, "r", b"\1\0\0\0" * 20, b"", 1, (), Sampling()), 0.0)
    lane.run()
    assert "0 block hashes came with a prompt of 1 full blocks" in lane.jobs[0].finished.message


@pytest.mark.parametrize(
    ("tokens", "digests", "message"),
    [
        (16, 17, "17 bytes of block hashes are no multiple of the digest size, 16 bytes"),
        (80, 17, "17 bytes of block hashes are no multiple of the digest size, 16 bytes"),
        (5, 0, "bytes length not a multiple of item size"),
    ],
)
def test_bytes_of_a_wrong_length_are_refused_and_mates_go_on(tokens, digests, message):
    """A tail of a digest or of a token id may neither be dropped nor end the core."""
    lane = SimLane(config(), 20)
    lane.submit(Job(prompt(20), 5))
    lane.jobs[1] = Job(prompt(4), 1)
    lane.scheduler.submit(Submit(1, "r", bytes(tokens), bytes(digests), 1, (), Sampling()), 0.0)
    lane.run()
    lane.check_at_rest()
    assert [job.finished.reason for job in lane.jobs.values()] == ["length", "error"]
    assert lane.jobs[1].finished.message.startswith(f"prompt ({tokens} bytes) ")
    assert message in lane.jobs[1].finished.message


def test_max_step_tokens_below_max_bucket_is_refused():
    with pytest.raises(ValueError, match="max_step_tokens is 3, but a step of 4 active rows"):
        config(max_step_tokens=3)


def test_higher_priorities_go_first_and_equal_ones_in_order():
    lane = SimLane(config(max_bucket=1), 20)
    for priority in (0, -3, 2, 2, 99):
        lane.submit(Job(prompt(5), 1, priority=priority))
    order = []
    for _ in range(5):
        lane.turn()
        order += [key for key, job in lane.jobs.items() if job.finished and key not in order]
    assert order == [4, 2, 3, 0, 1]


def test_a_low_class_rises_as_it_waits():
    lane = SimLane(config(max_bucket=1, priority_aging_s=10.0), 20)
    lane.submit(Job(prompt(5), 1, priority=-1))
    lane.now = 15.0  # risen by one class: as good as a new request of class 0, and older
    lane.submit(Job(prompt(5), 1, priority=0))
    lane.turn()
    assert lane.jobs[0].finished
    assert not lane.jobs[1].finished


def test_a_high_class_preempts_a_low_one_even_if_that_is_older():
    lane = SimLane(config(servable_length=96, low_water_pages=0), 7)
    lane.submit(Job(prompt(17), 70, priority=-1))
    lane.submit(Job(prompt(17, 9), 70, priority=1))
    lane.run()
    lane.check_at_rest()
    assert lane.preempted[0] >= 1
    assert lane.preempted[1] == 0


def test_a_request_that_does_not_fit_is_passed_a_bounded_number_of_times():
    lane = SimLane(config(servable_length=160, max_bypass=2, max_bucket=4), 10)
    lane.submit(Job(prompt(90), 60))  # holds six pages and grows
    lane.turn()
    lane.submit(Job(prompt(100, 5), 2))  # does not fit beside it
    for first in (11, 21, 31):
        lane.submit(Job(prompt(5, first), 1))
    for _ in range(4):
        lane.turn()
    assert [bool(lane.jobs[key].finished) for key in (1, 2, 3, 4)] == [False, True, True, False]
    assert lane.scheduler.counters.bypasses == 2
    lane.run()
    lane.check_at_rest()


def test_chunks_keep_to_the_budget_of_the_active_rows():
    lane = SimLane(config(max_step_tokens=64, chunk_budgets=(64, 16, 16, 16, 16)), 20)
    lane.submit(Job(prompt(10), 30))
    lane.turn()
    lane.submit(Job(prompt(100, 9), 2))
    lane.run()
    beside = [sum(len(c.tokens) for c in plan.chunks) for plan in lane.executor.launched if plan.decode_rows]
    assert max(beside) == 16


def test_a_preempted_request_returns_to_its_place_and_the_oldest_counts_as_such():
    queue = WaitingQueue(aging_s=10.0)
    requests = []
    for order, arrival in enumerate((0.0, 5.0, 6.0)):
        request = Request.from_submit(
            Submit(order, "r", b"\1\0\0\0", b"", 1, (), Sampling()), digest_size=16, arrival=arrival, order=order
        )
        requests.append(request)
        queue.append(request)
    queue.remove(requests[1])  # it passed the first one, and comes back
    requests[1].preemptions = 1
    queue.put_back(requests[1])
    assert queue.oldest_arrival() == 0.0
    assert queue.first(3, now=100.0) == requests
    queue.remove(requests[1])
    assert queue.first(3, now=100.0) == [requests[0], requests[2]]
    assert len(queue) == 2


def test_only_tokens_that_were_computed_before_count_as_recomputed():
    lane = SimLane(config(max_bucket=2, max_chunk_tokens=16), 20)
    lane.submit(Job(prompt(100), 2))
    lane.turn()
    lane.scheduler._preempt(lane.scheduler.rows.prefilling[0])  # 16 of 100 tokens are written, and sealed
    lane.pool.release(lane.pool.allocate(lane.pool.available).pages)  # evicts everything
    lane.run()
    assert lane.scheduler.counters.recomputed_tokens == 16


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_row_that_is_not_finite_ends_alone_and_its_pages_are_not_shared(lag):
    lane = SimLane(config(max_in_flight=lag + 1), 20)
    lane.submit(Job(prompt(40), 20))
    lane.submit(Job(prompt(40, 9), 20))
    lane.turn()
    lane.results[:] = [StepResult(r.tokens, failed_rows=frozenset({0})) for r in lane.results]
    if not lag:  # the first step has resolved already
        lane.plan()
        lane.results[0] = StepResult(lane.results[0].tokens, failed_rows=frozenset({0}))
    lane.run()
    lane.check_at_rest()
    assert lane.jobs[0].finished.reason == "error"
    assert "not finite" in lane.jobs[0].finished.message
    assert lane.jobs[1].finished.reason == "length"


def test_padding_is_counted_beside_the_tokens_that_were_asked_for():
    lane = SimLane(config(), 20)
    lane.submit(Job(prompt(5), 2))
    plan = lane.scheduler.plan(0.0)
    lane.scheduler.resolve(StepResult([1] * len(plan.sampled_rows), padding_tokens=3))
    assert (lane.scheduler.counters.computed_tokens, lane.scheduler.counters.padding_tokens) == (5, 3)


def test_a_recorded_run_repeats_its_decisions():
    lane = SimLane(config(max_in_flight=2, max_bypass=1, priority_aging_s=3.0), 12)
    for first in range(8):
        lane.submit(Job(prompt(10 + 9 * first, first), 20 + first, priority=first % 3))
        lane.turn()
    lane.fail_step(6)
    lane.cancel(2)
    lane.run()
    again = SimLane.replay(lane.record())
    assert again.executor.launched == lane.executor.launched
    for key, job in lane.jobs.items():
        assert (again.jobs[key].output, again.jobs[key].finished) == (job.output, job.finished)


def crowd(expected, usable_pages=24, lag=0):
    """Six requests of a page and six more pages of output each, in room for four."""
    lane = SimLane(config(max_bucket=8, max_in_flight=lag + 1, servable_length=384), usable_pages)
    for first in range(6):
        lane.submit(Job(prompt(10, first), 100, expected=expected))
    lane.run()
    lane.check_at_rest()
    return lane


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_expected_length_keeps_room_and_so_avoids_preemptions(lag):
    assert crowd(None, lag=lag).scheduler.counters.preemptions > 0
    assert crowd(100, lag=lag).scheduler.counters.preemptions == 0


@pytest.mark.parametrize("expected", [0, 1, 10**6])
def test_a_wrong_guess_changes_no_text_and_no_length(expected):
    lane = crowd(expected)
    assert [(job.finished.reason, len(job.output)) for job in lane.jobs.values()] == [("length", 100)] * 6


def test_a_guess_beyond_the_pool_waits_for_an_empty_lane_at_most():
    lane = SimLane(config(), 16)
    lane.submit(Job(prompt(20), 20))
    lane.submit(Job(prompt(20, 5), 230, expected=230))
    lane.turn()
    assert [request.key for request in lane.scheduler.waiting] == [1]
    lane.run()
    lane.check_at_rest()
    assert len(lane.jobs[1].output) == 230


def test_others_leave_the_room_that_a_running_request_expects_to_need():
    lane = SimLane(config(), 8)
    lane.submit(Job(prompt(10), 100, expected=90))  # 7 pages in the end
    lane.turn()
    lane.submit(Job(prompt(20, 5), 4))
    lane.turn()
    assert len(lane.scheduler.waiting) == 1
    lane.run()
    assert lane.scheduler.counters.preemptions == 0
    plain = SimLane(config(), 8)
    plain.submit(Job(prompt(10), 100))
    plain.turn()
    plain.submit(Job(prompt(20, 5), 4))
    plain.turn()
    assert not plain.scheduler.waiting


def test_the_simulation_turns_red_when_a_table_update_is_lost(monkeypatch):
    """A planted fault: the last page of a growing row never reaches the device."""
    drain = PageTables.drain
    monkeypatch.setattr(PageTables, "drain", lambda tables: drain(tables)[:-1])
    lane = SimLane(config(), 6)
    lane.submit(Job(prompt(20), 30))
    with pytest.raises(AssertionError, match="has no page for position"):
        lane.run()


def test_the_simulation_turns_red_when_a_page_is_sealed_before_it_is_written(monkeypatch):
    """A planted fault: sealing follows what is planned instead of what is resolved."""
    plan_chunk = Scheduler._plan_chunk

    def early(self, request, budget, chunks):
        count = plan_chunk(self, request, budget, chunks)
        request.written = request.target
        seal(request, self.pool, self.hasher, self.config.page_size)
        return count

    monkeypatch.setattr(Scheduler, "_plan_chunk", early)
    lane = SimLane(config(max_step_tokens=64, max_chunk_tokens=16), 20)
    lane.submit(Job(prompt(100), 3))
    lane.submit(Job(prompt(100), 3))
    with pytest.raises(AssertionError, match="nobody has written"):
        lane.run()
