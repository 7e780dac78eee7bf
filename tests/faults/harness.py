"""Real frontend and workers over simulated cores, streams with known text, and what must hold after a fault."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kv.events import Removed, Stored, replay
from tests.sim_core import expected_text
from tests.stack import QUICK_STOP, Client, Metrics, Reply, Stack, client, eventually, metrics
from worker.local import LocalWorker

ROOT = Path(__file__).parents[2]
STREAMS = 32
LETTERS = range(37, 87)

FAST_CANARY = {
    "DYN_HEALTH_CHECK_ENABLED": "true",
    "DYN_CANARY_WAIT_TIME": "1",
    "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "3",
}


class SimStack(Stack):
    """A stack whose workers are real and whose cores only simulate a device; see `tests.sim_core`."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        directory: Path,
        sim: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.sim_directory = directory
        command = (sys.executable, "-m", "tests.sim_worker", "--sim-directory", str(directory), *sim)
        super().__init__(
            *("--model", str(model), "--max-bucket", "64", "--step-record-dir", str(directory / "records")),
            *flags,
            worker_command=command,
            environment={**QUICK_STOP, "PYTHONPATH": str(ROOT), **(environment or {})},
            **options,
        )

    def core(self, worker: LocalWorker) -> int:
        """Process id of a worker's engine core."""
        (core,) = psutil.Process(worker.child.pid).children()
        return core.pid

    def order(self, worker: LocalWorker, text: str) -> None:
        """Have the next step of a worker's core fail as `tests.sim_core` says."""
        path = self.sim_directory / f"{self.core(worker)}.order"
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)

    def published(self, pid: int) -> set[int]:
        """Block hashes that the worker with this process id has announced and not withdrawn."""
        path = self.sim_directory / f"{pid}.events"
        lines = path.read_bytes().rstrip(b"\0").splitlines() if path.exists() else []
        kinds = {"Stored": lambda hashes: Stored(hashes, None, b""), "Removed": Removed}
        return set(replay(kinds[kind](hashes) for kind, hashes in map(json.loads, lines)))

    def index(self, pid: int) -> set[int]:
        """Block hashes that the core of an ended worker held at its end."""
        return set(json.loads((self.sim_directory / f"{pid}.index").read_text()))

    def records(self) -> list[dict[str, Any]]:
        """Steps that lost cores have left, of the file written last."""
        files = sorted((self.sim_directory / "records").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        return [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []

    def router_view(self) -> dict[int, set[int]]:
        """Block hashes by worker's id, as a router that joins now learns them."""
        result = subprocess.run(
            [sys.executable, "-m", "tests.router_view", "16"],
            env=self.local.environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-2000:]
        held = json.loads(result.stdout.splitlines()[-1])
        return {int(worker): {signed(block) for block in blocks} for worker, blocks in held.items()}


def signed(number: int) -> int:
    """A block hash as we publish it; Dynamo prints the same 64 bits without a sign."""
    return number - (1 << 64) if number >> 63 else number


def prompt(number: int, length: int = 24) -> list[int]:
    """A prompt of its own for every number."""
    rng = random.Random(number)
    return [rng.choice(LETTERS) for _ in range(length)]


@dataclass
class Load:
    """Streams whose texts are known."""

    asked: list[tuple[list[int], int]] = field(default_factory=list)
    tasks: list[asyncio.Task[Reply]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    """Seconds since the event loop's start at which streams have ended, in order."""

    def ask(self, api: Client, tokens: Sequence[int], max_tokens: int, stream: bool = True) -> None:
        """Send one request."""
        self.asked.append((list(tokens), max_tokens))
        task = asyncio.create_task(api.complete(list(tokens), stream, max_tokens=max_tokens, ignore_eos=True))
        task.add_done_callback(lambda _: self.ended.append(time.monotonic()))
        self.tasks.append(task)

    async def drop(self) -> None:
        """Disconnect what has not ended."""
        for task in self.tasks:
            task.cancel()
        await self.replies()

    async def replies(self) -> list[Reply | BaseException]:
        """Everything that came back, in the order of asking."""
        return list(await asyncio.gather(*self.tasks, return_exceptions=True))

    async def lost(self) -> list[str]:
        """What is wrong with the streams that did not give their whole, right text: empty if none was lost."""
        found = []
        for number, (reply, (tokens, length)) in enumerate(zip(await self.replies(), self.asked, strict=True)):
            if isinstance(reply, BaseException):
                found.append(f"{number}: {reply!r}")
            elif reply.status != 200 or reply.error:
                found.append(f"{number}: {reply.status} {reply.error}")
            elif reply.text != expected_text(tokens, length):
                found.append(f"{number}: {reply.text} instead of {expected_text(tokens, length)}")
        return found


def streams(api: Client, count: int = STREAMS, max_tokens: int = 150, first: int = 0) -> Load:
    """`count` requests at once, every other one streamed."""
    load = Load()
    for number in range(first, first + count):
        load.ask(api, prompt(number), max_tokens, number % 2 == 0)
    return load


async def gauges(worker: LocalWorker) -> dict[str, float]:
    """Requests by state and pages in use, of one worker."""
    page = await metrics(worker.system_url)
    states = ("waiting", "prefilling", "active", "draining")
    requests = {state: page.total("pagelane_requests", state=state) for state in states}
    return requests | {"referenced": page.total("pagelane_kv_pages", state="referenced")}


async def busy(stack: Stack, within_s: float = 20.0, **wanted: float) -> None:
    """Wait until every worker has at least so many requests in these states."""
    for worker in stack.workers:
        found = await eventually(
            lambda worker=worker: gauges(worker), lambda now: all(now[k] >= v for k, v in wanted.items()), within_s
        )
        assert all(found[key] >= value for key, value in wanted.items()), found


async def idle(stack: Stack, within_s: float = 5.0) -> None:
    """Wait until no worker has a request or a page in use."""
    for worker in stack.workers:
        found = await eventually(lambda worker=worker: gauges(worker), lambda now: not any(now.values()), within_s)
        assert not any(found.values()), found


async def consistent(stack: SimStack) -> None:
    """What must hold of all living workers at rest, whatever has happened to others: counters and the router's view."""
    await idle(stack)
    for worker in stack.workers:
        page = await metrics(worker.system_url)
        assert page.total("pagelane_kv_pages") == page.total("pagelane_kv_usable_pages")
        assert page.total("pagelane_kv_event_errors_total") == 0
        assert page.total("pagelane_kv_blocks_published_total", event="stored") == page.total(
            "pagelane_kv_blocks_total", event="stored"
        )
        assert page.total("dynamo_component_inflight_requests") == 0
    assert applied_statuses(await metrics(stack.url)) <= {"ok"}
    view = await asyncio.to_thread(stack.router_view)
    assert set(view) <= {worker.instance_id for worker in stack.workers}
    for worker in stack.workers:
        assert view.get(worker.instance_id, set()) == stack.published(worker.child.pid)


def applied_statuses(page: Metrics) -> set[str]:
    """What the frontend's router has made of the events that came."""
    return page.labels("dynamo_component_kv_cache_events_applied_total", "status")


async def status(url: str) -> int:
    """HTTP status of a GET; 0 if nothing answers."""
    import httpx

    try:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
            return (await http.get(url)).status_code
    except httpx.HTTPError:
        return 0


@asynccontextmanager
async def under_load(stack: SimStack, max_tokens: int = 150) -> AsyncIterator[Load]:
    """`STREAMS` streams that all workers are at work on; afterwards none may be lost."""
    async with client(stack) as api:
        load = streams(api, max_tokens=max_tokens)
        try:
            await busy(stack, active=4)
            yield load
            assert await load.lost() == []
        finally:
            await load.drop()


async def serves(stack: SimStack) -> None:
    """`STREAMS` short streams at once, of which none may be lost."""
    async with client(stack) as api:
        assert await streams(api, max_tokens=20).lost() == []


async def recovery_s(stack: SimStack, since: float) -> float:
    """Seconds since `since` until a new request has gone through."""
    async with client(stack) as api:
        load = Load()
        load.ask(api, prompt(10_000), 4)
        assert await load.lost() == []
    return time.monotonic() - since
