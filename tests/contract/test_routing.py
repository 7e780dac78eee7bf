"""Dynamo's KV router in front of two workers: it knows what each holds, evictions included, and so finds the prefix."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import tiny_flags
from tests.stack import Client, Metrics, Stack, client, eventually, metrics

PAGES_PER_POOL = 48
APPLIED = "dynamo_component_kv_cache_events_applied"
PUBLISHED = "pagelane_kv_blocks_published_total"


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[Stack]:
    """Two workers whose pools hold few prompts."""
    # 2 layers x 2 heads x 16 x 4 bytes x K and V: 512 bytes a token, 8 KiB a page; one page more for padding.
    memory = f"{(PAGES_PER_POOL + 1) * 8}KiB"
    with Stack(*tiny_flags(tiny, context_limit=384, kv_cache_memory=memory), workers=2) as running:
        yield running


def prompt(number: int, length: int = 100) -> list[int]:
    return [10 + (number * 37 + i * (7 + number)) % 250 for i in range(length)]


async def ask(api: Client, numbers: range) -> list[int]:
    """Cached tokens of one request per number, one after another."""
    cached = []
    for number in numbers:
        reply = await api.complete(prompt(number), max_tokens=2, ignore_eos=True)
        assert reply.status == 200, reply.error
        cached.append(reply.cached_tokens)
    return cached


async def published(stack: Stack, event: str) -> list[float]:
    """Blocks that each worker has announced as `event`."""
    return [(await metrics(worker.system_url)).total(PUBLISHED, event=event) for worker in stack.workers]


async def router_idle(stack: Stack) -> Metrics:
    """The frontend's metrics, once it has applied as many events as were published and no more come."""

    async def applied() -> tuple[float, Metrics]:
        page = await metrics(stack.url)
        return page.total(_applied_name(page)), page

    last = -1.0
    while True:
        count, page = await applied()
        if count == last:
            return page
        last = count
        await asyncio.sleep(0.2)


def _applied_name(page: Metrics) -> str:
    names = {sample.name for sample in page.samples if re.match(rf"{APPLIED}(_total)?$", sample.name)}
    return names.pop() if names else APPLIED


async def test_a_repeated_prefix_goes_to_its_owner_and_every_event_applies(pair: Stack) -> None:
    async with client(pair) as api:
        await ask(api, range(6))
        await router_idle(pair)
        assert await ask(api, range(6)) == [96] * 6
        stored = await published(pair, "stored")
        assert min(stored) > 0, "both workers served some of the prompts"
        # 40 prompts of 6 full blocks do not fit twice 48 pages.
        await ask(api, range(6, 46))
        removed = await eventually(lambda: published(pair, "removed"), lambda counts: min(counts) > 0)
        assert min(removed) > 0, "both pools were too small and evicted"
        page = await router_idle(pair)
    name = _applied_name(page)
    assert page.labels(name, "event_type") >= {"stored", "removed"}
    assert page.labels(name, "status") == {"ok"}
    lost = [(await metrics(worker.system_url)).total("pagelane_kv_event_errors_total") for worker in pair.workers]
    assert lost == [0, 0]


async def test_after_a_restart_of_the_frontend_prefixes_still_hit(pair: Stack) -> None:
    async with client(pair) as api:
        await ask(api, range(50, 56))
    pair.restart_frontend()
    async with client(pair) as api:
        await eventually(lambda: metrics(pair.url), lambda page: page.total("dynamo_frontend_model_workers") != 1)
        assert await ask(api, range(50, 56)) == [96] * 6


async def test_a_killed_worker_leaves_the_other_serving(pair: Stack) -> None:
    pair.remove_worker(pair.workers[0], kill=True)
    async with client(pair) as api:
        replies = await asyncio.gather(*(api.complete(prompt(n), max_tokens=4, ignore_eos=True) for n in range(60, 68)))
    assert [reply.status for reply in replies] == [200] * 8
