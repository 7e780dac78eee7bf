"""Tells a worker to end when its event loop stands still.

A timer of the kernel's sends SIGTERM unless the loop puts it off in time. It needs no thread and no interpreter lock,
and Dynamo's runtime takes the signal on a thread of its own: /live and /health turn red and discovery is left, whatever
holds the loop up.
"""

import asyncio
import ctypes
import faulthandler
import os
import signal
import time

_LIBC = ctypes.CDLL(None, use_errno=True)
_SIGEV_SIGNAL = 0
_STDERR = 2
LOOKS = 10
"""How often the timer is put off within its time."""


class _Event(ctypes.Structure):
    """Linux' `struct sigevent`."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    ]


class _Times(ctypes.Structure):
    """Linux' `struct itimerspec`: how often, and when first."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "first_s", "first_ns")]


class SignalTimer:
    """A timer that sends this process a signal, once."""

    def __init__(self, number: signal.Signals) -> None:
        """Raises `OSError` if the kernel has no more timers."""
        event, self._id = _Event(None, number, _SIGEV_SIGNAL), ctypes.c_void_p()
        _check(_LIBC.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id)))

    def start(self, seconds: float) -> None:
        """Let it run out in so many seconds from now, and no more when it would have before."""
        whole, rest = divmod(seconds, 1.0)
        times = _Times(0, 0, int(whole), int(rest * 1e9))
        _check(_LIBC.timer_settime(self._id, 0, ctypes.byref(times), None))

    def close(self) -> None:
        """It never runs out."""
        _check(_LIBC.timer_delete(self._id))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class LoopWatch:
    """Has this process get SIGTERM once the running event loop has not come round for `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen = time.monotonic()
        self._timer = SignalTimer(signal.SIGTERM)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def verdict(self) -> str | None:
        """Why the process has got SIGTERM, if that is why; where its threads stand is written to stderr then.

        For signal handlers.
        """
        still_s = time.monotonic() - self._seen
        if still_s < self._limit_s:
            return None
        reason = f"this worker's event loop stood still for {still_s:.1f} s"
        os.write(_STDERR, f"pagelane: {reason}; its threads stand here:\n".encode())
        faulthandler.dump_traceback(_STDERR)
        return reason

    async def _run(self) -> None:
        while True:
            self._seen = time.monotonic()
            self._timer.start(self._limit_s)
            await asyncio.sleep(self._limit_s / LOOKS)

    def stop(self) -> None:
        """Watch no longer."""
        self._timer.close()
        self._task.cancel()
