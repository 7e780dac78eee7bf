"""Request parameters through the real frontend, streamed and plain, against transformers in float32."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import golden
from tests.models import SPECIAL_TOKENS
from tests.stack import Client, Reply

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
PROMPT = [(7 * i + 5) % 60 + 10 for i in range(40)]
IDS = {"return_tokens_as_token_ids": True}
"""Has the frontend write `token_id:N` for each token of the log probabilities, so that texts compare exactly."""


@pytest.fixture(scope="session")
def reference(tiny: Path) -> torch.nn.Module:
    return golden.reference_model(tiny)


@torch.inference_mode()
def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def generate(model: torch.nn.Module, count: int, *processors: Processor) -> list[int]:
    """Greedy output behind `PROMPT`."""
    tokens = list(PROMPT)
    for _ in range(count):
        scores = logits_of(model, tokens)[-1:]
        for processor in processors:
            scores = processor(torch.tensor([tokens]), scores)
        tokens.append(int(scores.argmax()))
    return tokens[len(PROMPT) :]


def token_ids(reply: Reply) -> list[int]:
    return [int(token.removeprefix("token_id:")) for piece in reply.logprobs for token in piece["tokens"]]


def values(reply: Reply) -> list[float]:
    return [value for piece in reply.logprobs for value in piece["token_logprobs"]]


async def complete(api: Client, stream: bool, **fields: Any) -> Reply:
    fields = {"logprobs": 1, "max_tokens": 16, "ignore_eos": True, **IDS, **fields}
    reply = await api.complete(PROMPT, stream, **fields)
    assert reply.status == 200, reply.error
    return reply


@BOTH
async def test_a_repetition_penalty_is_that_of_transformers(api: Client, reference, stream: bool) -> None:
    reply = await complete(api, stream, repetition_penalty=1.4)
    expected = generate(reference, 16, transformers.RepetitionPenaltyLogitsProcessor(1.4))
    assert token_ids(reply) == expected != generate(reference, 16)


@BOTH
async def test_presence_and_frequency_penalties_are_openais(api: Client, reference, stream: bool) -> None:
    def penalize(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, len(PROMPT) :], minlength=scores.shape[1]).double()
        return scores.double() - 0.9 * counts - 1.5 * (counts > 0)

    reply = await complete(api, stream, presence_penalty=1.5, frequency_penalty=0.9, max_tokens=40)
    assert token_ids(reply) == generate(reference, 40, penalize) != generate(reference, 40)


@BOTH
async def test_completions_give_log_probabilities_of_transformers(api: Client, reference, stream: bool) -> None:
    reply = await complete(api, stream, logprobs=5)
    tokens = token_ids(reply)
    expected = torch.log_softmax(logits_of(reference, PROMPT + tokens)[len(PROMPT) - 1 : -1].double(), -1)
    assert values(reply) == pytest.approx(expected[range(16), tokens].tolist(), abs=1e-4)
    tops = [top for piece in reply.logprobs for top in piece["top_logprobs"]]
    for top, row in zip(tops, expected, strict=True):
        assert len(top) == 5
        for name, value in top.items():
            assert value == pytest.approx(float(row[int(name.removeprefix("token_id:"))]), abs=1e-4)
        assert sorted(top.values()) == pytest.approx(row.topk(5).values.flip(0).tolist(), abs=1e-4)


@BOTH
@pytest.mark.parametrize("top", [0, 3, 20])
async def test_chats_give_as_many_likeliest_tokens_as_asked_for(api: Client, stream: bool, top: int) -> None:
    ask = {"logprobs": True, "top_logprobs": top, "max_tokens": 6, "ignore_eos": True}
    reply = await api.chat("What is the weather like?", stream, **ask)
    entries = [entry for piece in reply.logprobs for entry in piece["content"]]
    assert len(entries) == 6
    for entry in entries:
        likeliest = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(likeliest) == top
        assert likeliest == sorted(likeliest, reverse=True)
        assert entry["logprob"] == pytest.approx(max(likeliest, default=entry["logprob"]))  # greedy
        nameless = [other for other in entry["top_logprobs"] if not other["token"]]
        assert len(nameless) <= len(SPECIAL_TOKENS), "the frontend fills in the text of all but special tokens"


async def test_log_probabilities_are_the_same_from_the_cache(api: Client) -> None:
    first, second = await complete(api, False, logprobs=2), await complete(api, False, logprobs=2)
    assert second.cached_tokens == 32
    assert token_ids(first) == token_ids(second)
    assert values(first) == pytest.approx(values(second), abs=1e-4)


@BOTH
@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 1}], ids=["echo", "prompt_logprobs"])
async def test_prompt_log_probabilities_are_those_of_transformers(
    api: Client, reference, stream: bool, fields: dict[str, Any]
) -> None:
    await complete(api, False)
    reply = await complete(api, stream, nvext={"extra_fields": ["prompt_logprobs"]}, **fields)
    assert reply.cached_tokens == 0, "every token of the prompt is computed"
    first, *entries = reply.nvext["prompt_logprobs"]
    assert first is None
    expected = torch.log_softmax(logits_of(reference, PROMPT)[:-1].double(), -1)
    for token, entry, row in zip(PROMPT[1:], entries, expected, strict=True):
        likeliest = int(row.argmax())
        assert entry.keys() == {str(token), str(likeliest)}
        assert entry[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        assert entry[str(likeliest)]["rank"] == 1


@BOTH
async def test_min_tokens_puts_off_the_end(api: Client, reference, stream: bool) -> None:
    free = generate(reference, 3)
    early = await complete(api, stream, stop_token_ids=[free[0]], ignore_eos=False)
    assert (early.finish_reason, early.usage["completion_tokens"]) == ("stop", 1)
    least = await complete(api, stream, stop_token_ids=[free[0]], ignore_eos=False, min_tokens=10)
    processor = transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), 10, [free[0], 0, 2], device="cpu")
    assert token_ids(least)[:10] == generate(reference, 10, processor)
    assert least.usage["completion_tokens"] >= 10


@BOTH
async def test_a_stop_string_is_left_out_or_kept_and_usage_is_told(api: Client, stream: bool) -> None:
    whole = await api.chat("Tell me of Paris.", max_tokens=40)
    stop = re.findall(r"[a-z]{2,4}", whole.text)[-1]
    for include in (False, True):
        ask = {"max_tokens": 40, "stop": [stop], "include_stop_str_in_output": include}
        cut = await api.chat("Tell me of Paris.", stream, **ask)
        assert (cut.status, cut.finish_reason) == (200, "stop"), cut.error
        assert cut.text == whole.text[: whole.text.index(stop) + include * len(stop)]
        assert cut.cached_tokens == (whole.usage["prompt_tokens"] - 1) // 16 * 16


@BOTH
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2, "temperature": 1}, "n is 2"),
        ({"best_of": 2}, "best_of is 2"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words_token_ids": [[5]]}, "bad_words_token_ids"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, but at most 8"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21, but must be 0 to 20"),
        ({"nvext": {"max_thinking_tokens": 5}}, "max_thinking_tokens is 5"),
        ({"logprobs": 6}, "between 0 and 5"),
        ({"presence_penalty": 2.5}, "between -2 and 2"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_is_not_served_is_refused_with_its_name(
    api: Client, stream: bool, fields: dict[str, Any], reason: str
) -> None:
    reply = await api.complete("one fox", stream, **{"max_tokens": 4, **fields})
    assert reply.status == 400
    assert reason in reply.error


@BOTH
async def test_chats_that_ask_for_more_than_text_are_refused_with_the_reason(api: Client, stream: bool) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}]
    for fields, content, reason in (
        ({"response_format": {"type": "json_object"}}, "hello", "response_format"),
        ({"n": 2, "temperature": 1}, "hello", "n is 2"),
        ({}, [{"role": "user", "content": image}], "Invalid request"),  # the frontend's own words
    ):
        reply = await api.chat(content, stream, max_tokens=4, **fields)
        assert reply.status == 400, reply
        assert reason in reply.error


@BOTH
async def test_ignore_eos_loses_the_clients_own_stops_in_the_frontend(api: Client, stream: bool) -> None:
    """docs/parameters.md says so; a frontend that mends it turns this red, and the page is to be changed."""
    free = await complete(api, stream)
    for stop in ({"stop": [free.text[3:5]]}, {"stop_token_ids": token_ids(free)[4:6]}):
        reply = await complete(api, stream, **stop)
        assert (reply.finish_reason, token_ids(reply)) == ("length", token_ids(free))


@BOTH
async def test_priorities_at_the_ends_of_their_type_are_taken(api: Client, stream: bool) -> None:
    for priority in (-(1 << 31), (1 << 31) - 1):
        hints = {"agent_hints": {"priority": priority}}
        assert (await api.complete("one fox", stream, max_tokens=2, nvext=hints)).status == 200


async def test_hints_and_salts_change_no_text(api: Client) -> None:
    ask = {"max_tokens": 12, "ignore_eos": True}
    plain, *others = await asyncio.gather(
        api.chat("Tell me of Rome.", **ask),
        api.chat("Tell me of Rome.", nvext={"agent_hints": {"osl": 4, "priority": 3}}, **ask),
        api.chat("Tell me of Rome.", nvext={"agent_hints": {"osl": 100_000}, "cache_salt": "tenant"}, **ask),
    )
    for other in others:
        assert (other.status, other.text, other.usage["completion_tokens"]) == (200, plain.text, 12)
