"""Penalties, min_tokens, log probabilities and endings through the whole CPU lane, against transformers in float32."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.messages import Sampling
from tests import golden
from tests.models import tiny_model
from tests.owner import Owner, build

PROMPT = [(7 * i + 5) % 60 + 10 for i in range(70)]
"""Many tokens stand in it more than once."""
OTHERS = [[(11 * i + 3 * n) % 290 + 12 for i in range(20 + 9 * n)] for n in range(6)]
TIGHT = "192KiB"
"""Room for so few tokens that seven requests preempt each other."""
COUNT = 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("parameters") / "qwen3", "qwen3", group=3, seed=5)


@pytest.fixture(scope="module")
def model(directory: Path) -> torch.nn.Module:
    return golden.reference_model(directory)


Adjust = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids so far `[1, n]` and logits `[1, vocab]` to logits."""


@torch.inference_mode()
def generate(model: torch.nn.Module, prompt: list[int], count: int, adjust: Adjust) -> tuple[list[int], torch.Tensor]:
    """`count` tokens, greedy after `adjust`, and the model's own logits for each place."""
    tokens, raw = list(prompt), []
    for _ in range(count):
        logits = model(torch.tensor([tokens])).logits[0, -1:].float()
        raw.append(logits[0].clone())
        tokens.append(int(adjust(torch.tensor([tokens]), logits).argmax()))
    return tokens[len(prompt) :], torch.stack(raw)


def openai_penalties(prompt_tokens: int, presence: float, frequency: float) -> Adjust:
    """OpenAI's formula in float64: logit - count * frequency - (count > 0) * presence, counts over the output."""

    def adjust(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, prompt_tokens:], minlength=logits.shape[1]).double()
        return logits.double() - counts * frequency - (counts > 0) * presence

    return adjust


def both(first: Adjust, second: Adjust) -> Adjust:
    return lambda ids, logits: second(ids, first(ids, logits))


REPEAT = transformers.RepetitionPenaltyLogitsProcessor
CASES = {
    "repetition": (Sampling(repetition_penalty=1.3), REPEAT(1.3)),
    "encouraged repetition": (Sampling(repetition_penalty=0.8), REPEAT(0.8)),
    "presence": (Sampling(presence_penalty=1.5), openai_penalties(70, 1.5, 0)),
    "frequency": (Sampling(frequency_penalty=0.7), openai_penalties(70, 0, 0.7)),
    "all": (
        Sampling(repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.9),
        both(REPEAT(1.2), openai_penalties(70, -0.5, 0.9)),
    ),
}


@pytest.mark.parametrize(("sampling", "adjust"), CASES.values(), ids=CASES)
def test_penalties_are_those_of_transformers_and_openai(directory, model, sampling, adjust):
    expected, _ = generate(model, PROMPT, COUNT, adjust)
    assert expected != generate(model, PROMPT, COUNT, lambda _, logits: logits)[0], "the penalty changes nothing"
    for lag, memory, mates in ((0, "4MiB", 0), (2, "4MiB", 3), (1, TIGHT, 6)):
        built = build(directory, pipeline_depth=lag, kv_cache_memory=memory)
        owner = Owner(built.lane)
        for other in OTHERS[:mates]:
            owner.submit(other, 30, Sampling(repetition_penalty=1.7, frequency_penalty=0.3))
        keys = [owner.submit(PROMPT, COUNT, sampling), owner.submit(PROMPT, COUNT, sampling)]
        owner.run()
        assert [owner.tokens[key] for key in keys] == [expected, expected]
        assert built.lane.stats().preemptions > 0 or memory != TIGHT


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(("sampling", "adjust"), CASES.values(), ids=CASES)
def test_penalties_survive_a_preemption_amid_the_output(directory, model, sampling, adjust, lag):
    expected, _ = generate(model, PROMPT, COUNT, adjust)
    owner = Owner(build(directory, pipeline_depth=lag).lane)
    key = owner.submit(PROMPT, COUNT, sampling)
    for tokens in (7, 20):
        while len(owner.tokens[key]) < tokens:
            owner.turn()
        owner.preempt(key)
    owner.run()
    assert owner.tokens[key] == expected
    assert owner.lane.stats().preemptions == 2


