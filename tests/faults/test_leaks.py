"""Many short requests, a fifth of them cut off: memory, descriptors, tasks, pages and gauges return to the start."""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.faults.harness import LETTERS, SimStack, consistent, idle
from tests.stack import Client, client, eventually, metrics

SIM = ("--sim-step-s", "0.001", "--sim-pages", "1024")
CANCELLED = 0.2


@dataclass(frozen=True)
class Holdings:
    """What processes of a stack hold at rest."""

    worker_mib: float
    core_mib: float
    descriptors: int
    """Of worker and core."""
    tasks: float
    """asyncio tasks of the worker."""
    in_flight: float
    """Requests that Dynamo counts as in flight, in worker and frontend."""
    referenced_pages: float


async def holdings(stack: SimStack) -> Holdings:
    await idle(stack)
    (worker,) = stack.workers
    processes = [psutil.Process(worker.child.pid), psutil.Process(stack.core(worker))]
    resident = [process.memory_info().rss / 2**20 for process in processes]
    page, front = await metrics(worker.system_url), await metrics(stack.url)
    return Holdings(
        *resident,
        sum(process.num_fds() for process in processes),
        page.total("pagelane_worker_tasks"),
        page.total("dynamo_component_inflight_requests") + front.total("dynamo_frontend_inflight_requests"),
        page.total("pagelane_kv_pages", state="referenced"),
    )


async def one(api: Client, rng: random.Random) -> None:
    """A short request; a fifth of the clients go away while it runs."""
    tokens = [rng.choice(LETTERS) for _ in range(rng.randint(1, 60))]
    if rng.random() < CANCELLED:
        asked = api.complete(tokens, rng.random() < 0.5, max_tokens=500, ignore_eos=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked, rng.random() * 0.1)
    else:
        reply = await api.complete(tokens, rng.random() < 0.5, max_tokens=rng.randint(1, 8), ignore_eos=True)
        assert (reply.status, reply.error) == (200, "")


async def many(stack: SimStack, count: int, seed: int, users: int = 16) -> None:
    """`count` requests, `users` at a time."""
    left = iter(range(count))

    async def user(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        async with client(stack) as api:
            for _ in left:
                await one(api, rng)

    await asyncio.gather(*(user(number) for number in range(users)))


async def no_leaks(tiny: Path, tmp_path: Path, warm: int, count: int, figures) -> None:
    with SimStack(tiny, directory=tmp_path, sim=SIM) as stack:
        await many(stack, warm, seed=1)
        before = await holdings(stack)
        await many(stack, count, seed=2)
        after = await eventually(
            lambda: holdings(stack), lambda now: now.descriptors <= before.descriptors and now.tasks <= before.tasks
        )
        page = await metrics(stack.workers[0].system_url)
        cancelled = page.total("pagelane_requests_finished_total", reason="cancelled")
        figures(f"{count} requests: the worker has grown by", after.worker_mib - before.worker_mib, "MiB")
        figures(f"{count} requests: the core has grown by", after.core_mib - before.core_mib, "MiB")
        figures(f"{count} requests: cut off while they ran", cancelled, "requests")
        assert cancelled > 0.05 * (count + warm)
        assert after.in_flight == 0
        assert after.referenced_pages == 0
        assert after.descriptors <= before.descriptors
        assert after.tasks <= before.tasks
        # One leaked request of a few kB each would be some 20 MiB at 5,000.
        slack = 8 + 0.0005 * count
        assert after.worker_mib < before.worker_mib + slack, (before, after)
        assert after.core_mib < before.core_mib + slack, (before, after)
        await consistent(stack)


async def test_five_thousand_requests_leave_nothing_behind(tiny: Path, tmp_path: Path, figures) -> None:
    await no_leaks(tiny, tmp_path, 500, 5000, figures)


@pytest.mark.soak
async def test_a_hundred_thousand_requests_leave_nothing_behind(tiny: Path, tmp_path: Path, figures) -> None:
    await no_leaks(tiny, tmp_path, 5000, 100_000, figures)
