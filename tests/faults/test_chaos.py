"""Users that never pause while faults of every kind come one after another: all the other tests together, and long."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.harness import STREAMS, Load, SimStack, busy, consistent, prompt
from tests.stack import client, eventually
from worker.local import LocalWorker

SOAK_S = float(os.environ.get("PAGELANE_SOAK_S", "1800"))
TIMEOUT_S = 2.0
FAULTS = ("drain", "kill worker", "kill core", "error 1", "memory 1", "error 3", "sleep", "deadlock", "lock")
ENDING = {"kill core", "error 3", "sleep", "deadlock", "lock"}
"""Faults that end a worker by itself."""


class Users:
    """`STREAMS` users, each of whom asks again as soon as it is answered."""

    def __init__(self, stack: SimStack) -> None:
        self.stack = stack
        self.answered = 0
        self.lost: list[str] = []
        self._stop = asyncio.Event()
        self._tasks = [asyncio.create_task(self._user(number)) for number in range(STREAMS)]

    async def _user(self, number: int) -> None:
        rng = random.Random(number)
        async with client(self.stack) as api:
            while not self._stop.is_set():
                load = Load()
                load.ask(api, prompt(rng.randrange(200), rng.randint(1, 100)), rng.randint(1, 80), rng.random() < 0.5)
                self.lost += await load.lost()
                self.answered += 1

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


def happened(stack: SimStack, users: Users, dealt: Counter[str], lines: int = 150) -> str:
    """What a failure is judged by: what was lost, after which faults, and the end of everybody's log."""
    return "\n".join([*users.lost, f"after {dealt.total()} faults: {dict(dealt)}", *stack.log[-lines:]])


async def deal(stack: SimStack, fault: str, victim: LocalWorker) -> None:
    """Do it, wait until it is over, and replace a worker that is gone."""
    if fault == "drain":
        assert await asyncio.to_thread(stack.remove_worker, victim) == 0
    elif fault == "kill worker":
        await asyncio.to_thread(stack.remove_worker, victim, kill=True)
        # Until its lease is over the router may still choose it. A new request is then tried elsewhere, but one that
        # has just lost another worker is lost (Dynamo 1.6.1: "No healthy TCP connection" is an error of no type).
        await eventually(
            lambda: asyncio.to_thread(stack.discovered),
            lambda names: not any(name.endswith(f"{victim.instance_id:x}") for name in names),
            20,
        )
    elif fault == "kill core":
        os.kill(stack.core(victim), signal.SIGKILL)
    else:
        stack.order(victim, fault)
    if fault in ENDING:
        assert await asyncio.to_thread(stack.wait_exit, victim) == 1, "\n".join(victim.child.tail)
        stack.workers.remove(victim)
    if victim not in stack.workers:
        await asyncio.to_thread(stack.add_worker)


async def chaos(tiny: Path, tmp_path: Path, seconds: float, figures) -> None:
    flags = ("--step-timeout-s", str(TIMEOUT_S), "--drain-timeout-s", "1")
    sim = ("--sim-step-s", "0.01", "--sim-pages", "400")
    rng = random.Random(7)
    dealt: Counter[str] = Counter()
    # A request may meet several faults before it ends, and each costs it one migration.
    with SimStack(tiny, *flags, directory=tmp_path, workers=3, sim=sim, migration_limit=20) as stack:
        users = Users(stack)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await busy(stack, active=1)
            fault = FAULTS[dealt.total()] if dealt.total() < len(FAULTS) else rng.choice(FAULTS)
            victim = rng.choice(stack.workers)
            stack.log.append(f"test | {fault}: {victim.child.name}, instance {victim.instance_id:x}")
            await deal(stack, fault, victim)
            stack.log.append(f"test | {fault} is over")
            dealt[fault] += 1
            assert not users.lost, happened(stack, users, dealt)
        await users.stop()
        figures("chaos: faults dealt out", dealt.total(), f"({dict(dealt)})")
        figures("chaos: requests answered, none lost", users.answered, "requests")
        assert not users.lost, happened(stack, users, dealt)
        await consistent(stack)


@pytest.mark.timeout(300)
async def test_no_request_is_lost_while_faults_come_for_a_minute(tiny: Path, tmp_path: Path, figures) -> None:
    await chaos(tiny, tmp_path, 60, figures)


@pytest.mark.soak
async def test_no_request_is_lost_while_faults_come_all_the_time(tiny: Path, tmp_path: Path, figures) -> None:
    await chaos(tiny, tmp_path, SOAK_S, figures)