def test_min_tokens_suppresses_what_ends_the_text_as_in_transformers(directory, model):
    free, _ = generate(model, PROMPT, COUNT, lambda _, logits: logits)
    stop = tuple({free[0], free[3], free[7], 311})
    processor = transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), 12, list(stop), device="cpu")
    expected, _ = generate(model, PROMPT, COUNT, processor)
    ends = next(i for i, token in enumerate(expected) if token in stop) + 1 if set(expected) & set(stop) else COUNT
    for memory, mates in (("4MiB", 0), (TIGHT, 6)):
        owner = Owner(build(directory, kv_cache_memory=memory).lane)
        for other in OTHERS[:mates]:
            owner.submit(other, 30)
        first = owner.submit(PROMPT, COUNT, stop=stop)
        least = owner.submit(PROMPT, COUNT, Sampling(min_tokens=12), stop)
        owner.run()
        assert (owner.tokens[first], owner.finished[first].reason) == (free[:1], "stop")
        assert owner.tokens[least] == expected[:ends]
        assert len(owner.tokens[least]) >= 12


def test_a_token_may_end_the_text_right_behind_the_least_length(directory, model):
    free, _ = generate(model, PROMPT, 6, lambda _, logits: logits)
    owner = Owner(build(directory).lane)
    at = free.index(free[5])
    key = owner.submit(PROMPT, COUNT, Sampling(min_tokens=at), (free[5],))
    owner.run()
    later = owner.submit(PROMPT, COUNT, Sampling(min_tokens=at + 1), (free[5],))
    owner.run()
    assert (owner.tokens[key], owner.finished[key].reason) == (free[: at + 1], "stop")
    assert owner.tokens[later][:at] == free[:at]
    assert owner.tokens[later][at] != free[5]


@pytest.mark.parametrize("lag", [0, 2])
def test_min_tokens_counts_from_the_prompt_also_after_a_preemption(directory, model, lag):
    free, _ = generate(model, PROMPT, 20, lambda _, logits: logits)
    processor = transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), 15, [free[12]], device="cpu")
    expected, _ = generate(model, PROMPT, 15, processor)
    owner = Owner(build(directory, pipeline_depth=lag).lane)
    key = owner.submit(PROMPT, COUNT, Sampling(min_tokens=15), (free[12],))
    while len(owner.tokens[key]) < 6:
        owner.turn()
    owner.preempt(key)
    owner.run()
    assert owner.tokens[key][:15] == expected


def log_softmax(raw: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(raw.double(), -1).numpy()


def check_scores(scores, tokens: list[int], raw: torch.Tensor, top: int) -> None:
    """Within 1e-4 of log_softmax in float64, the likeliest ones in order and really the likeliest."""
    expected = log_softmax(raw)
    places = np.arange(len(tokens))
    assert len(scores.own) == len(tokens)
    assert np.abs(scores.own - expected[places, tokens]).max() < 1e-4
    assert scores.ids.shape == (len(tokens), top)
    if top:
        assert np.abs(scores.top - np.sort(expected, -1)[:, : -top - 1 : -1]).max() < 1e-4
        assert np.abs(scores.top - np.take_along_axis(expected, scores.ids, -1)).max() < 1e-4


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_transformers_cold_warm_and_after_preemption(directory, model, top):
    expected, raw = generate(model, PROMPT, COUNT, lambda _, logits: logits)
    for memory, lag in (("4MiB", 1), (TIGHT, 2)):
        built = build(directory, kv_cache_memory=memory, pipeline_depth=lag)
        owner = Owner(built.lane)
        cold = owner.submit(PROMPT, COUNT, Sampling(logprobs=top))
        owner.run()
        for other in OTHERS:
            owner.submit(other, 30, Sampling(logprobs=3))
        warm = owner.submit(PROMPT, COUNT, Sampling(logprobs=top))
        owner.run()
        assert owner.finished[warm].cached_tokens > 0 or memory == TIGHT
        assert built.lane.stats().preemptions > 0 or memory != TIGHT
        for key in (cold, warm):
            assert owner.tokens[key] == expected
            check_scores(owner.scores(key), expected, raw, top)


def test_log_probabilities_are_the_models_own_whatever_the_sampling(directory, model):
    sampling = Sampling(0.7, 5, 0.9, seed=3, repetition_penalty=1.3, presence_penalty=1, logprobs=4, min_tokens=30)
    owner = Owner(build(directory).lane)
    key = owner.submit(PROMPT, COUNT, sampling, (20, 21, 22))
    owner.run()
    tokens = owner.tokens[key]
    with torch.inference_mode():
        raw = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].float()
    check_scores(owner.scores(key), tokens, raw, 4)


