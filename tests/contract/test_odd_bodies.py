"""A thousand odd request bodies through the real frontend: 200 or 400 and why, no hang, and nothing left behind.

Most of them the frontend (1.6.1) refuses itself, always with 400 (see docs/security.md), and asks no worker.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import httpx
import pytest

from tests.contract.bodies import Body, bodies, double_bodies, long_bodies, valid_bodies
from tests.stack import Client, Metrics, Stack, eventually, metrics

CONCURRENCY = 8
NAMES = {
    "guided_json": ("guided_decoding",),
    "response_format": ("guided_decoding",),
    "tool_choice": ("guided_decoding",),
    "tools": ("guided_decoding",),
    "echo": ("prompt_logprobs", "logprobs"),
    "prompt": ("token_ids", "prompt"),
    "cache_salt": ("cache_salt",),
}
"""What the worker calls a field, where that is not the client's name."""


class Answer(NamedTuple):
    body: Body
    status: int
    text: str


async def ask(stack: Stack, asked: Sequence[Body]) -> list[Answer]:
    """Send all, eight at a time. A request without an answer within 60 s raises."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(body: Body) -> Answer:
        async with gate:
            headers = {"content-type": "application/json"}
            reply = await http.post(stack.url + body.path, content=body.text.encode(), headers=headers)
            return Answer(body, reply.status_code, reply.text)

    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        return await asyncio.gather(*map(one, asked))


def seen(page: Metrics) -> float:
    """Requests that have reached the worker and are over."""
    return page.total("pagelane_requests_finished_total") + page.total("pagelane_requests_refused_total")


def refusals(log: Sequence[str]) -> set[str]:
    """What the worker has told clients, as its log has it."""
    return {line.partition(": refused: ")[2] for line in log if ": refused: " in line}


def whole(answer: Answer) -> bool:
    """True if an answer of 200 says how it ended and holds no error."""
    if answer.body.stream:
        return answer.text.rstrip().endswith("data: [DONE]") and "event: error" not in answer.text
    return '"finish_reason":"' in answer.text.replace('": "', '":"')


@pytest.mark.timeout(300)
async def test_odd_bodies_are_answered_or_refused_and_leave_nothing_behind(stack: Stack, api: Client) -> None:
    url = stack.workers[0].system_url
    before = seen(await metrics(url))
    doubles = list(double_bodies(stack.model))
    asked = [*doubles, *bodies(stack.model), *valid_bodies(stack.model), *long_bodies(stack.model)]
    answers = await ask(stack, asked)
    assert {answer.status for answer in answers} == {200, 400}, [a for a in answers if a.status not in (200, 400)]
    assert [answer for answer in answers if answer.status == 200 and not whole(answer)] == []

    told = refusals(stack.log)
    ours = [a for a in answers if a.status == 400 and any(text and text[:60] in a.text for text in told)]
    for answer in ours:
        names = NAMES.get(answer.body.field, (answer.body.field,))
        assert any(name in answer.text for name in names), answer
    served = sum(answer.status == 200 for answer in answers)
    page = await eventually(lambda: metrics(url), lambda page: page.total("pagelane_kv_pages", state="referenced") == 0)
    assert page.total("pagelane_kv_pages", state="referenced") == 0
    assert page.total("pagelane_requests") == 0
    assert len(ours) > 30
    assert served > 100
    assert seen(page) - before == len(ours) + served + len(doubles)  # the frontend has asked about no other

    after = await api.complete([10, 11, 12], max_tokens=4, ignore_eos=True)
    assert (after.status, after.finish_reason) == (200, "length")
