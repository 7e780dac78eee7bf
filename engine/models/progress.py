"""Says how far a long transfer has come, at a bounded rate. No torch."""

import time
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

EVERY_S = 5.0
"""Seconds between two lines."""


class Lines:
    """A `Progress` that says one line at the start, one every few seconds, and one at the end."""

    def __init__(self, what: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._say = say
        self._clock = clock
        self._began = clock()
        self._next = self._began
        self._done = False

    def __call__(self, done: int, total: int) -> None:
        """Bytes done so far, of how many."""
        now = self._clock()
        if self._done or (done < total and now < self._next):
            return
        self._next = now + EVERY_S
        self._done = done >= total
        rate = int(done / max(now - self._began, 1e-3)) >> 20
        self._say(f"{self._what}: {done >> 20} of {total >> 20} MiB, {100 * done // max(total, 1)} %, {rate} MiB/s")
