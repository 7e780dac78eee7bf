"""The staging ring on a fake stream whose copies run late: nothing is written while its copy is queued."""

from collections.abc import Callable

import numpy as np
import pytest

from engine.cuda.layout import Range
from engine.cuda.staging import HostDevice, StagingRing


def bytes_of(buffer: np.ndarray) -> np.ndarray:
    return buffer


class LateDevice(HostDevice):
    """A stream that runs nothing until something waits for it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.queue: list[Callable[[], None]] = []
        self.waits = 0

    def copy(self, source: np.ndarray, at: Range) -> None:
        self.queue.append(lambda: HostDevice.copy(self, source, at))

    def event(self) -> "LateEvent":
        return LateEvent(self)


class LateEvent:
    def __init__(self, stream: LateDevice) -> None:
        self._stream = stream
        self.passed = True

    def record(self) -> None:
        self.passed = False
        self._stream.queue.append(lambda: setattr(self, "passed", True))

    def synchronize(self) -> None:
        self._stream.waits += 1
        while not self.passed:
            self._stream.queue.pop(0)()


def test_a_slot_waits_for_its_own_copy_and_for_no_other() -> None:
    device = LateDevice(4)
    ring = StagingRing(device, 4, slots=3, view=bytes_of)
    seen = []
    for step in range(9):
        buffer = ring.acquire()
        buffer[:] = step
        ring.submit(Range(0, 4))
        seen.append(int(device.arena[0]))
    # Three steps are queued before the first wait; then each wait lets exactly the oldest copy run.
    assert seen == [0, 0, 0, 0, 1, 2, 3, 4, 5]
    assert device.waits == 6
    while device.queue:
        device.queue.pop(0)()
    assert device.arena.tolist() == [8] * 4


def test_an_abandoned_slot_is_handed_out_again() -> None:
    device = LateDevice(4)
    ring = StagingRing(device, 4, slots=2, view=bytes_of)
    ring.acquire()[:] = 5
    first = ring.acquire()
    first[:] = 6
    ring.submit(Range(1, 3))
    assert ring.acquire() is not first
    assert device.waits == 0
    while device.queue:
        device.queue.pop(0)()
    assert device.arena.tolist() == [0, 6, 6, 0]


def test_a_ring_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="0 slots, but needs at least 1"):
        StagingRing(HostDevice(4), 4, slots=0, view=bytes_of)
