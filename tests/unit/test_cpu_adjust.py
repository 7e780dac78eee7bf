"""Penalties, min_tokens and log probabilities in the CPU executor: bounds, memory, and no cost to other rows."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cpu.lane import CpuLane
from engine.messages import Sampling
from engine.plan import PlanError
from engine.step import Chunk, RowContext, RowStart, StepPlan
from kv.table import TableUpdate
from tests import golden
from tests.golden import Driver
from tests.models import tiny_model
from tests.owner import Scores

PROMPT = list(range(10, 50))
VOCAB = 320


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3", group=2)


@pytest.fixture
def lane(directory: Path) -> CpuLane:
    return golden.lane(directory)


def plan(context: RowContext | None = None, **chunk: object) -> StepPlan:
    start = RowStart(1, Sampling(repetition_penalty=1.5), context)
    return StepPlan(0, [start], [TableUpdate(1, 0, 3)], [], [], [Chunk(1, 0, PROMPT[:8], True, **chunk)])


BAD = {
    "prompt": (plan(RowContext(prompt=[1, VOCAB])), "context of row 1 is 320"),
    "outputs": (plan(RowContext(outputs=[-1])), "context of row 1 is -1"),
    "suppressed": (plan(RowContext(suppressed=[VOCAB], suppressed_until=9)), "context of row 1 is 320"),
    "history": (plan(RowContext(prompt=[1] * 2050)), "history of row 1 is 2050, but at most 2049"),
    "target": (plan(targets=[1, VOCAB]), "chunk of row 1 is 320"),
    "targets": (plan(targets=[1] * 9), "targets in the chunk of row 1 is 9, but at most 8"),
}


@pytest.mark.parametrize(("step", "message"), BAD.values(), ids=BAD)
def test_a_context_that_does_not_fit_is_refused_before_anything_is_written(lane, step, message):
    before = lane.executor.parts.plan_arena.memory.clone()
    with pytest.raises(PlanError, match=message):
        lane.executor.launch(step)
    assert torch.equal(lane.executor.parts.plan_arena.memory, before)


def test_rows_that_ask_for_nothing_are_not_looked_at(lane, monkeypatch):
    """Each of these is all that penalties and log probabilities cost: none is called for plain rows."""
    for name in ("engine.cpu.adjust.penalize", "engine.logprobs.LogprobReader.read"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("called for a plain row"))
    monkeypatch.setattr("engine.cpu.adjust._Adjusted", lambda *_: pytest.fail("kept for a plain row"))
    driver = Driver(lane)
    row = driver.start(0, sampling=Sampling(temperature=0.8, top_p=0.9, seed=1))
    driver.prefill(row, PROMPT, 16)
    result = driver.step([row])
    assert (result.logprobs, result.prompt_logprobs) == ({}, {})


def test_a_slot_forgets_what_its_last_request_asked_for(lane):
    driver = Driver(lane)
    plain = driver.start(0)
    driver.prefill(plain, PROMPT, 1000)
    driver.step([plain])
    asking = driver.start(0)
    context = RowContext(PROMPT, suppressed=plain.tokens, suppressed_until=1000)
    driver._starts[-1] = RowStart(0, Sampling(repetition_penalty=5.0, logprobs=2), context)
    driver.prefill(asking, PROMPT, 1000)
    assert driver.step([asking]).logprobs.keys() == {0}
    assert not set(asking.tokens) & set(plain.tokens)
    again = driver.start(0)
    driver.prefill(again, PROMPT, 1000)
    result = driver.step([again])
    assert (again.tokens, result.logprobs) == (plain.tokens, {})


def test_a_prompt_is_scored_in_slices_and_nothing_grows(directory, monkeypatch):
    """Never more logits at once than are reserved, whatever the chunk."""
    monkeypatch.setattr("engine.cpu.executor.LOGITS_ROWS", 3)
    lane = golden.lane(directory)
    executor, rows = lane.executor, []
    head = executor._head
    monkeypatch.setattr(executor, "_head", lambda hidden: rows.append(len(hidden)) or head(hidden))
    arenas = [executor.parts.logits.memory, executor.parts.activations.memory, executor.parts.plan_arena.memory]
    pointers = [(memory.data_ptr(), memory.nbytes) for memory in arenas]
    table = [TableUpdate(1, 0, 3), TableUpdate(1, 1, 4), TableUpdate(1, 2, 5)]
    step = StepPlan(0, [RowStart(1, Sampling())], table, [], [], [Chunk(1, 0, PROMPT, True, PROMPT[1:], 4)])
    scored = Scores.of(executor.collect(executor.launch(step)).prompt_logprobs[0])
    assert scored.own.shape == (39,)
    assert scored.top.shape == (39, 4)
    assert max(rows) == 3
    assert [(memory.data_ptr(), memory.nbytes) for memory in arenas] == pointers
    whole = golden.lane(directory, max_bucket=64).executor
    monkeypatch.setattr("engine.cpu.executor.LOGITS_ROWS", 64)
    expected = Scores.of(whole.collect(whole.launch(step)).prompt_logprobs[0])
    np.testing.assert_allclose(scored.own, expected.own, atol=1e-5)
    np.testing.assert_array_equal(scored.ids, expected.ids)


def test_the_history_is_in_the_report(directory):
    small, large = (golden.lane(directory, context_limit=limit).report for limit in (256, 512))
    rows = 8
    assert large.measured.plan_arena - small.measured.plan_arena >= rows * 256 * 4
    assert large.planned.plan_arena == large.measured.plan_arena


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_log_probabilities_too(directory, dtype):
    driver = Driver(golden.lane(directory, dtype=dtype))
    row = driver.start(0, sampling=Sampling(logprobs=3))
    driver.step(chunks=[(row, PROMPT, True)])
    scores = Scores.of(driver.step([row]).logprobs[0])
    expected = torch.log_softmax(row.logits[1].double(), -1)
    assert scores.own[0] == pytest.approx(float(expected[row.tokens[1]]), abs=1e-4)
    assert scores.top[0].tolist() == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
