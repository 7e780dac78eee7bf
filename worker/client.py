"""The worker's end of the socket to its engine core: starts the process, sends requests, hands out what comes back.

One message a step crosses in each direction. Tokens of a step are appended to their streams, and a stream that waits is
woken once, however many of its tokens have come.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from engine.config import CoreConfig
from engine.messages import (
    Failed,
    FromCore,
    Heartbeat,
    Ready,
    Requests,
    Start,
    Stats,
    StepOutput,
    Stop,
    Submit,
)
from kv.events import Removed, Stored
from worker.config import CORE_KILL_S, CORE_STOP_S
from worker.stream import Stream

CORE_COMMAND = (sys.executable, "-m", "engine")


STOPPING = "the worker shuts down"
"""What those are told who wait for a core that is being stopped."""


class CoreError(Exception):
    """The core could not start, died or stopped making steps. The text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How a core is started and watched. Times in seconds."""

    core: CoreConfig
    command: Sequence[str] = CORE_COMMAND
    """Program and first arguments; the socket's address is added."""
    stop_timeout_s: float = CORE_STOP_S
    """How long a core that serves may take to end after `Stop` before it is killed."""
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Listener:
    """Who is told what the core reports. Called on the event loop; must not raise."""

    events: Callable[[list[Stored | Removed]], None] = lambda events: None
    stats: Callable[[Stats], None] = lambda stats: None
    failure: Callable[[str], None] = lambda reason: None


