"""A real model behind the frontend, as `make up` serves it: SmolLM2-135M-Instruct from its GGUF file."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack, client

CONFIG = Path(__file__).parents[2] / "configs/smollm2-cpu.yaml"
CAPITAL = "What is the capital of France?"
TOPICS = ("France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Kenya", "Norway", "India", "Cuba")


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Stack]:
    with Stack("--config", str(CONFIG), "--threads", "1", "--context-limit", "2048") as running:
        yield running


async def test_the_capital_of_france_is_paris_streamed_and_plain(smollm2: Stack) -> None:
    async with client(smollm2) as api:
        plain = await api.chat(CAPITAL, max_tokens=24)
        streamed = await api.chat(CAPITAL, stream=True, max_tokens=24)
    assert "Paris" in plain.text
    assert (plain.finish_reason, streamed.finish_reason) == ("stop", "stop")
    assert streamed.text == plain.text
    assert streamed.cached_tokens > 0
    assert plain.usage["completion_tokens"] == streamed.usage["completion_tokens"] < 24


async def test_a_conversation_of_twenty_turns_computes_only_what_is_new(smollm2: Stack) -> None:
    messages: list[dict[str, str]] = []
    known = 0
    async with client(smollm2) as api:
        for turn in range(20):
            question = "capital" if turn % 2 == 0 else "language"
            messages.append({"role": "user", "content": f"What is the {question} of {TOPICS[turn // 2]}?"})
            reply = await api.chat(messages, max_tokens=4)
            assert reply.status == 200, reply.error
            assert reply.text.strip()
            # What precedes the last answer was in the cache, to the page.
            assert reply.cached_tokens >= known // 16 * 16
            known = reply.usage["prompt_tokens"]
            messages.append({"role": "assistant", "content": reply.text})
    assert known > 350


async def test_an_answer_is_the_same_among_sixteen_others(smollm2: Stack) -> None:
    others = [f"Name {n} things about {TOPICS[n % 10]}." for n in range(2, 18)]
    async with client(smollm2) as api:
        alone = await api.chat(CAPITAL, max_tokens=12)
        crowd = await asyncio.gather(*(api.chat(text, max_tokens=12) for text in [*others[:8], CAPITAL, *others[8:]]))
    assert [reply.status for reply in crowd] == [200] * 17
    assert crowd[8].text == alone.text
    assert len({reply.text for reply in crowd}) > 8
