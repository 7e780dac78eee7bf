"""The whole lane against transformers: lag, chunks, cache hits, batch mates and preemption change no text."""

from array import array
from pathlib import Path

import pytest

import engine.build
from engine.lane import Lane, LaneBroken
from engine.messages import Sampling
from engine.step import DeviceCounters
from engine.warmup import measure_step_costs
from kv.hashing import pack_tokens
from tests import golden
from tests.models import tiny_model
from tests.owner import Owner, build

PROMPT_LENGTHS = (1, 15, 16, 17, 33, 64, 65, 150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[golden.Reference]]:
    directory = tiny_model(tmp_path_factory.mktemp("lane") / "qwen3", "qwen3", group=3, seed=5)
    transformers = golden.reference_model(directory)
    prompts = [[(7 * i + 3 * n) % 300 + 10 for i in range(n)] for n in PROMPT_LENGTHS]
    return directory, [golden.reference(transformers, prompt) for prompt in prompts]


def assert_same_text(tokens: list[int], expected: golden.Reference) -> None:
    """Equal up to the first token whose top-1 gap is too small to decide, which must come late to be worth the name."""
    for index, (own, other) in enumerate(zip(tokens, expected.tokens, strict=True)):
        best = expected.logits[index].topk(2).values
        if best[0] - best[1] <= golden.MIN_GAP:
            return
        assert own == other, f"token {index} of a prompt of {len(expected.prompt)}"


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("chunk", [7, 16, 64, 1000])
@pytest.mark.parametrize("page_size", [16, 64])
def test_texts_are_those_of_transformers_cold_and_warm_at_any_lag_and_chunk(model, lag, chunk, page_size):
    directory, references = model
    built = build(directory, kv_page_size=page_size, pipeline_depth=lag, max_chunk_tokens=chunk)
    owner = Owner(built.lane)
    for _ in ("cold", "warm"):
        keys = [owner.submit(expected.prompt) for expected in references]
        owner.run()
        for key, expected in zip(keys, references, strict=True):
            assert_same_text(owner.tokens[key], expected)
    warm = owner.finished[keys[-1]]
    assert warm.cached_tokens == (warm.prompt_tokens - 1) // page_size * page_size
    assert built.lane.stats().referenced_pages == 0


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_texts_survive_preemption(model, lag):
    directory, references = model
    built = build(directory, kv_cache_memory="160KiB", pipeline_depth=lag, dtype="float32")
    owner = Owner(built.lane)
    served = [r for r in references if len(r.prompt) + golden.TOKENS <= built.servable_length]
    keys = [owner.submit(expected.prompt) for expected in served]
    owner.run()
    assert built.lane.stats().preemptions > 0
    for key, expected in zip(keys, served, strict=True):
        assert_same_text(owner.tokens[key], expected)
        assert owner.finished[key].reason == "length"


def test_a_seed_gives_one_text_whatever_its_mates_page_size_chunk_and_preemption(model):
    directory, references = model
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=2**63 + 11)
    texts = []
    for settings, mates in (
        ({}, 0),
        ({"kv_page_size": 64}, 5),
        ({"max_chunk_tokens": 7, "kv_cache_memory": "160KiB"}, 6),
    ):
        owner = Owner(build(directory, **settings).lane)
        for n in range(mates):
            owner.submit(references[n].prompt, sampling=Sampling(temperature=1.3, seed=n))
        key = owner.submit(references[4].prompt, sampling=sampling)
        owner.run()
        texts.append(owner.tokens[key])
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != references[4].tokens


