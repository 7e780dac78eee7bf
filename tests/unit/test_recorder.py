"""The flight recorder: what a lane writes, another process reads, whatever has become of the lane."""

import json
import os

import pytest

from engine import recorder
from engine.lane import Lane, LaneBroken
from engine.recorder import SLOT_BYTES, SLOTS, FlightRecorder
from engine.scheduling import SchedulerConfig
from tests.sim import Job, SimLane
from worker.blackbox import BlackBox

CONFIG = SchedulerConfig(page_size=16, servable_length=512, max_bucket=4, max_step_tokens=64, max_chunk_tokens=64)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def run(descriptor: int, jobs: int, max_tokens: int, fail: set[int] = frozenset()) -> Lane:
    sim = SimLane(CONFIG, 64)
    sim.executor.fail_steps |= fail
    for n in range(jobs):
        sim.submit(Job([n] * 40, max_tokens))
    lane = Lane(sim.scheduler, sim.executor, Clock())
    lane.recorder = FlightRecorder(descriptor, lane.clock)
    while not lane.idle:
        lane.advance()
    return lane


@pytest.fixture
def memory():
    descriptor = recorder.allocate()
    yield descriptor
    os.close(descriptor)


def test_a_step_says_what_was_planned_and_how_long_it_took(memory):
    run(memory, 2, 3)
    first, second, third, *_ = recorder.read(memory)
    assert (first.step, first.decode_rows, first.chunks, first.tokens) == (0, 0, [(0, 0, 40), (1, 0, 16)], 56)
    assert (first.chunk_rows, first.referenced_pages, first.waiting) == (2, 6, 0)
    assert (second.decode_rows, second.longest, second.chunks) == (1, 41, [(1, 16, 24)])
    assert third.decode_rows == 2
    assert first.launch_us == 1000
    assert first.total_us > first.launch_us
    assert first.error == ""


def test_the_last_thousand_steps_are_kept_in_order(memory):
    shared = FlightRecorder(memory, Clock())
    sim = SimLane(CONFIG, 64)
    for number in range(SLOTS + 50):
        sim.submit(Job([number % 50] * 3, 1))
        plan = sim.scheduler.plan(0.0)
        shared.planned(plan, sim.scheduler)
        shared.launched()
        sim.results.append(sim.executor.launch(plan))
        sim.resolve()
        shared.resolved()
    assert [record.step for record in recorder.read(memory)] == list(range(50, SLOTS + 50))


def test_a_step_without_a_result_is_there_and_says_so(memory):
    sim = SimLane(CONFIG, 64)
    sim.submit(Job([1] * 40, 3))
    shared = FlightRecorder(memory, Clock())
    shared.planned(sim.scheduler.plan(0.0), sim.scheduler)
    (record,) = recorder.read(memory)
    assert (record.step, record.tokens, record.total_us) == (0, 40, -1)


def test_a_failed_step_carries_its_error_however_long_and_strange(memory):
    with pytest.raises(LaneBroken):
        run(memory, 9, 3, fail={0, 1, 2})
    records = recorder.read(memory)
    assert [record.error for record in records] == [f"MemoryError: planted failure of step {n}" for n in range(3)]
    shared = FlightRecorder(memory, Clock())
    sim = SimLane(CONFIG, 64)
    sim.submit(Job([1], 1))
    shared.planned(sim.scheduler.plan(0.0), sim.scheduler)
    shared.resolved("\x01\U0001f600" * 1000)
    assert recorder.read(memory)[0].error


def test_a_slot_that_was_being_written_costs_no_other(memory):
    run(memory, 1, 4)
    os.pwrite(memory, b'{"step":1001,"at_s":7"', SLOT_BYTES)
    assert [record.step for record in recorder.read(memory)] == [0, 2, 3]


def test_what_is_left_is_saved_as_json_lines_and_said(tmp_path, caplog):
    box = BlackBox(str(tmp_path / "new"))
    box.save(1)
    assert not list(tmp_path.iterdir()), "a core that made no step leaves no file"
    run(box.descriptor, 1, 4)
    box.save(77)
    (path,) = (tmp_path / "new").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert "77" in path.name
    assert str(path) in caplog.text
    assert "step 3: 1 rows, 1 tokens" in caplog.text
    box.close()
    box.close()


def test_a_record_that_cannot_be_saved_is_still_said(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    box = BlackBox(str(tmp_path / "file"))
    run(box.descriptor, 1, 2)
    box.save(77)
    assert "cannot be written" in caplog.text
    assert "step 1:" in caplog.text
    box.close()
