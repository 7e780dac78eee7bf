"""A process whose event loop stands still gets SIGTERM, one whose loop is slow does not."""

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

from worker.alive import LoopWatch

LIMIT_S = 0.5


@pytest.fixture
def told() -> Iterator[list[float]]:
    """When SIGTERM came, in seconds of the monotonic clock."""
    found: list[float] = []
    before = signal.signal(signal.SIGTERM, lambda *_: found.append(time.monotonic()))
    yield found
    signal.signal(signal.SIGTERM, before)


def stand_still(seconds: float) -> None:
    """Hold the event loop up."""
    time.sleep(seconds)


async def test_a_loop_that_stands_still_gets_sigterm_once_and_a_reason_with_its_stacks(
    told: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    watch = LoopWatch(LIMIT_S)
    await asyncio.sleep(0.1)
    began = time.monotonic()
    stand_still(2 * LIMIT_S)
    reason = watch.verdict()
    watch.stop()
    assert 0.8 * LIMIT_S < told[0] - began < 2 * LIMIT_S
    assert len(told) == 1
    assert reason is not None
    assert "stood still for 1." in reason
    assert "test_a_loop_that_stands_still" in capfd.readouterr().err


async def test_a_loop_that_comes_round_or_is_no_longer_watched_gets_nothing(told: list[float]) -> None:
    watch = LoopWatch(LIMIT_S)
    for _ in range(6):
        stand_still(LIMIT_S / 4)
        await asyncio.sleep(0.01)
    assert watch.verdict() is None
    watch.stop()
    stand_still(1.5 * LIMIT_S)
    assert told == []
