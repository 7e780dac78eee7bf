"""More requests than a worker can take: a bounded queue, refusals at once, and no harm to those that were let in."""

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness import SimStack, consistent, gauges, idle, prompt
from tests.sim_core import expected_text
from tests.stack import Client, Metrics, Reply, client, metrics

ROWS = 8
TOKENS = 10
"""Of a request on average. Their lengths differ, so that rows do not all end in one step."""
STEP_S = 0.1
"""Long beside what frontend and worker take for a request, so that a busy machine changes little."""
CAPACITY = ROWS / (TOKENS * STEP_S)
"""Requests a second that a worker can end."""
QUEUE = 2
FLAGS = ("--max-bucket", str(ROWS), "--max-queue", str(QUEUE))
BUSY_THRESHOLD = ("--active-decode-blocks-threshold", "0.9")


@dataclass
class Ask:
    """One request, what came back and how long it took."""

    number: int
    reply: Reply
    seconds: float

    @property
    def served(self) -> bool:
        return self.reply.status == 200 and not self.reply.error


def length(number: int) -> int:
    """`max_tokens` of a request."""
    return TOKENS - 2 + number % 5


async def ask(api: Client, number: int) -> Ask:
    began = time.monotonic()
    reply = await api.complete(prompt(number), max_tokens=length(number), ignore_eos=True)
    return Ask(number, reply, time.monotonic() - began)


async def closed_loop(api: Client, users: int, rounds: int) -> list[Ask]:
    """`users` that each ask again as soon as they are answered."""

    async def user(first: int) -> list[Ask]:
        return [await ask(api, first + n) for n in range(rounds)]

    return [one for asks in await asyncio.gather(*(user(1000 * u) for u in range(users))) for one in asks]


def latency_s(page: Metrics, since: Metrics | None = None) -> float:
    """Mean seconds from a request's arrival in the worker to its last token, for `TOKENS` tokens: what client and
    frontend take on a busy machine is not the worker's.
    """

    def mean(name: str) -> float:
        total, count = (page.total(f"pagelane_{name}_{part}") for part in ("sum", "count"))
        if since is not None:
            total -= since.total(f"pagelane_{name}_sum")
            count -= since.total(f"pagelane_{name}_count")
        return total / count

    return mean("time_to_first_token_seconds") + (TOKENS - 1) * mean("inter_token_latency_seconds")


async def flood(api: Client, rate: float, seconds: float) -> list[Ask]:
    """Arrivals at a steady `rate`, whatever becomes of them."""
    tasks, began = [], time.monotonic()
    while (late := time.monotonic() - began) < seconds:
        while len(tasks) < late * rate:
            tasks.append(asyncio.create_task(ask(api, 100_000 + len(tasks))))
        await asyncio.sleep(0.005)
    return list(await asyncio.gather(*tasks))


async def test_five_times_the_capacity_is_refused_at_once_and_delays_nobody_for_long(
    tiny: Path, tmp_path: Path, figures
) -> None:
    sim = ("--sim-step-s", str(STEP_S))
    with SimStack(tiny, *FLAGS, directory=tmp_path, sim=sim, frontend_flags=BUSY_THRESHOLD, migration_limit=0) as stack:
        (worker,) = stack.workers
        async with client(stack) as api:
            before = await closed_loop(api, ROWS, 3)
            assert all(one.served for one in before), "as many users as rows are never refused, however short the queue"
            calm_page = await metrics(worker.system_url)
            calm = latency_s(calm_page)
            deepest = 0.0

            async def watch() -> None:
                nonlocal deepest
                while True:
                    deepest = max(deepest, (await gauges(worker))["waiting"])
                    await asyncio.sleep(0.05)

            watcher = asyncio.create_task(watch())
            asks = await flood(api, 5 * CAPACITY, 6)
            watcher.cancel()
            ended = time.monotonic()
            await idle(stack)
            served = [one for one in asks if one.served]
            refused = [one for one in asks if not one.served]
            admitted = latency_s(await metrics(worker.system_url), calm_page)
            figures("overload: latency of the admitted over that with an empty queue", admitted / calm, "x")
            refusal = statistics.median(one.seconds for one in refused)
            figures("overload: median time to a refusal", 1000 * refusal, "ms")
            figures("overload: admitted", len(served), f"of {len(asks)}")
            figures("overload: idle after the load's end", time.monotonic() - ended, "s")
            assert {one.reply.status for one in refused} == {503}
            assert len(refused) > len(served)
            assert 0 < deepest <= QUEUE
            assert admitted < 2 * calm
            for one in served:
                assert one.reply.text == expected_text(prompt(one.number), length(one.number))
            # With a busy threshold set, an idle worker must not be taken for a busy one.
            calls = [await ask(api, 200_000 + n) for n in range(5)]
            assert [one.reply.status for one in calls] == [200] * 5
        page = await metrics(worker.system_url)
        assert page.total("pagelane_requests_refused_total", reason="capacity") == len(refused)
        assert page.total("pagelane_queue_refusals_total", reason="queue_full") == len(refused), "each on arrival"
        await consistent(stack)


async def test_what_one_worker_refuses_another_takes(tiny: Path, tmp_path: Path) -> None:
    """A full queue is CannotConnect: the frontend tries the next worker before the client hears of it."""
    flags = ("--max-bucket", "2", "--max-queue", "2")
    with SimStack(
        tiny, *flags, directory=tmp_path, workers=2, sim=("--sim-step-s", "0.05"), router_mode="random"
    ) as stack:
        async with client(stack) as api:
            asks = await asyncio.gather(*(ask(api, number) for number in range(8)))
        assert [one.reply.status for one in asks].count(200) >= 7
        await consistent(stack)
