"""A core that hangs is found, examined and replaced; one that is merely busy is left alone."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.faults.harness import FAST_CANARY, SimStack, busy, consistent, idle, recovery_s, status, streams, under_load
from tests.faults.test_death import ended
from tests.stack import client, eventually
from worker.local import LocalWorker

TIMEOUT_S = 2.0
HANGS = ("sleep", "deadlock", "lock", "stopped")


@pytest.mark.parametrize("hang", HANGS)
async def test_a_core_that_hangs_is_found_in_time_examined_and_ended_and_no_stream_is_lost(
    tiny: Path, tmp_path: Path, figures, hang: str
) -> None:
    flags = ("--step-timeout-s", str(TIMEOUT_S))
    with SimStack(
        tiny, *flags, directory=tmp_path, workers=2, sim=("--sim-step-s", "0.02"), environment=FAST_CANARY
    ) as stack:
        victim = stack.workers[0]
        core = stack.core(victim)
        async with under_load(stack):
            began = time.monotonic()
            if hang == "stopped":
                os.kill(core, signal.SIGSTOP)
            else:
                stack.order(victim, hang)
            assert await eventually(lambda: status(f"{victim.system_url}/health"), lambda code: code != 200, 20) != 200
            red = time.monotonic() - began
            figures(f"core that hangs ({hang}, limit {TIMEOUT_S:g} s): its worker's health is red after", red, "s")
            figures(f"core that hangs ({hang}): next request served after", await recovery_s(stack, began), "s")
            assert await asyncio.to_thread(ended, stack, victim) == 1
        assert TIMEOUT_S < red < TIMEOUT_S + 5, "a busy machine looks a little later"
        assert "has said nothing for" in victim.child.reason
        assert not psutil.pid_exists(core)
        said = "\n".join(line for line in stack.log if line.startswith(victim.child.name))
        if hang != "stopped":  # a process that stands still writes nothing
            assert "tests/sim_core.py" in said, "the stack of the thread that hangs"
            assert "in fail" in said
        last = stack.records()[-1]
        assert (last["total_us"], last["launch_us"]) == (-1, -1) or hang == "stopped"
        assert last["decode_rows"] > 0
        assert last["referenced_pages"] > 0
        await consistent(stack)


async def test_a_core_that_hangs_idle_is_found_by_its_silence(tiny: Path, tmp_path: Path) -> None:
    """Nobody waits for it, and yet the next request must not be sent there."""
    with SimStack(tiny, "--step-timeout-s", str(TIMEOUT_S), directory=tmp_path, workers=2) as stack:
        victim = stack.workers[0]
        os.kill(stack.core(victim), signal.SIGSTOP)
        assert await asyncio.to_thread(ended, stack, victim) == 1
        await consistent(stack)


@asynccontextmanager
async def health(worker: LocalWorker) -> AsyncIterator[list[tuple[int, int]]]:
    """Statuses of /live and /health, looked at all the time."""
    seen: list[tuple[int, int]] = []

    async def look() -> None:
        while True:
            seen.append((await status(f"{worker.system_url}/live"), await status(f"{worker.system_url}/health")))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(look())
    try:
        yield seen
    finally:
        task.cancel()


async def test_a_busy_core_never_trips_the_watchdog_and_live_stays_green(tiny: Path, tmp_path: Path) -> None:
    """Steps of three quarters of the limit, every row taken, the queue full, and canaries all the time."""
    flags = ("--step-timeout-s", str(TIMEOUT_S), "--max-bucket", "4", "--max-queue", "200", "--max-step-tokens", "64")
    with SimStack(
        tiny, *flags, directory=tmp_path, sim=("--sim-step-s", str(0.75 * TIMEOUT_S)), environment=FAST_CANARY
    ) as stack:
        (worker,) = stack.workers
        async with client(stack) as api, health(worker) as seen:
            load = streams(api, 100, max_tokens=3)
            await busy(stack, active=1, waiting=50)
            await asyncio.sleep(8)
            await load.drop()
            await idle(stack, within_s=10)
        assert set(seen[seen.index((200, 200)) :]) == {(200, 200)}, seen
        assert len(seen) > 20
        assert worker.child.alive
