"""The worker's end of the socket to its engine core: starts the process, sends requests, hands out what comes back.

One message a step crosses in each direction. Tokens of a step are appended to their streams, and a stream that waits is
woken once, however many of its tokens have come.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engine.config import CoreConfig
from engine.messages import (
    MAX_MESSAGE_BYTES,
    Drain,
    Dropped,
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
from worker.blackbox import BlackBox
from worker.config import CORE_KILL_S, CORE_STOP_S
from worker.core_process import CoreProcess
from worker.endpoint import Endpoint, EndpointError
from worker.outbox import Outbox, broken
from worker.stream import Stream

CORE_COMMAND = (sys.executable, "-m", "engine")

logger = logging.getLogger("pagelane.client")

STACKS_S = 0.5
"""How long a core that makes no steps may take to write its stacks to the log, in seconds."""
WATCH_S = 0.25
"""Longest time between two looks at the core's silence, in seconds."""

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
    record_directory: str | None = None
    """Where the last steps of a lost core are saved; None is the system's temporary directory."""
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
        self._outbox = Outbox()
        self._flush_scheduled = False
        self._failure: str | None = None
        self._stopping = False
        self._heard = 0.0
        self._busy_since = 0.0
        self._ready: asyncio.Future[Ready] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._process: CoreProcess | None = None
        self._black_box: BlackBox | None = None
        self._autopsy: asyncio.Task[None] | None = None
        self._endpoint: Endpoint | None = None
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
        self._black_box = BlackBox(self._config.record_directory)
        try:
            self._endpoint = Endpoint(self._on_frame)
            self._endpoint.listen(self._spawn(self._endpoint.address, self._black_box.descriptor))
        except EndpointError as error:
            raise CoreError(str(error)) from None
        self._heard = self._config.clock()
        self._send(Start(self._config.core, self._black_box.descriptor))
        ready = await self._ready
        self._heard = self._config.clock()
        self._watchdog = loop.create_task(self._watch())
        return ready

    def _spawn(self, address: str, recorder: int) -> int:
        command = [*self._config.command, address]
        try:
            self._process = CoreProcess(command, (recorder,), self._on_exit)
        except OSError as error:
            raise CoreError(f"{command[0]} cannot be run as its process: {error}") from None
        return self._process.pid

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
        stream.end = self._outbox.submit(submit)
        if stream.end is not None:
            return stream
        if not self._streams:
            self._busy_since = self._config.clock()
        self._streams[submit.key] = stream
        self._schedule_flush()
        return stream

    def cancel(self, key: int) -> None:
        """Stop a request; its stream gets nothing more. Does nothing if it has ended."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        stream.cancelled = True
        stream.wake()
        self._outbox.cancel(key)
        self._schedule_flush()

    def fail_streams(self, reason: str) -> None:
        """End every stream with `error`, and cancel what the core still runs."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.error = reason
            stream.wake()
        if streams and self._serving:
            for key in streams:
                self._outbox.cancel(key)
            self._schedule_flush()

    def drain(self) -> None:
        """Have the core admit nothing more: what waits there is refused, what runs goes on."""
        if self._serving:
            self._flush()
            self._send(Drain())

    def abandon(self) -> None:
        """Have `start` raise `CoreError` now. `stop` must follow."""
        self._stopping = True
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(CoreError(STOPPING))

    async def stop(self) -> None:
        """End the core. May be called at any time and more than once.

        A core that serves is asked first, and killed `stop_timeout_s` later. One that loads or is lost reads nothing,
        and is killed at once.
        """
        asked = self._serving
        self.abandon()
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        self.fail_streams(STOPPING)
        if self._autopsy is not None:
            await self._autopsy
        if self._process is not None:
            await self._end_process(self._process, asked)
        self._close()

    async def _end_process(self, process: CoreProcess, asked: bool) -> None:
        if asked:
            self._send(Stop())
            await process.exit_within(self._config.stop_timeout_s)
        if process.alive:
            process.kill()
            await process.exit_within(CORE_KILL_S)

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if self._black_box is not None:
            self._black_box.close()
            self._black_box = None

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            asyncio.get_running_loop().call_soon(self._flush)
            self._flush_scheduled = True  # only now: a flush that is waited for and never comes would be the last

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._failure is None:
            for message in self._outbox.take():
                self._send(message)

    def _send(self, message: Start | Requests | Drain | Stop) -> None:
        if self._endpoint is not None:
            self._endpoint.send(self._encoder.encode(message))

    def _on_frame(self, frame: bytes) -> None:
        """Act on a message. Whatever a broken core sends, its requests end, and nothing is raised."""
        self._heard = self._config.clock()
        try:
            message = self._decode(frame)
        except (ValueError, RecursionError, MemoryError) as error:
            self._fail(f"the engine core sent a message of {len(frame)} bytes that cannot be read: {error}")
        else:
            self._handle(message)

    def _decode(self, frame: bytes) -> FromCore:
        if len(frame) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has at most {MAX_MESSAGE_BYTES} bytes")
        message = self._decoder.decode(frame)
        if isinstance(message, StepOutput) and len(message.tokens) != 4 * len(message.keys):
            raise ValueError(f"{len(message.keys)} keys came with {len(message.tokens)} bytes of tokens")
        return message

    def _handle(self, message: FromCore) -> None:
        match message:
            case StepOutput():
                self._take_step(message)
            case Heartbeat():
                self._take_stats(message.stats)
                self._check_progress(message.last_step_age_s)
            case Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case Dropped():
                self._end_unanswered(message.reason)
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
        self._take_rarities(step)
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

    def _take_rarities(self, step: StepOutput) -> None:
        """What most steps have nothing of. None of it is worth waking a stream."""
        for key, cached in step.cached.items():
            if key in self._streams:
                self._streams[key].cached_tokens = cached
        for key, logprobs in step.logprobs.items():
            if key in self._streams:
                self._streams[key].add_logprobs(logprobs)
        for key, logprobs in step.prompt_logprobs.items():
            if key in self._streams:
                self._streams[key].add_prompt_logprobs(logprobs)

    def _end_unanswered(self, reason: str) -> None:
        """The core could not read a message: requests of which it has said nothing may have stood in it."""
        logger.error("the engine core has dropped a message: %s", reason)
        for stream in [stream for stream in self._streams.values() if not stream.delivered]:
            del self._streams[stream.key]
            stream.end = broken(stream.key, f"the engine core could not read a message: {reason}")
            stream.wake()
            self._outbox.cancel(stream.key)
        self._schedule_flush()

    def _take_stats(self, stats: Stats) -> None:
        self.stats = stats
        self._listener.stats(stats)

    def _check_progress(self, last_step_age_s: float) -> None:
        """The core talks, but does it make steps? An idle core's last step may be old: only time with work counts."""
        limit = self._config.core.step_timeout_s
        if self._streams and last_step_age_s > limit and self._heard - self._busy_since > limit:
            self._fail(
                f"the engine core has {self.running} requests and made no step for {last_step_age_s:.0f} s",
                wedged=True,
            )

    async def _watch(self) -> None:
        """Look for silence. Time in which this process did not run, or did not get to look, is no silence of the core:
        a whole machine that was suspended goes on.
        """
        clock, limit = self._config.clock, self._config.core.step_timeout_s
        period = min(WATCH_S, limit / 4)
        while self._failure is None:
            slept = clock()
            await asyncio.sleep(period)
            self._heard += max(0.0, clock() - slept - 2 * period)
            silence = clock() - self._heard
            if silence > limit:
                if self._endpoint is not None:
                    self._endpoint.exchange()  # the loop itself may have been held up: what has come meanwhile counts
                silence = clock() - self._heard
            if silence > limit:
                self._fail(
                    f"the engine core has said nothing for {silence:.1f} s (step_timeout_s is {limit:g})", wedged=True
                )

    def _on_exit(self, how: str) -> None:
        if self._endpoint is not None:
            self._endpoint.drain()  # its last words
        if not self._stopping:
            self._fail(f"the engine core {how}")

    def _fail(self, reason: str, wedged: bool = False) -> None:
        if self._failure is not None or self._stopping:
            return
        # Part of it may be what a broken core sent: it must stay one line of the log.
        reason = " ".join(reason.split())
        self._failure = reason
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(CoreError(reason))
            return
        self._autopsy = asyncio.get_running_loop().create_task(self._examine(wedged))
        self.fail_streams(reason)
        self._listener.failure(reason)

    async def _examine(self, wedged: bool) -> None:
        """Keep what a lost core leaves: where its threads stand, if it still runs but does not go on, and its last
        steps. Then it is of no more use.
        """
        process = self._process
        if process is None or self._black_box is None:
            return
        if wedged and process.alive:
            logger.error("the engine core (process %d) is asked for the stacks of its threads and killed", process.pid)
            process.send(signal.SIGUSR1)
            await process.exit_within(STACKS_S)
            process.kill()
        self._black_box.save(process.pid)
