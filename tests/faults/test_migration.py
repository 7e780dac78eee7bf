"""A real model's greedy text goes on where it broke off, on another worker."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.faults.harness import busy
from tests.models import tiny_model
from tests.stack import Client, Reply, Stack, client, metrics

REQUESTS = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers with a model that is slow enough to be interrupted; they drain for half a second."""
    model = tiny_model(tmp_path_factory.mktemp("models") / "slow", layers=12, head_dim=32, context=4096)
    flags = ("--threads", "1", "--kv-cache-memory", "64MiB", "--max-bucket", "4", "--max-step-tokens", "32")
    with Stack("--model", str(model), *flags, "--drain-timeout-s", "0.5", workers=2) as running:
        yield running


def ask(api: Client) -> list[asyncio.Task[Reply]]:
    """Short prompts and long ones, so that some wait, some prefill and some generate."""
    prompts = [[20 + number] * (5 if number % 3 else 400) for number in range(REQUESTS)]
    return [
        asyncio.create_task(api.complete(prompt, number % 2 == 0, max_tokens=150, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[str]]:
    """The texts of a run in which nothing happens, by stack."""
    return {}


@pytest.mark.parametrize("kill", [False, True], ids=["drained", "killed"])
async def test_greedy_text_is_that_of_an_undisturbed_run(
    pair: Stack, undisturbed: dict[str, list[str]], kill: bool
) -> None:
    async with client(pair) as api:
        if not undisturbed:
            undisturbed["texts"] = [reply.text for reply in await asyncio.gather(*ask(api))]
        before = (await metrics(pair.url)).total("dynamo_frontend_model_migration_total")
        tasks = ask(api)
        await busy(pair, active=1)
        code = await asyncio.to_thread(lambda: pair.remove_worker(pair.workers[0], kill=kill))
        replies = await asyncio.gather(*tasks)
        after = (await metrics(pair.url)).total("dynamo_frontend_model_migration_total")
        await asyncio.to_thread(pair.add_worker)
    assert (code == 0) is not kill
    assert [(reply.status, reply.error) for reply in replies] == [(200, "")] * REQUESTS
    assert [reply.text for reply in replies] == undisturbed["texts"]
    assert after > before
