"""Penalties, min_tokens and log probabilities of the CUDA executor, on a CPU, beside those of the CPU lane."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from engine.config import CoreConfig
from engine.cuda.logprobs import MOST
from engine.lane import Lane
from engine.messages import Logprobs, Sampling
from engine.plan import PlanError
from engine.scheduler import Scheduler
from engine.scheduling import SchedulerConfig
from engine.step import Chunk, RowContext, RowStart, StepPlan, StepResult
from kv.budget import KvCapacity
from kv.hashing import Blake2bHasher
from kv.pool import PagePool
from kv.table import TableUpdate
from tests import golden
from tests.cuda_on_cpu import CudaDriver, cuda_lane_on_cpu
from tests.models import tiny_model
from tests.owner import Owner, build

PROMPT = [7, 9, 9, 30, 31, 32, 33, 40, 41, 42, 300]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", group=3)


class Asking(NamedTuple):
    """A request: parameters, and what its row start brings along."""

    sampling: Sampling
    context: RowContext | None = None


def stopping(sampling: Sampling, suppressed: list[int], **history: list[int]) -> Asking:
    until = len(PROMPT) + sampling.min_tokens
    return Asking(sampling, RowContext(suppressed=suppressed, suppressed_until=until, **history))


MIXED = [
    Asking(Sampling()),
    Asking(Sampling(repetition_penalty=1.5, logprobs=3), RowContext(PROMPT)),
    Asking(Sampling(presence_penalty=1.8, frequency_penalty=0.9), RowContext(PROMPT, [31, 31, 7])),
    Asking(Sampling(temperature=0.8, top_k=20, frequency_penalty=1.5, seed=3), RowContext(PROMPT)),
    Asking(Sampling(logprobs=0)),
    Asking(Sampling(temperature=1.0, top_p=0.9, seed=9, logprobs=MOST)),
]


def drivers(directory: Path) -> Iterator[golden.Driver]:
    yield golden.Driver(golden.lane(directory))
    yield CudaDriver(cuda_lane_on_cpu(directory))


def begin(driver: golden.Driver, slot: int, asking: Asking) -> golden.Row:
    row = driver.start(slot)
    driver._starts[-1] = RowStart(slot, *asking)
    return row


def run(driver: golden.Driver, asked: list[Asking], steps: int) -> tuple[list[list[int]], list[StepResult]]:
    """All requests from their prompts on, together; texts and results."""
    rows = [begin(driver, slot, asking) for slot, asking in zip((4, 0, 6, 2, 1, 7), asked, strict=False)]
    results = [driver.step(chunks=[(row, PROMPT, True) for row in rows])]
    results += [driver.step(rows) for _ in range(steps)]
    return [row.tokens for row in rows], results


def close(own: Logprobs, other: Logprobs) -> None:
    assert own.top_ids == other.top_ids
    for one, two in ((own.own, other.own), (own.top, other.top)):
        np.testing.assert_allclose(np.frombuffer(one, np.float32), np.frombuffer(two, np.float32), atol=1e-4)


def test_tokens_and_log_probabilities_are_those_of_the_cpu_lane(directory: Path) -> None:
    (texts, expected), (own, results) = (run(driver, MIXED, 5) for driver in drivers(directory))
    assert own == texts
    for one, other in zip(results, expected, strict=True):
        assert one.logprobs.keys() == other.logprobs.keys() == {1, 4, 5}
        for place, read in one.logprobs.items():
            close(read, other.logprobs[place])
    plain = run(CudaDriver(cuda_lane_on_cpu(directory)), [Asking(Sampling())] * 3, 5)[0]
    assert plain[0] == own[0]
    assert plain[1] != own[1]
    assert plain[2] != own[2]


def test_log_probabilities_are_the_models_own(directory: Path) -> None:
    driver = CudaDriver(cuda_lane_on_cpu(directory))
    row = begin(driver, 3, Asking(Sampling(repetition_penalty=3.0, logprobs=2), RowContext(PROMPT)))
    results = [driver.step(chunks=[(row, PROMPT, True)]), driver.step([row])]
    for logits, token, result in zip(row.logits, row.tokens, results, strict=True):
        expected = logits.double().log_softmax(-1)
        read = result.logprobs[0]
        assert np.frombuffer(read.own, np.float32)[0] == pytest.approx(float(expected[token]), abs=1e-5)
        assert np.frombuffer(read.top_ids, np.int32).tolist() == expected.topk(2).indices.tolist()


def test_stop_tokens_are_not_sampled_before_min_tokens(directory: Path) -> None:
    lane = cuda_lane_on_cpu(directory)
    text = run(CudaDriver(lane), [Asking(Sampling())], 4)[0][0]
    stops = sorted(set(text))
    suppressed = run(CudaDriver(lane), [stopping(Sampling(min_tokens=3), stops)], 4)[0][0]
    assert not set(suppressed[:3]) & set(stops)
    alone = CudaDriver(lane)
    (tokens,) = run(alone, [stopping(Sampling(min_tokens=1), [text[0]])], 0)[0]
    assert tokens[0] != text[0]
    assert run(CudaDriver(lane), [Asking(Sampling())], 4)[0][0] == text


def test_a_preempted_row_goes_on_as_if_nothing_had_been(directory: Path) -> None:
    """Its output comes back as context and is computed as part of the prompt."""
    sampling = Sampling(frequency_penalty=1.2, presence_penalty=0.5, temperature=0.7, seed=5)
    lane = cuda_lane_on_cpu(directory)
    whole = run(CudaDriver(lane), [Asking(sampling, RowContext(PROMPT))], 6)[0][0]
    driver = CudaDriver(lane)
    row = begin(driver, 5, Asking(sampling, RowContext(PROMPT, whole[:3])))
    driver.step(chunks=[(row, PROMPT + whole[:3], True)])
    for _ in range(3):
        driver.step([row])
    assert row.tokens == whole[3:]


def test_prompt_log_probabilities_in_slices(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.executor.LOGITS_ROWS", 4)
    reads = []
    for driver in drivers(directory):
        other, row = driver.start(1), driver.start(0)
        driver.grow(row, len(PROMPT))
        driver.grow(other, 3)
        chunks = [Chunk(1, 0, PROMPT[:3], True), Chunk(0, 0, PROMPT, True, PROMPT[1:], 4)]
        plan = StepPlan(0, driver._starts, driver._table, [], [], chunks)
        result = driver.executor.collect(driver.executor.launch(plan))
        assert result.prompt_logprobs.keys() == {1}
        assert not result.logprobs
        reads.append((result.tokens, result.prompt_logprobs[1]))
    assert reads[0][0] == reads[1][0]
    assert len(reads[1][1].own) == 4 * (len(PROMPT) - 1)
    close(reads[1][1], reads[0][1])


def test_steps_that_ask_for_nothing_launch_nothing_more(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import logprobs, penalize

    def never(*_: object) -> None:
        raise AssertionError("launched")

    lane = cuda_lane_on_cpu(directory)
    run(CudaDriver(lane), MIXED[1:3], 1)
    chooser = lane.executor._chooser
    monkeypatch.setattr(penalize, "penalize", never)
    monkeypatch.setattr(penalize, "count", never)
    monkeypatch.setattr(chooser.logprobs, "_read", never)
    assert logprobs
    run(CudaDriver(lane), [Asking(Sampling())] * 6, 1)
    with pytest.raises(AssertionError, match="launched"):
        run(CudaDriver(lane), MIXED[1:2], 0)


@pytest.mark.parametrize("wrong", ["context", "history", "targets", "target", "top", "logprobs"])
def test_what_does_not_fit_is_refused_and_changes_nothing(directory: Path, wrong: str) -> None:
    lane = cuda_lane_on_cpu(directory)
    driver = CudaDriver(lane)
    text = list(run(driver, MIXED[1:2], 2)[0][0])
    chunk, start = Chunk(5, 0, [1, 2], True), RowStart(4, Sampling())
    bad = {
        "context": (start._replace(context=RowContext([1, 320])), chunk),
        "history": (start._replace(context=RowContext([1] * 1000, [1] * 26)), chunk),
        "targets": (start, chunk._replace(targets=[1, 2, 3])),
        "target": (start, chunk._replace(targets=[-1])),
        "top": (start, chunk._replace(targets=[1], top_logprobs=MOST + 1)),
        "logprobs": (start._replace(sampling=Sampling(logprobs=MOST + 1)), chunk),
    }[wrong]
    with pytest.raises(PlanError):
        lane.executor.launch(StepPlan(9, [bad[0]], [TableUpdate(5, 0, 40)], [], [], [bad[1]]))
    row = driver.rows[4]
    driver.step([row])
    assert row.tokens[:-1] == text
    assert row.tokens == run(CudaDriver(lane), MIXED[1:2], 3)[0][0]


def owners(directory: Path, lag: int) -> Iterator[Owner]:
    """Of a CPU lane, and of a lane with the CUDA executor under the same scheduler."""
    yield Owner(build(directory, pipeline_depth=lag, dtype="float32", max_chunk_tokens=16).lane)
    config = CoreConfig(
        model=str(directory), max_bucket=8, max_step_tokens=256, pipeline_depth=lag, max_chunk_tokens=16
    )
    capacity, made = KvCapacity(127, 16), cuda_lane_on_cpu(directory, buckets="2,4" if lag else None)
    limits = SchedulerConfig.of(config, 1024, capacity.usable_pages, None, 320)
    yield Owner(Lane(Scheduler(limits, PagePool(capacity), Blake2bHasher(16)), made.executor, time.monotonic))


@pytest.mark.parametrize("lag", [0, 2])
def test_a_whole_lane_gives_what_the_cpu_lane_gives_also_after_a_preemption(directory: Path, lag: int) -> None:
    prompt, told = PROMPT * 3, []
    for owner in owners(directory, lag):
        keys = [
            owner.submit(prompt, 9, Sampling(repetition_penalty=1.4, logprobs=3, prompt_logprobs=2)),
            owner.submit(
                prompt, 9, Sampling(frequency_penalty=1.1, temperature=0.9, seed=4, min_tokens=6), (16, 22, 253)
            ),
            owner.submit(prompt[::-1], 5, Sampling(logprobs=0)),
        ]
        for tokens in (2, 5):
            while len(owner.tokens[keys[0]]) < tokens:
                owner.turn()
            for key in keys[:2]:
                owner.preempt(key)
        owner.run()
        assert owner.lane.stats().preemptions == 4
        told.append((owner, keys))
    (cpu, keys), (cuda, _) = told
    assert cuda.tokens == cpu.tokens
    assert {key: end.reason for key, end in cuda.finished.items()} == {
        key: end.reason for key, end in cpu.finished.items()
    }
    assert cuda.logprobs.keys() == cpu.logprobs.keys() == {keys[0], keys[2]}
    assert cuda.prompt_logprobs.keys() == cpu.prompt_logprobs.keys() == {keys[0]}
    for own, other in ((cuda.logprobs, cpu.logprobs), (cuda.prompt_logprobs, cpu.prompt_logprobs)):
        for key, read in own.items():
            close(read, other[key])
