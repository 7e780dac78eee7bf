"""Pinned staging buffers in a ring: the host writes one while the copies from others are still queued."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from engine.cuda.layout import Range
from engine.cuda.planner import Array


class Event(Protocol):
    """A point of a stream, as `torch.cuda.Event` is."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class CopyDevice(Protocol):
    """What the ring needs of a device."""

    def pinned(self, nbytes: int) -> Array:
        """Zeroed page-locked host memory, uint8 `[nbytes]`."""
        ...

    def copy(self, source: Array, at: Range) -> None:
        """Queue the copy of `source[at.begin:at.end]` to the same place of the device arena."""
        ...

    def event(self) -> Event: ...


View = TypeVar("View")


class StagingRing(Generic[View]):
    """`slots` buffers of `nbytes` bytes, each handed out as `view` presents it.

    `acquire` hands out the next buffer once its last copy is over, so that a buffer is never written while the device
    may still read it: with steps in flight, take one slot more than there may be of them. A buffer that was acquired
    and not submitted is handed out again.
    """

    def __init__(self, device: CopyDevice, nbytes: int, slots: int, view: Callable[[Array], View]) -> None:
        if slots < 1:
            raise ValueError(f"a staging ring has {slots} slots, but needs at least 1")
        self._device = device
        self._buffers = [device.pinned(nbytes) for _ in range(slots)]
        self._views = [view(buffer) for buffer in self._buffers]
        self._events = [device.event() for _ in range(slots)]
        self._queued = [False] * slots
        self._next = 0

    def acquire(self) -> View:
        """The next buffer. Waits while its copy is queued."""
        if self._queued[self._next]:
            self._events[self._next].synchronize()
            self._queued[self._next] = False
        return self._views[self._next]

    def submit(self, used: Range) -> None:
        """Queue the copy of the used part of the acquired buffer, and go on to the next."""
        self._device.copy(self._buffers[self._next], used)
        self._events[self._next].record()
        self._queued[self._next] = True
        self._next = (self._next + 1) % len(self._buffers)


class HostDevice:
    """A device arena in ordinary memory, whose copies happen at once: for machines without a GPU."""

    def __init__(self, nbytes: int) -> None:
        self.arena: Array = np.zeros(nbytes, np.uint8)

    def pinned(self, nbytes: int) -> Array:
        """See `CopyDevice`."""
        return np.zeros(nbytes, np.uint8)

    def copy(self, source: Array, at: Range) -> None:
        """See `CopyDevice`."""
        self.arena[at.begin : at.end] = source[at.begin : at.end]

    def event(self) -> Event:
        """See `CopyDevice`."""
        return _Passed()


class _Passed:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...
