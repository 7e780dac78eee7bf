"""What the sandbox of pods promises: its processes end with the one that has started it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helm.image.sandbox import Sandbox, inner, reason_against

pytestmark = pytest.mark.k8s


def command_of(pid: int) -> list[str]:
    """Words of a process's command, none if it is gone or a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    return []


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def running_inside(process: subprocess.Popen[bytes]) -> int:
    """The sandboxed process's id, 0 if there is none yet."""
    with contextlib.suppress(ProcessLookupError):
        return inner(process.pid)
    return 0


def test_a_killed_sandbox_leaves_no_process_behind() -> None:
    reason = reason_against()
    if reason:
        pytest.skip(f"no sandbox here: {reason}")
    command = ["sleep", "60"]
    process = subprocess.Popen(Sandbox(reachable=(sys.executable,)).command(command))
    assert wait_for(lambda: command_of(running_inside(process)) == command)
    inside = running_inside(process)
    process.kill()
    process.wait()
    try:
        assert wait_for(lambda: not command_of(inside))
    finally:
        if command_of(inside) == command:
            os.kill(inside, signal.SIGKILL)