@pytest.mark.parametrize("chunk", [7, 32, 1000])
@pytest.mark.parametrize(("memory", "lag"), [("4MiB", 0), ("4MiB", 2), (TIGHT, 1)])
def test_prompt_log_probabilities_are_those_of_transformers_and_never_read_from_the_cache(
    directory, model, chunk, memory, lag
):
    with torch.inference_mode():
        raw = model(torch.tensor([PROMPT])).logits[0, :-1].float()
    built = build(directory, kv_cache_memory=memory, max_chunk_tokens=chunk, pipeline_depth=lag)
    owner = Owner(built.lane)
    plain = owner.submit(PROMPT, 4)
    owner.run()
    for other in OTHERS:
        owner.submit(other, 30, Sampling(prompt_logprobs=2))
    scored = owner.submit(PROMPT, COUNT, Sampling(prompt_logprobs=3))
    owner.run()
    after = owner.submit(PROMPT, 4)
    owner.run()
    check_scores(owner.prompt_scores(scored), PROMPT[1:], raw, 3)
    assert owner.finished[scored].cached_tokens == 0
    assert owner.finished[after].cached_tokens == 64, "what it has computed is shared"
    assert owner.tokens[after] == owner.tokens[plain]
    assert set(owner.prompt_logprobs) == {scored, *range(1, 7)}
    assert all(owner.prompt_scores(n + 1).own.shape == (len(other) - 1,) for n, other in enumerate(OTHERS))


@pytest.mark.parametrize("lag", [0, 2])
def test_log_probabilities_come_once_also_after_preemptions_amid_prompt_and_output(directory, model, lag):
    expected, raw = generate(model, PROMPT, COUNT, lambda _, logits: logits)
    with torch.inference_mode():
        raw_prompt = model(torch.tensor([PROMPT])).logits[0, :-1].float()
    owner = Owner(build(directory, pipeline_depth=lag, max_chunk_tokens=16).lane)
    key = owner.submit(PROMPT, COUNT, Sampling(prompt_logprobs=3, logprobs=2))
    while key not in owner.prompt_logprobs:
        owner.turn()
    assert len(owner.prompt_scores(key).own) < len(PROMPT) - 1
    owner.preempt(key)
    while len(owner.tokens[key]) < 9:
        owner.turn()
    check_scores(owner.prompt_scores(key), PROMPT[1:], raw_prompt, 3)
    owner.preempt(key)
    owner.run()
    assert owner.tokens[key] == expected
    check_scores(owner.scores(key), expected, raw, 2)
    check_scores(owner.prompt_scores(key), PROMPT[1:], raw_prompt, 3)
    assert owner.lane.stats().preemptions == 2


def test_a_prompt_of_one_token_has_no_log_probabilities(directory):
    owner = Owner(build(directory).lane)
    key = owner.submit([17], 3, Sampling(prompt_logprobs=3))
    owner.run()
    assert owner.finished[key].reason == "length"
    assert owner.prompt_logprobs == {}