class CoreClient:
    """One engine core process and the requests it works on. All methods are called on one event loop."""

    def __init__(self, config: ClientConfig, listener: Listener) -> None:
        self.stats = Stats()
        self._config = config
        self._listener = listener
        self._streams: dict[int, Stream] = {}
        self._submits: list[Submit] = []
        self._cancels: list[int] = []
        self._flush_scheduled = False
        self._failure: str | None = None
        self._stopping = False
        self._heard = 0.0
        self._busy_since = 0.0
        self._ready: asyncio.Future[Ready] | None = None
        self._exited: asyncio.Event = asyncio.Event()
        self._watchdog: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._directory: Path | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._outbox: deque[bytes] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)

    @property
    def failure(self) -> str | None:
        """Why the core is gone, or None while it lives."""
        return self._failure

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def pid(self) -> int:
        """Process id of the core; 0 before its start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> Ready:
        """Start the core and wait until it can serve. Raises `CoreError` if it cannot, or if `stop` comes first.

        Loading has no time limit: how long it takes depends on the model, the disk and what has to be compiled, and
        nothing tells a core that loads from one that hangs. Its end is noticed, and `stop` kills it at once; a limit
        belongs to whoever runs the worker, such as Kubernetes' startup probe.
        """
        if self._stopping:
            raise CoreError(STOPPING)
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._spawn(self._bind())
        self._heard = self._config.clock()
        self._send(Start(self._config.core))
        ready = await self._ready
        self._heard = self._config.clock()
        self._watchdog = loop.create_task(self._watch())
        return ready

    def _bind(self) -> str:
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="pagelane-"))  # mode 0700: others cannot connect
        except OSError as error:
            raise CoreError(
                f"its socket needs a temporary folder, and none can be made ({error}): set TMPDIR"
            ) from None
        path = self._directory / "core.sock"
        length = len(os.fsencode(path))
        if length > zmq.IPC_PATH_MAX_LEN:
            raise CoreError(
                f"the path of its socket, {path}, has {length} bytes, but a socket's path has at most "
                f"{zmq.IPC_PATH_MAX_LEN}: set TMPDIR to a folder with a path shorter by {length - zmq.IPC_PATH_MAX_LEN}"
            )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise CoreError(f"its socket {path} cannot be made ({error}): set TMPDIR to another folder") from None
        asyncio.get_running_loop().add_reader(int(self._socket.fd), self._on_socket)
        return f"ipc://{path}"

    def _spawn(self, address: str) -> None:
        # A session of its own: Ctrl-C in a terminal reaches the worker alone, which then drains and stops the core.
        command = [*self._config.command, address]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            raise CoreError(f"{command[0]} cannot be run as its process: {error}") from None
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @property
    def _serving(self) -> bool:
        ready = self._ready
        started = ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None
        return started and self._failure is None and not self._stopping

    def submit(self, submit: Submit) -> Stream:
        """Hand a request to the core. Its stream ends exactly once, by `end` or by `error`.

        By `error` at once unless the core serves: nothing but `Stop` may reach it before it is ready.
        """
        stream = Stream(submit.key)
        if not self._serving:
            stream.error = self._failure or (STOPPING if self._stopping else "the engine core is not running")
            return stream
        if not self._streams:
            self._busy_since = self._config.clock()
        self._streams[submit.key] = stream
        self._submits.append(submit)
        self._schedule_flush()
        return stream

    def cancel(self, key: int) -> None:
        """Stop a request; its stream gets nothing more. Does nothing if it has ended."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        stream.cancelled = True
        stream.wake()
        self._cancels.append(key)
        self._schedule_flush()

    def fail_streams(self, reason: str) -> None:
        """End every stream with `error`, and cancel what the core still runs."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.error = reason
            stream.wake()
        if streams and self._serving:
            self._cancels.extend(streams)
            self._schedule_flush()

    async def stop(self) -> None:
        """End the core. May be called at any time and more than once.

        A core that serves is asked first, and killed `stop_timeout_s` later. One that loads or is lost reads nothing,
        and is killed at once.
        """
        asked = self._serving
        self._stopping = True
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(CoreError(STOPPING))
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        self.fail_streams(STOPPING)
        if self._process is not None:
            await self._end_process(self._process, asked)
        self._close()

    async def _end_process(self, process: subprocess.Popen[bytes], asked: bool) -> None:
        if asked:
            self._send(Stop())
            await self._exit_within(self._config.stop_timeout_s)
        if process.poll() is None:
            process.kill()
            await self._exit_within(CORE_KILL_S)

    async def _exit_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)

    def _close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._socket is not None and self._context is not None:
            loop.remove_reader(int(self._socket.fd))
            self._socket.close()
            self._context.term()
            self._socket = self._context = None
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._socket is None or self._failure is not None:
            return
        message = Requests(self._submits, self._cancels)
        self._submits, self._cancels = [], []
        self._send(message)

    def _send(self, message: Start | Requests | Stop) -> None:
        self._outbox.append(self._encoder.encode(message))
        self._on_socket()

    def _on_socket(self) -> None:
        """Send and take whatever can be.

        The socket's file descriptor is edge-triggered and any call on the socket can use up the edge, also that of the
        other direction. So both are exhausted until the socket itself says that nothing is left to do.
        """
        while self._exchange():
            pass

    def _exchange(self) -> bool:
        """Send and take once; True if the socket can do more."""
        if self._socket is not None:
            self._send_outbox(self._socket)
        self._drain()
        if self._socket is None:
            return False
        wanted = zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0)
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & wanted)

    def _send_outbox(self, socket: "zmq.Socket[bytes]") -> None:
        with contextlib.suppress(zmq.Again):  # the core has not connected yet; the descriptor tells when it does
            while self._outbox:
                socket.send(self._outbox[0], zmq.NOBLOCK)
                self._outbox.popleft()
                # Connected: nobody needs the path any more, and a worker that is killed leaves nothing behind.
                self._remove_directory()

    def _drain(self) -> None:
        while self._socket is not None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard = self._config.clock()
            self._handle(frame)

    def _handle(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError as error:
            self._fail(f"the engine core sent a message that cannot be read: {error}")
            return
        match message:
            case StepOutput():
                self._take_step(message)
            case Heartbeat():
                self._take_stats(message.stats)
                self._check_progress(message.last_step_age_s)
            case Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case Failed():
                self._fail(message.reason)

    def _take_step(self, step: StepOutput) -> None:
        streams = self._streams
        woken: dict[int, Stream] = {}
        for key, token in zip(step.keys, memoryview(step.tokens).cast("i"), strict=True):
            stream = streams.get(key)
            if stream is not None:
                stream.tokens.append(token)
                stream.delivered += 1
                woken[key] = stream
        for end in step.finished:
            stream = streams.pop(end.key, None)
            if stream is not None:
                stream.end = end
                woken[end.key] = stream
        if step.events:
            self._listener.events(step.events)
        self._take_stats(step.stats)
        for stream in woken.values():
            stream.wake()

    def _take_stats(self, stats: Stats) -> None:
        self.stats = stats
        self._listener.stats(stats)

    def _check_progress(self, last_step_age_s: float) -> None:
        """The core talks, but does it make steps? An idle core's last step may be old: only time with work counts."""
        limit = self._config.core.step_timeout_s
        if self._streams and last_step_age_s > limit and self._heard - self._busy_since > limit:
            self._fail(f"the engine core has {self.running} requests and made no step for {last_step_age_s:.0f} s")

    async def _watch(self) -> None:
        limit = self._config.core.step_timeout_s
        while self._failure is None:
            await asyncio.sleep(min(1.0, limit / 4))
            silence = self._config.clock() - self._heard
            if silence > limit:
                self._on_socket()  # the loop itself may have been held up: what has come meanwhile counts
                silence = self._config.clock() - self._heard
            if silence > limit:
                self._fail(f"the engine core has said nothing for {silence:.1f} s (step_timeout_s is {limit:g})")

    def _on_exit(self) -> None:
        if self._process is None:
            return
        self._drain()  # its last words
        asyncio.get_running_loop().remove_reader(self._pidfd)
        code = self._process.wait()
        self._exited.set()
        if not self._stopping:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._fail(f"the engine core {how}")

    def _fail(self, reason: str) -> None:
        if self._failure is not None or self._stopping:
            return
        self._failure = reason
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(CoreError(reason))
            return
        self.fail_streams(reason)
        self._listener.failure(reason)
