"""Workers, cores and frontends that go without a word: no stream is lost, and who is left is consistent."""

import asyncio
import os
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.harness import STREAMS, SimStack, consistent, idle, prompt, recovery_s, serves, streams, under_load
from tests.stack import client, eventually, metrics
from worker.local import LocalWorker

SIM = ("--sim-step-s", "0.02")


def ended(stack: SimStack, worker: LocalWorker) -> int:
    """Exit code of a worker that ends by itself; it is no longer one of the stack's."""
    code = stack.wait_exit(worker)
    stack.workers.remove(worker)
    return code


async def test_a_worker_killed_outright_loses_no_stream(tiny: Path, tmp_path: Path, figures) -> None:
    with SimStack(tiny, directory=tmp_path, workers=2, sim=SIM) as stack:
        victim = stack.workers[0]
        core = stack.core(victim)
        async with under_load(stack):
            killed = time.monotonic()
            await asyncio.to_thread(stack.remove_worker, victim, kill=True)
            figures("SIGKILL of a worker: next request served after", await recovery_s(stack, killed), "s")
        assert await eventually(lambda: asyncio.to_thread(psutil.pid_exists, core), lambda alive: not alive) is False
        await consistent(stack)


async def test_a_worker_whose_core_is_killed_ends_with_the_reason_and_loses_no_stream(
    tiny: Path, tmp_path: Path, figures
) -> None:
    with SimStack(tiny, directory=tmp_path, workers=2, sim=SIM) as stack:
        victim = stack.workers[0]
        async with under_load(stack):
            killed = time.monotonic()
            os.kill(stack.core(victim), signal.SIGKILL)
            figures("SIGKILL of a core: next request served after", await recovery_s(stack, killed), "s")
            assert await asyncio.to_thread(ended, stack, victim) == 1
            figures("SIGKILL of a core: its worker has ended after", time.monotonic() - killed, "s")
        assert "was killed by SIGKILL" in victim.child.reason
        records = stack.records()
        assert len(records) > 3
        assert records[-1]["decode_rows"] > 0
        await consistent(stack)


async def test_a_worker_that_stood_still_past_its_lease_ends_and_loses_no_stream(
    tiny: Path, tmp_path: Path, figures
) -> None:
    with SimStack(tiny, directory=tmp_path, workers=2, sim=SIM) as stack:
        victim = stack.workers[0]
        pids = [victim.child.pid, stack.core(victim)]
        async with under_load(stack) as load:
            stopped = time.monotonic()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await eventually(lambda: asyncio.to_thread(stack.discovered), lambda names: len(names) <= 2, 20)
            figures("SIGSTOP of a worker: out of discovery after", time.monotonic() - stopped, "s")
            figures("SIGSTOP of a worker: new requests served after", await recovery_s(stack, stopped), "s")
            await asyncio.sleep(max(0.0, stopped + 30 - time.monotonic()))
            assert len(load.ended) < STREAMS, "Dynamo 1.6 leaves streams with a worker that stands still"
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert await asyncio.to_thread(ended, stack, victim) == 1
        assert "stood still" in victim.child.reason or "not been in discovery" in victim.child.reason
        await consistent(stack)
        await serves(stack)


async def test_a_worker_that_nobody_can_find_any_more_drains_and_ends(tiny: Path, tmp_path: Path) -> None:
    with SimStack(tiny, directory=tmp_path, workers=2, sim=SIM) as stack:
        lost = stack.workers[0]
        await asyncio.sleep(1.5)  # it has found itself there
        async with under_load(stack):
            registered = stack.local.directory / "discovery/v1/instances"
            for path in registered.rglob(f"*{lost.instance_id:x}"):
                path.unlink()
            assert await asyncio.to_thread(ended, stack, lost) == 1
        assert "not been in discovery" in lost.child.reason
        await consistent(stack)


async def test_a_pause_shorter_than_the_lease_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    with SimStack(tiny, directory=tmp_path, workers=2, sim=SIM) as stack:
        paused = stack.workers[0]
        pids = [paused.child.pid, stack.core(paused)]
        async with under_load(stack):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(3)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert paused.child.alive
        await consistent(stack)


async def test_a_full_disk_under_discovery_loses_nothing_and_keeps_a_new_worker_out(tiny: Path, tmp_path: Path) -> None:
    """Writes fail for every process of the stack, as on a full disk; keeping a lease alive writes nothing."""
    with SimStack(tiny, directory=tmp_path, workers=2, sim=SIM) as stack:
        before = stack.discovered()
        async with under_load(stack):
            for pid in stack.local.processes():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
            late = await asyncio.to_thread(stack.add_worker, "--sim-full-disk", wait=False)
            assert await asyncio.to_thread(ended, stack, late) == 1, "\n".join(late.child.tail)
            await asyncio.sleep(11)  # longer than a lease lasts
        assert "Traceback" not in "\n".join(late.child.tail)
        assert stack.discovered() == before
        await serves(stack)
        await consistent(stack)


async def test_a_frontend_killed_and_started_again_finds_the_workers_and_what_they_hold(
    tiny: Path, tmp_path: Path, figures
) -> None:
    with SimStack(tiny, directory=tmp_path, workers=2, sim=SIM) as stack:
        async with client(stack) as api:
            load = streams(api, max_tokens=400)
            await asyncio.sleep(1)
            killed = time.monotonic()
            stack.local.frontend.kill()
            await load.replies()  # these are the frontend's own and go with it
            await idle(stack, within_s=10)
            figures("SIGKILL of the frontend: workers are idle after", time.monotonic() - killed, "s")
        await asyncio.to_thread(stack.restart_frontend)
        figures("SIGKILL of the frontend: started again and routing after", time.monotonic() - killed, "s")
        async with under_load(stack):
            pass
        async with client(stack) as api:
            replies = [await api.complete(prompt(n), max_tokens=1, ignore_eos=True) for n in range(STREAMS)]
        assert [reply.cached_tokens for reply in replies] == [16] * STREAMS, "every prompt was found where it lies"
        await consistent(stack)


@pytest.mark.parametrize("order", ["error 1", "memory 1", "error 2"])
async def test_a_failing_step_loses_no_stream_and_no_worker(tiny: Path, tmp_path: Path, order: str) -> None:
    with SimStack(tiny, directory=tmp_path, workers=2, sim=SIM) as stack:
        failing = stack.workers[0]
        async with under_load(stack):
            stack.order(failing, order)
        page = await metrics(failing.system_url)
        assert page.total("pagelane_requests_finished_total", reason="error") >= 4
        assert failing.child.alive
        await consistent(stack)
        await serves(stack)


async def test_three_failing_steps_in_a_row_end_the_worker_and_lose_no_stream(tiny: Path, tmp_path: Path) -> None:
    with SimStack(tiny, directory=tmp_path, workers=2, sim=SIM) as stack:
        failing = stack.workers[0]
        async with under_load(stack) as load:
            stack.order(failing, "error 1000")
            async with client(stack) as api:
                for number in range(100, 116):
                    load.ask(api, [*range(37, 60), 37 + number % 50], 20)
                    await asyncio.sleep(0.05)
                assert await load.lost() == []
            assert await asyncio.to_thread(ended, stack, failing) == 1
        assert "3 steps in a row failed, the last with: injected error" in failing.child.reason
        assert stack.records()[-1]["error"] == "RuntimeError: injected error"
        await consistent(stack)