def test_a_failing_step_is_told_to_its_requests_and_three_in_a_row_break_the_lane(model, monkeypatch):
    directory, references = model
    built = build(directory)
    owner = Owner(built.lane)

    def fail(plan: object) -> object:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(built.lane.executor, "launch", fail)
        key = owner.submit(references[0].prompt)
        owner.run()
    assert owner.finished[key].reason == "error"
    assert "planted" in owner.finished[key].message
    key = owner.submit(references[0].prompt)
    owner.run()
    assert_same_text(owner.tokens[key], references[0])
    monkeypatch.setattr(built.lane.executor, "launch", fail)
    for _ in range(2):
        owner.submit(references[0].prompt)
        owner.run()
    owner.submit(references[0].prompt)
    with pytest.raises(LaneBroken, match="3 steps in a row failed, the last with: planted"):
        owner.run()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_step_that_fails_to_launch_harms_no_cached_page(model, monkeypatch, lag):
    """The device never hears of the lost step's table: nothing may be launched through the stale one."""
    directory, references = model
    built = build(directory, pipeline_depth=lag, max_bucket=2)
    owner = Owner(built.lane)
    owner.submit(references[-1].prompt)
    owner.run()
    launch, failures = built.lane.executor.launch, iter([True])

    def fail_once(plan):
        if plan.starts and next(failures, False):
            raise MemoryError("planted")
        return launch(plan)

    monkeypatch.setattr(built.lane.executor, "launch", fail_once)
    lost = owner.submit([11] * 150)
    owner.run()
    assert owner.finished[lost].reason == "error"
    warm = owner.submit(references[-1].prompt)
    owner.run()
    assert owner.finished[warm].cached_tokens > 0
    assert_same_text(owner.tokens[warm], references[-1])


def test_a_lane_that_makes_no_steps_shows_its_age(model, monkeypatch):
    directory, references = model
    built = build(directory)
    now = [100.0]
    lane = Lane(built.lane.scheduler, built.lane.executor, lambda: now[0])
    lane.advance()
    Owner(lane).submit(references[0].prompt)
    monkeypatch.setattr(lane.scheduler, "plan", lambda now: None)
    now[0] += 500.0
    lane.advance()
    assert now[0] - lane.last_step == 500.0


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_step_seconds_count_whatever_part_of_a_step_takes_the_time(model, lag):
    directory, references = model
    built = build(directory, pipeline_depth=lag)
    now = [0.0]

    class Slow:
        def launch(self, plan):
            now[0] += 0.1
            return built.lane.executor.launch(plan)

        collect = built.lane.executor.collect

    lane = Lane(built.lane.scheduler, Slow(), lambda: now[0])
    owner = Owner(lane)
    owner.submit(references[0].prompt, max_tokens=5)
    owner.run()
    assert lane.step_seconds == {"decode": pytest.approx(0.4), "unified": pytest.approx(0.1)}
    assert lane.stats().decode_step_seconds == lane.step_seconds["decode"]


def test_token_ids_cross_as_little_endian_int32():
    assert array("i", [1, -2]).tobytes() == pack_tokens([1, -2])


def test_what_the_measured_steps_take_of_the_device_counts(model, monkeypatch):
    create, allocated = engine.build._create, []

    def create_counting(*arguments):
        def counting(_):
            before = len(allocated)
            return lambda: DeviceCounters(allocations_after_warmup=len(allocated) - before)

        return (*create(*arguments)[:2], counting)

    def measure(*arguments):
        allocated.append("a segment")
        return measure_step_costs(*arguments)

    monkeypatch.setattr(engine.build, "_create", create_counting)
    monkeypatch.setattr(engine.build, "measure_step_costs", measure)
    assert build(model[0], itl_target_ms=10.0).lane.stats().allocations_after_warmup == 1


def test_an_inter_token_target_is_measured_and_changes_no_text(model):
    directory, references = model
    built = build(directory, itl_target_ms=0.001, min_chunk_tokens=16)
    budgets = built.lane.scheduler.config.chunk_budgets
    assert {rows for rows, _, _ in built.step_costs} == {1, 3, 7}
    assert build(directory).step_costs == ()
    assert len(budgets) == 9
    assert budgets[0] == 256  # nobody waits
    assert all(16 <= tokens <= 256 - rows for rows, tokens in enumerate(budgets))
    owner = Owner(built.lane)
    keys = [owner.submit(expected.prompt) for expected in references]
    owner.run()
    for key, expected in zip(keys, references, strict=True):
        assert_same_text(owner.tokens[key], expected)
