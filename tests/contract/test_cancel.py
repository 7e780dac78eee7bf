"""Clients that go away and workers that are told to: pages come back, and running requests finish."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import tiny_flags
from tests.models import tiny_model
from tests.stack import Metrics, Stack, client, eventually, metrics

PROMPT_TOKENS = 2000


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is slow enough to be interrupted: a prompt of 2000 tokens takes most of a second."""
    return tiny_model(tmp_path_factory.mktemp("models") / "slow", layers=12, head_dim=32, context=4096)


@pytest.fixture(scope="module")
def narrow(slow: Path) -> Iterator[Stack]:
    """A worker that runs two requests at once and computes prompts in small chunks."""
    flags = tiny_flags(slow, max_bucket=2, max_step_tokens=32, kv_cache_memory="64MiB")
    with Stack(*flags) as running:
        yield running


def live(page: Metrics) -> dict[str, float]:
    """Requests by state and pages in use."""
    states = ("waiting", "prefilling", "active", "draining")
    requests = {state: page.total("pagelane_requests", state=state) for state in states}
    return requests | {"referenced": page.total("pagelane_kv_pages", state="referenced")}


async def reaches(stack: Stack, **wanted: float) -> dict[str, float]:
    async def look() -> dict[str, float]:
        return live(await metrics(stack.workers[0].system_url))

    found = await eventually(look, lambda gauges: all(gauges[key] >= value for key, value in wanted.items()), 10.0)
    assert all(found[key] >= value for key, value in wanted.items()), found
    return found


async def idle(stack: Stack) -> None:
    async def look() -> dict[str, float]:
        return live(await metrics(stack.workers[0].system_url))

    found = await eventually(look, lambda gauges: not any(gauges.values()), 5.0)
    assert not any(found.values()), found


async def test_pages_come_back_from_clients_that_leave_while_generating_and_waiting(narrow: Stack) -> None:
    async with client(narrow) as api:
        streams = [
            asyncio.create_task(api.complete([10 + n, 11, 12], True, max_tokens=3000, ignore_eos=True))
            for n in range(4)
        ]
        await reaches(narrow, active=2, waiting=2, referenced=2)
        for stream in reversed(streams):
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await idle(narrow)
        page = await metrics(narrow.workers[0].system_url)
        assert page.total("pagelane_generated_tokens_total") < 4 * 3000
        assert page.total("pagelane_kv_pages") == page.total("pagelane_kv_usable_pages")


async def test_pages_come_back_from_a_client_that_leaves_while_prefilling(narrow: Stack) -> None:
    before = (await metrics(narrow.workers[0].system_url)).total("pagelane_computed_tokens_total")
    async with client(narrow) as api:
        prompt = [10 + i % 211 for i in range(PROMPT_TOKENS)]
        request = asyncio.create_task(api.complete(prompt, True, max_tokens=5, ignore_eos=True))
        await reaches(narrow, prefilling=1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await idle(narrow)
    after = (await metrics(narrow.workers[0].system_url)).total("pagelane_computed_tokens_total")
    assert after - before < PROMPT_TOKENS, "the rest of the prompt was not computed"


async def test_sigterm_lets_running_requests_finish(slow: Path) -> None:
    with Stack(*tiny_flags(slow, max_bucket=4)) as stack:
        async with client(stack) as api:
            requests = [
                asyncio.create_task(api.complete([20 + n], n % 2 == 0, max_tokens=150, ignore_eos=True))
                for n in range(4)
            ]
            await reaches(stack, active=4)
            code = await asyncio.to_thread(stack.remove_worker, stack.workers[0])
            replies = await asyncio.gather(*requests)
        assert code == 0
        assert [reply.status for reply in replies] == [200] * 4
        assert [reply.usage["completion_tokens"] for reply in replies] == [150] * 4
        assert stack.discovered() == []
