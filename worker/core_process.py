"""The engine core's process as its worker holds it: started, noticed when it ends, killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence


class CoreProcess:
    """A child whose end is heard of on the event loop at once, through its pidfd."""

    def __init__(self, command: Sequence[str], descriptors: Sequence[int], on_exit: Callable[[str], None]) -> None:
        """Start `command`, which inherits `descriptors` and no others. Raises `OSError` if it cannot be run.

        `on_exit` is told how it ended, in words that follow "it".
        """
        # A session of its own: Ctrl-C in a terminal reaches the worker alone, which then drains and stops the core.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=tuple(descriptors)
        )
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        self._on_exit = on_exit
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._take_exit)

    @property
    def pid(self) -> int:
        """Its process id; nobody else gets it before this process has been waited for."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once it has ended."""
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self._process.kill()

    async def exit_within(self, seconds: float) -> None:
        """Wait for its end, for so long at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)

    def _take_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        code = self._process.wait()
        self._exited.set()
        self._on_exit(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")

    def close(self) -> None:
        """Hear no more of it. May be called more than once."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
