"""Requests at the edge of what is served: the right answer or a 400 with the reason, streamed and plain alike."""

from typing import Any

import pytest

from tests.contract.conftest import CONTEXT
from tests.stack import Client

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])


def prompt(length: int) -> list[int]:
    return [10 + i % 200 for i in range(length)]


@BOTH
async def test_a_prompt_one_under_the_servable_length_gives_one_token(api: Client, stream: bool) -> None:
    reply = await api.complete(prompt(CONTEXT - 1), stream, ignore_eos=True)
    assert (reply.status, reply.finish_reason) == (200, "length")
    assert (reply.usage["prompt_tokens"], reply.usage["completion_tokens"]) == (CONTEXT - 1, 1)


@BOTH
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 4 * CONTEXT])
async def test_a_prompt_at_or_over_the_servable_length_is_refused_with_both_numbers(
    api: Client, stream: bool, length: int
) -> None:
    reply = await api.complete(prompt(length), stream, max_tokens=1)
    assert reply.status == 400
    assert str(length) in reply.error
    assert str(CONTEXT) in reply.error


@BOTH
async def test_an_empty_prompt_is_refused(api: Client, stream: bool) -> None:
    for empty in ("", []):
        reply = await api.complete(empty, stream, max_tokens=1)
        assert reply.status == 400, reply
        assert "empty" in reply.error.lower()


@BOTH
async def test_a_huge_max_tokens_is_clamped_to_the_servable_length(api: Client, stream: bool) -> None:
    reply = await api.complete(prompt(CONTEXT - 20), stream, max_tokens=1_000_000, ignore_eos=True)
    assert (reply.status, reply.finish_reason) == (200, "length")
    assert reply.usage["completion_tokens"] == 20


@BOTH
async def test_a_missing_max_tokens_lets_the_text_run_to_the_servable_length(api: Client, stream: bool) -> None:
    reply = await api.chat("hello " * 60, stream, ignore_eos=True)
    assert (reply.status, reply.finish_reason) == (200, "length")
    assert reply.usage["total_tokens"] == CONTEXT


@BOTH
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 0}, "Max tokens must be greater than 0"),
        ({"n": 2, "temperature": 0.5}, "n is 2"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"min_tokens": 9}, "min_tokens is 9, but at most 8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    api: Client, stream: bool, fields: dict[str, Any], reason: str
) -> None:
    reply = await api.chat("hello", stream, **{"max_tokens": 8, **fields})
    assert reply.status == 400, reply
    assert reason in reply.error