REFERENCE: dict[Sampling, list[int]] = {}
"""Texts of requests that were alone, by what they asked for."""
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8, 1.2]),
    top_k=st.sampled_from([0, 40]),
    top_p=st.sampled_from([0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02]),
    seed=st.sampled_from([0, 2**64 - 1]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 2]),
)


SURROUNDINGS = st.fixed_dictionaries(
    {
        "kv_page_size": st.sampled_from([16, 64]),
        "max_chunk_tokens": st.sampled_from([5, 16, 50, 1000]),
        "pipeline_depth": st.integers(0, 2),
        "kv_cache_memory": st.sampled_from([TIGHT, "4MiB"]),
    }
).filter(lambda drawn: drawn["kv_page_size"] == 16 or drawn["kv_cache_memory"] != TIGHT)  # it holds too few large pages


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sampling=SAMPLINGS, mates=st.lists(SAMPLINGS, max_size=6), surroundings=SURROUNDINGS, warm=st.booleans())
def test_one_seed_gives_one_text_whatever_runs_beside_it(directory, sampling, mates, surroundings, warm):
    """Everything that may not matter is drawn: batch mates, page size, chunks, lag, cache and preemption."""
    if sampling not in REFERENCE:
        alone = Owner(build(directory).lane)
        alone.submit(PROMPT, COUNT, sampling)
        alone.run()
        REFERENCE[sampling] = alone.tokens[0]
    owner = Owner(build(directory, **surroundings).lane)
    if warm:
        owner.submit(PROMPT, 1)
        owner.run()
    for other, mate in zip(OTHERS, mates, strict=False):
        owner.submit(other, 30, mate)
    key = owner.submit(PROMPT, COUNT, sampling)
    owner.run()
    assert owner.tokens[key] == REFERENCE[sampling]


def usage(owner: Owner, key: int) -> tuple[str, int, int, int]:
    end = owner.finished[key]
    return end.reason, end.prompt_tokens, end.completion_tokens, end.cached_tokens


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_usage_is_exact_in_every_ending(directory, model, monkeypatch, lag):
    free, _ = generate(model, PROMPT, 10, lambda _, logits: logits)
    built = build(directory, pipeline_depth=lag)
    owner = Owner(built.lane)
    cold = owner.submit(PROMPT, 5)
    owner.run()
    assert usage(owner, cold) == ("length", 70, 5, 0)
    length = owner.submit(PROMPT, 5)
    stop = owner.submit(PROMPT, 10, stop=(free[4],))
    first = owner.submit(PROMPT, 10, stop=(free[0],))
    owner.run()
    assert usage(owner, length) == ("length", 70, 5, 64)
    assert usage(owner, stop) == ("stop", 70, free.index(free[4]) + 1, 64)
    assert usage(owner, first) == ("stop", 70, 1, 64)
    cancelled = owner.submit(PROMPT, 50)
    while len(owner.tokens[cancelled]) < 3:
        owner.turn()
    built.lane.scheduler.cancel(cancelled)
    owner.run()
    assert usage(owner, cancelled) == ("cancelled", 70, len(owner.tokens[cancelled]), 64)
    waiting = owner.submit(PROMPT, 50)
    built.lane.scheduler.cancel(waiting)
    owner.run()
    assert usage(owner, waiting) == ("cancelled", 70, 0, 0)
    failing = owner.submit(PROMPT, 50)
    while len(owner.tokens[failing]) < 3:
        owner.turn()
    launch = built.lane.executor.launch
    monkeypatch.setattr(built.lane.executor, "launch", lambda plan: launch(plan) and 1 / 0)
    while failing not in owner.finished:
        owner.turn()
    monkeypatch.setattr(built.lane.executor, "launch", launch)
    owner.run()
    assert usage(owner, failing) == ("error", 70, len(owner.tokens[failing]), 64)
    for key in (length, stop, first, cancelled, failing):
        assert owner.cached[key] == 64, "told at admission, for a worker that cancels by itself"
