"""A child process of the local launcher: started, read line by line, stopped, and never left behind."""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_PYTHON_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) +[\w.]+: ")
"""Head of the engine core's log lines: time, level and module."""
_LINE_LIMIT = 1 << 20
_TAIL_LINES = 40

QUIET_TARGETS = ("mm_routing", "request_span", "dynamo_runtime", "dynamo_llm", "dynamo_kv_router", "_core")
"""Dynamo's log targets that speak of every connection and request: shown from ERROR on, since their warnings also stand
in the log of a stack that is well ("Adding worker", "Failed to unregister endpoint" after it was unregistered)."""

QUIET_MESSAGES = ("monitor_instance_source: The Sender is dropped", "response failed")
"""Beginnings of errors that a frontend logs for every worker when it is told to stop, and a worker for each look at its
/health while it loads."""

REASON = "pagelane: error: "
"""How the line begins in which a worker says why it cannot go on."""


def failed(error: Exception, code: int) -> int:
    """Say why this process cannot go on, in the line that `Child.reason` finds. Returns the exit code, `code`."""
    sys.stderr.write(f"{REASON}{' '.join(str(error).split())}\n")
    return code


class _LogRecord(msgspec.Struct, frozen=True):
    """What is read of a line of Dynamo's JSON log; Python's records arrive with the target "log"."""

    level: str
    message: str
    target: str = ""
    error: str = ""
    log_target: str = msgspec.field(default="", name="log.target")


_RECORD = msgspec.json.Decoder(_LogRecord)


def readable(line: str) -> str | None:
    """A log line as a person wants it, or None for one that only concerns Dynamo's developers.

    Lines of Dynamo's JSON log and of the engine core become their message, with the level in front if it is no INFO.
    All others stay as they are, without colours.
    """
    try:
        record = _RECORD.decode(line)
    except msgspec.DecodeError:
        return _PYTHON_RECORD.sub(_level, _ESCAPES.sub("", line).rstrip(), count=1)
    urgent = record.level in ("WARN", "ERROR")
    loud = record.level == "ERROR" or not record.target.startswith(QUIET_TARGETS)
    loud = loud and not record.message.startswith(QUIET_MESSAGES)
    from_python = record.target == "log" and not record.log_target.startswith(("router_args", "main."))
    if not loud or not (urgent or from_python or record.target.startswith("dynamo_backend_common")):
        return None
    text = f"{record.level}: {record.message}" if urgent else record.message
    return f"{text} ({record.error})" if record.error else text


def _level(head: re.Match[str]) -> str:
    return "" if head[1] == "INFO" else f"{head[1]}: "


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """What a child is started with."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    on_line: Callable[[str, str], None] = lambda name, line: None
    """Called with the child's name and each of its readable lines."""


@dataclass(slots=True, eq=False)
class Child:
    """A running child. It leads a session of its own, so that Ctrl-C in the terminal reaches the launcher alone."""

    name: str
    process: asyncio.subprocess.Process
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    """The last readable lines."""
    _reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    @property
    def last_words(self) -> str:
        """Why it ended, as far as it said."""
        code = self.process.returncode
        how = "is running" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return ": ".join([f"{self.name} {how}", *([self.reason] if self.reason else [])])

    @property
    def reason(self) -> str:
        """Its own reason for ending, or else its last line; a reason may be followed by what its runtime says."""
        reasons = [line for line in self.tail if line.startswith(REASON)] or list(self.tail)
        return reasons[-1].removeprefix(REASON) if reasons else ""

    async def wait(self) -> int:
        """Wait until it has ended and its output has been read. Returns the exit code, negative for a signal."""
        code = await self.process.wait()
        if self._reader is not None:
            # A grandchild may hold the pipe open; it is not waited for, but what it says later is still read.
            await asyncio.wait((self._reader,), timeout=1.0)
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to it and its process group."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> int:
        """SIGTERM; SIGKILL after `timeout_s`. Returns the exit code."""
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
        return await self.wait()


async def start_child(config: ChildConfig) -> Child:
    """Start a process whose output is read until it ends, and which the kernel kills when this process dies."""
    parent = os.getpid()

    def die_with_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the kernel was told
            os._exit(1)

    # A pipe of our own: with asyncio's, `wait` would hang for as long as a grandchild holds the other end.
    reader, writer = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *config.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writer,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(config.environment),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    child = Child(config.name, process)
    child._reader = asyncio.create_task(_read(reader, child, config))
    return child


async def _read(descriptor: int, child: Child, config: ChildConfig) -> None:
    stream = asyncio.StreamReader(limit=_LINE_LIMIT)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        while raw := await _line(stream):
            line = readable(raw.decode(errors="replace").rstrip("\r\n"))
            if line:
                child.tail.append(line)
                config.on_line(child.name, line)
    finally:
        transport.close()


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line, b"" at the end. What is longer than the limit is dropped."""
    while True:
        try:
            return await stream.readline()
        except ValueError:
            continue
