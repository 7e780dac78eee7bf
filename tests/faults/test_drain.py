"""Workers that are told to go: nothing is lost, and they end with code 0 and a clean discovery."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.faults.harness import Load, SimStack, busy, consistent, idle, prompt, serves, status, streams
from tests.stack import client, eventually, metrics

ROW_FLAGS = ("--max-bucket", "4", "--max-step-tokens", "32")


async def test_what_waits_prefills_and_generates_goes_on_elsewhere_with_unbroken_text(
    tiny: Path, tmp_path: Path
) -> None:
    flags = (*ROW_FLAGS, "--drain-timeout-s", "1")
    sim = ("--sim-step-s", "0.02")
    with SimStack(tiny, *flags, directory=tmp_path, sim=sim) as stack:
        first = stack.workers[0]
        async with client(stack) as api:
            load = streams(api, 8, max_tokens=200)  # 4 s at the least: some outlast the drain
            for number in range(100, 108):
                load.ask(api, prompt(number, 600), 20)  # a prompt of 600 is 19 steps and more
            await busy(stack, active=1)
            second = await asyncio.to_thread(stack.add_worker)
            for number in range(200, 204):
                load.ask(api, prompt(number), 30)
            found = await eventually(
                lambda: metrics(first.system_url), lambda page: page.total("pagelane_requests", state="waiting") > 0
            )
            assert found.total("pagelane_requests", state="waiting") > 0
            began = time.monotonic()
            code = await asyncio.to_thread(stack.remove_worker, first)
            took = time.monotonic() - began
            assert code == 0
            assert took < 10, "the deadline is 30 s, the drain 1 s"
            assert await load.lost() == []
            migrated = (await metrics(stack.url)).total("dynamo_frontend_model_migration_total")
        assert migrated > 0
        # The second worker's own, nothing of the first: its event channels go with its lease.
        assert all(name.endswith(f"{second.instance_id:x}") for name in stack.discovered()), stack.discovered()
        assert stack.index(first.child.pid) == stack.published(first.child.pid)
        await consistent(stack)


async def test_what_waits_in_a_draining_worker_starts_elsewhere_before_the_drain_is_over(
    tiny: Path, tmp_path: Path
) -> None:
    flags = ("--max-bucket", "1", "--max-step-tokens", "32")
    with SimStack(tiny, *flags, directory=tmp_path, sim=("--sim-step-s", "0.02"), router_mode="round-robin") as stack:
        first = stack.workers[0]
        async with client(stack) as api:
            running, waiting = Load(), Load()
            running.ask(api, prompt(0), 300)
            await busy(stack, active=1)
            waiting.ask(api, prompt(1), 5)
            await busy(stack, waiting=1)
            await asyncio.to_thread(stack.add_worker)
            leaving = asyncio.create_task(asyncio.to_thread(stack.remove_worker, first))
            assert await waiting.lost() == []
            assert not running.tasks[0].done()
            assert await running.lost() == []
            assert await leaving == 0


@pytest.mark.parametrize("canary", ["true", "false"])
async def test_health_is_red_from_sigterm_on_while_streams_go_on(tiny: Path, tmp_path: Path, canary: str) -> None:
    environment = {"DYN_HEALTH_CHECK_ENABLED": canary, "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}
    with SimStack(tiny, directory=tmp_path, sim=("--sim-step-s", "0.01"), environment=environment) as stack:
        (worker,) = stack.workers
        async with client(stack) as api:
            load = streams(api)
            await busy(stack, active=32)
            leaving = asyncio.create_task(asyncio.to_thread(stack.remove_worker, worker))
            await asyncio.sleep(0.5)
            seen = set()
            while not leaving.done():
                seen |= {await status(f"{worker.system_url}/{path}") for path in ("live", "health")}
            assert await load.lost() == []
            assert await leaving == 0
            assert 503 in seen
            assert seen <= {503, 0}, "0: it has ended"


async def test_a_rolling_restart_of_three_workers_fails_no_request(tiny: Path, tmp_path: Path) -> None:
    with SimStack(tiny, directory=tmp_path, workers=3, sim=("--sim-step-s", "0.01")) as stack:
        async with client(stack) as api:
            stop = asyncio.Event()
            loads: list[Load] = []

            async def user(number: int) -> None:
                while not stop.is_set():
                    load = Load()
                    load.ask(api, prompt(number * 1000 + len(loads)), 60, number % 2 == 0)
                    loads.append(load)
                    await load.replies()

            users = [asyncio.create_task(user(number)) for number in range(32)]
            await busy(stack, active=1)
            for worker in list(stack.workers):
                assert await asyncio.to_thread(stack.remove_worker, worker) == 0
                await asyncio.to_thread(stack.add_worker)
            await busy(stack, active=1)
            stop.set()
            await asyncio.gather(*users)
        assert len(loads) > 64
        assert [lost for load in loads for lost in await load.lost()] == []
        await consistent(stack)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_a_signal_while_the_model_loads_ends_the_worker_at_once(
    tiny: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with SimStack(tiny, directory=tmp_path) as stack:
        before = stack.discovered()
        loading = stack.add_worker("--sim-load-s", "600", wait=False)
        await eventually(lambda: asyncio.to_thread(_has_core, stack, loading), bool, 20)
        began = time.monotonic()
        loading.child.send(number)
        code = await asyncio.to_thread(stack.wait_exit, loading)
        assert (code, time.monotonic() - began < 10) == (0, True), "\n".join(loading.child.tail)
        stack.workers.remove(loading)
        assert stack.discovered() == before
        assert not [line for line in loading.child.tail if "Traceback" in line or "pagelane: error" in line]
        await serves(stack)
        await idle(stack)


def _has_core(stack: SimStack, worker: object) -> bool:
    try:
        return bool(stack.core(worker))
    except ValueError:
        return False


async def test_sigterm_within_the_grace_period_is_no_lost_registration(tiny: Path, tmp_path: Path) -> None:
    """Dynamo takes the worker out of discovery first and calls `cleanup` a grace period later."""
    grace = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "5"}
    with SimStack(tiny, directory=tmp_path, environment=grace) as stack:
        assert await asyncio.to_thread(stack.remove_worker, stack.workers[0]) == 0
