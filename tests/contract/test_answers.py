"""What clients get for well-formed requests: text, usage, and the same text however it was computed."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.contract.conftest import tiny_flags
from tests.stack import Client, Reply, Stack, client

LONG_PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun until evening. " * 4


async def test_a_streamed_chat_is_the_plain_one_in_pieces(api: Client) -> None:
    plain = await api.chat("What is the weather like?", max_tokens=24, ignore_eos=True)
    streamed = await api.chat("What is the weather like?", stream=True, max_tokens=24, ignore_eos=True)
    assert (plain.status, plain.finish_reason) == (200, "length")
    assert (streamed.text, streamed.finish_reason) == (plain.text, plain.finish_reason)
    assert streamed.chunks > 5
    for reply in (plain, streamed):
        assert reply.usage["completion_tokens"] == 24
        assert reply.usage["total_tokens"] == reply.usage["prompt_tokens"] + 24


async def test_a_completion_counts_the_tokens_of_its_prompt(api: Client) -> None:
    prompt = list(range(10, 47))
    plain = await api.complete(prompt, max_tokens=9, ignore_eos=True)
    streamed = await api.complete(prompt, stream=True, max_tokens=9, ignore_eos=True)
    assert plain.status == 200
    assert plain.text == streamed.text != ""
    for reply in (plain, streamed):
        assert (reply.usage["prompt_tokens"], reply.usage["completion_tokens"]) == (37, 9)


async def test_usage_says_how_much_of_a_prompt_was_cached(api: Client) -> None:
    prompt = [7 + i * 13 % 250 for i in range(100)]
    cold = await api.complete(prompt, max_tokens=4, ignore_eos=True)
    warm = await api.complete(prompt, max_tokens=4, ignore_eos=True)
    longer = await api.complete([*prompt[:64], *range(20, 60)], max_tokens=4, ignore_eos=True)
    assert [reply.cached_tokens for reply in (cold, warm, longer)] == [0, 96, 64]
    assert warm.text == cold.text


async def test_a_stop_string_ends_the_text_before_it(api: Client) -> None:
    # No ignore_eos here: it makes the frontend pass over stop strings too.
    whole = await api.chat("Tell me of Paris.", max_tokens=40)
    # The random model's text has broken characters, so the stop string is taken from where it has letters.
    stop = re.findall(r"[a-z]{2,4}", whole.text)[-1]
    for stream in (False, True):
        cut = await api.chat("Tell me of Paris.", stream, max_tokens=40, stop=[stop])
        assert (cut.status, cut.finish_reason) == (200, "stop")
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.usage["completion_tokens"] < 40


async def test_a_seed_reproduces_a_sampled_text_among_other_requests(api: Client) -> None:
    ask = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    alone = await api.complete("one fox", seed=11, **ask)
    again, other, *_ = await asyncio.gather(
        api.complete("one fox", seed=11, **ask),
        api.complete("one fox", seed=12, **ask),
        *(api.complete(f"fox number {i}", seed=i, **ask) for i in range(6)),
    )
    assert again.text == alone.text != other.text


async def test_a_conversation_of_twenty_turns_reuses_its_history(stack: Stack, api: Client) -> None:
    messages = [{"role": "system", "content": "Be short."}]
    previous = 0
    for turn in range(20):
        messages.append({"role": "user", "content": f"{turn}?"})
        reply = await api.chat(messages, max_tokens=3, ignore_eos=True)
        assert reply.status == 200, reply.error
        # All full pages of the turn before are there, generated tokens included as far as the template repeats them.
        assert reply.cached_tokens >= previous // 16 * 16
        previous = reply.usage["prompt_tokens"] - 4
        messages.append({"role": "assistant", "content": reply.text})
    assert previous > 300


async def _answers(api: Client, prompts: list[str]) -> list[Reply]:
    return list(await asyncio.gather(*(api.complete(p, max_tokens=32, ignore_eos=True) for p in prompts)))


@pytest.mark.parametrize("page_size", [64])
async def test_greedy_text_is_the_same_at_every_page_size_cold_warm_alone_and_among_others(
    api: Client, tiny: Path, page_size: int
) -> None:
    others = [f"{i} of 16: {LONG_PROMPT[i:]}" for i in range(16)]
    alone = await api.complete(LONG_PROMPT, max_tokens=32, ignore_eos=True)
    warm = await api.complete(LONG_PROMPT, max_tokens=32, ignore_eos=True)
    crowd = await _answers(api, [*others, LONG_PROMPT])
    assert warm.cached_tokens > 0
    assert {alone.text, warm.text, crowd[-1].text} == {alone.text}
    # Room for all 17 at once: in a smaller pool, rows that end later may evict what the last request left.
    with Stack(*tiny_flags(tiny, context_limit=512, kv_page_size=page_size, kv_cache_memory="8MiB")) as second:
        async with client(second) as requests:
            first = await _answers(requests, [*others, LONG_PROMPT])
            later = await requests.complete(LONG_PROMPT, max_tokens=32, ignore_eos=True)
    assert [reply.text for reply in first] == [reply.text for reply in crowd]
    assert later.text == alone.text
    assert later.cached_tokens % page_size == 0 < later.cached_tokens
