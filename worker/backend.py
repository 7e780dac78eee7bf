"""Dynamo's `LLMEngine` over an engine core in a process of its own."""

import asyncio
import contextlib
import itertools
import logging
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import is_probe
from dynamo.common.backend.publisher import PushSource
from dynamo.common.backend.worker import WorkerConfig as DynamoConfig
from dynamo.llm.exceptions import DynamoException, EngineShutdown, InvalidArgument, Unknown

from engine.messages import Finished, Ready, Sampling, Submit
from kv.hashing import Blake2bHasher
from worker import convert, metrics
from worker.alive import LoopWatch
from worker.chunks import Chunk, final_chunk
from worker.client import CORE_COMMAND, ClientConfig, CoreClient, CoreError, Listener
from worker.config import ConfigError, WorkerConfig
from worker.flags import load_config
from worker.model import generation_defaults
from worker.publish import RANK, EventRelay, LoadReporter
from worker.registration import (
    LEASE_S,
    LEASED,
    PAGE_SIZE_KEY,
    RegistrationWatch,
    dynamo_config,
    other_page_size,
    registration_lost,
    resolved,
    served_name,
)
from worker.running import Running, cancelled

logger = logging.getLogger("pagelane")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the backend takes from outside; tests replace it."""

    core_command: Sequence[str] = CORE_COMMAND
    clock: Callable[[], float] = time.monotonic
    rng: Callable[[], random.Random] = random.SystemRandom
    end_process: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    """Called once when this worker cannot go on: Dynamo's Worker owns SIGTERM and leaves discovery on it."""
    watch: RegistrationWatch = field(default_factory=RegistrationWatch)
    loop_limit_s: float = LEASE_S
    """How long the event loop may stand still: a worker that does for longer has lost its registration."""


class Backend(LLMEngine):  # type: ignore[misc]  # Dynamo ships no types
    """One worker: requests in, chunks out, an engine core behind it. `config.model` is a directory (see `resolved`).

    Dynamo's Worker calls `start`, then `generate` for every request, and `cleanup` at the end; see
    `dynamo/common/backend/engine.py` for the contract.
    """

    def __init__(self, config: WorkerConfig, surroundings: Surroundings | None = None) -> None:
        self.config = config
        self._around = surroundings or Surroundings()
        self._random = self._around.rng()
        self._keys = itertools.count(1)
        self._running: dict[str, list[Running]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = False
        self._draining = False
        self._failure: str | None = None
        self._client: CoreClient | None = None
        self._ready: Ready | None = None
        self._served: convert.ServedModel | None = None
        self._hasher = Blake2bHasher(config.kv_page_size)
        self._relay = EventRelay(config.kv_page_size, config.enable_kv_events)
        self._load: LoadReporter | None = None
        self._worker_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load_timer: asyncio.Task[None] | None = None
        self._registration_watch: asyncio.Task[None] | None = None
        self._loop_watch: LoopWatch | None = None
        self._observed: metrics.RequestMetrics | None = None
        self._registry: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["Backend", DynamoConfig]:
        """Read flags, YAML file and environment, and find the model.

        Raises `ConfigError` or `ModelError`, ValueErrors, with one line for the operator.
        """
        config = await asyncio.to_thread(resolved, load_config(argv or [], os.environ))
        return cls(config), dynamo_config(config)

    @property
    def failure(self) -> str | None:
        """Why this worker cannot serve, or None."""
        return self._client.failure if self._failure is None and self._client is not None else self._failure

    @property
    def leaving(self) -> bool:
        """True once the process has been told to end."""
        return self._leaving

    def leave(self) -> None:
        """The process has been told to end; for signal handlers. A load ends now; what runs is `cleanup`'s business.

        Dynamo itself looks at a signal only when `start` has returned.
        """
        self._leaving = True
        if self._loop_watch is not None and self.failure is None:
            self._failure = self._loop_watch.verdict()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._prepare_to_leave)

    def _prepare_to_leave(self) -> None:
        self._stop_loop_watch()  # Dynamo's deadline holds now
        if self._ready is None and self._client is not None:
            self._client.abandon()

    def _stop_loop_watch(self) -> None:
        if self._loop_watch is not None:
            self._loop_watch.stop()
            self._loop_watch = None

    async def start(self, worker_id: int) -> EngineConfig:
        """Start the engine core and wait until it can serve. Raises `EngineShutdown` if it cannot."""
        self._worker_id = worker_id
        self._loop = asyncio.get_running_loop()
        try:
            defaults = generation_defaults(Path(self.config.model))
        except ConfigError as error:
            self._failure = str(error)
            raise EngineShutdown(self._failure) from None
        listener = Listener(self._relay.publish, self._report_load, self._on_failure)
        client = ClientConfig(
            self.config.core(),
            self._around.core_command,
            record_directory=self.config.step_record_dir,
            clock=self._around.clock,
        )
        self._client = CoreClient(client, listener)
        try:
            if self._leaving:
                self._client.abandon()
            ready = self._checked(await self._client.start())
        except CoreError as error:
            if self._leaving:
                raise EngineShutdown("this worker was told to end while it was loading") from None
            self._failure = f"the engine core cannot start: {error}"
            raise EngineShutdown(self._failure) from None
        self._ready = ready
        self._served = self._model(ready, defaults)
        self._load = LoadReporter(ready.usable_pages, self.config.load_publish_interval_s, self._around.clock)
        self._load_timer = asyncio.get_running_loop().create_task(self._report_regularly())
        self._loop_watch = None if self._leaving else LoopWatch(self._around.loop_limit_s)
        sources = metrics.Sources(
            lambda: self._live_client().stats,
            ready,
            self._published,
            lambda: len(asyncio.all_tasks(self._loop)),
            lambda: self._leaving,
        )
        self._registry, self._observed = metrics.build_registry(sources)
        logger.info("worker %x: %s", worker_id, ready.load_line)
        return self._registration(ready)

    def _model(self, ready: Ready, defaults: Sampling) -> convert.ServedModel:
        honoured = frozenset(ready.parameters)
        sampling, unserved = convert.without_unhonoured(defaults, honoured)
        for name in unserved:
            logger.warning("generation_config.json asks for %s, which this device does not serve: it is left out", name)
        return convert.ServedModel(
            ready.vocab_size, ready.servable_length, self.config.default_max_tokens, sampling, honoured
        )

    def _checked(self, ready: Ready) -> Ready:
        if ready.hasher != self._hasher.fingerprint:
            raise CoreError(
                f"its block hasher is {ready.hasher}, the worker's is {self._hasher.fingerprint}: both must come from "
                "the same installation"
            )
        return ready

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Refuse to serve beside a worker with another page size: the router could not compare their block hashes."""
        other = await other_page_size(endpoint, self.config.kv_page_size)
        if other is not None:
            self._failure = (
                f"kv_page_size is {self.config.kv_page_size}, but a worker with pages of {other} tokens already serves "
                f"{self.config.namespace}.{self.config.component}.{self.config.endpoint}: use the same page size, or "
                "another namespace or component"
            )
            raise EngineShutdown(self._failure)
        if self.config.discovery_backend in LEASED:
            watching = self._watch_registration(await endpoint.client())
            self._registration_watch = asyncio.get_running_loop().create_task(watching)

    async def _watch_registration(self, client: Any) -> None:
        reason = await registration_lost(client, self._worker_id, self._around.watch)
        if not self._leaving and self.failure is None:
            self._failure = f"{reason}: nobody would send it requests"
            self._on_failure(self._failure)

    def _registration(self, ready: Ready) -> EngineConfig:
        return EngineConfig(
            model=self.config.model,
            served_model_name=self.config.served_model_name or served_name(self.config.model),
            runtime_data={PAGE_SIZE_KEY: str(ready.page_size)},
            llm=LlmRegistration(
                context_length=ready.servable_length,
                kv_cache_block_size=ready.page_size,
                total_kv_blocks=ready.usable_pages,
                max_num_seqs=self.config.max_bucket,
                max_num_batched_tokens=self.config.max_step_tokens,
                data_parallel_size=1,
                data_parallel_start_rank=RANK,
            ),
        )

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        """Serve one request: chunks with new tokens, then exactly one terminal chunk.

        Raises `InvalidArgument` for what the client can mend, `CannotConnect` if the lane has no room (the frontend may
        try another worker), `EngineShutdown` if this worker goes away, and `Unknown` for what is our fault.
        """
        try:
            if is_probe(request):
                yield self._probe_chunk()
                return
            arrived = self._around.clock()
            submit = self._admitted(request, context)
            if context.is_stopped():
                self._observations().finished.labels("cancelled").inc()
                yield final_chunk([], cancelled(submit, 0, 0))
                return
            running = self._enter(submit, context, arrived)
            try:
                while not running.ended:
                    chunk = running.next_chunk(await running.stream.take(), draining=self._draining)
                    if chunk is not None:
                        yield await running.with_prompt_logprobs(chunk)
            except BaseException as cause:  # GeneratorExit and CancelledError: the consumer has closed the stream
                running.end("error" if isinstance(cause, Exception) else "cancelled")
                raise
            finally:
                self._on_loop(lambda: self._leave(running))
        except DynamoException:
            raise
        except Exception as error:  # a ValueError or TypeError would reach the client as if it were its own fault
            logger.exception("request %s: internal error", context.id())
            raise Unknown(f"internal error: {type(error).__name__}") from error

    def _admitted(self, request: dict[str, Any], context: Any) -> Submit:
        """The request, checked, with its block hashes."""
        request_id = str(context.id())
        observed = self._observations()
        try:
            self._refuse_if_going()
            submit = convert.to_submit(
                request, next(self._keys), request_id, self._served_model(), lambda: self._random.getrandbits(64)
            )
            return self._hashed(submit)
        except InvalidArgument as error:
            observed.refused.labels("invalid").inc()
            logger.info("request %s: refused: %s", request_id, error)
            raise
        except EngineShutdown:
            observed.refused.labels("shutdown").inc()
            raise
        except Exception:
            observed.finished.labels("error").inc()
            raise

    def _hashed(self, submit: Submit) -> Submit:
        """With the block hashes. On the event loop: 32k tokens take 1.1 ms, and a thread would hold the GIL as long."""
        return msgspec.structs.replace(
            submit, block_hashes=b"".join(self._hasher.chain(submit.prompt, submit.cache_salt))
        )

    def _enter(self, submit: Submit, context: Any, arrived: float) -> Running:
        stream = self._live_client().submit(submit)
        running = Running(submit, context, stream, self._observations(), self._around.clock, arrived)
        self._running.setdefault(submit.request_id, []).append(running)
        self._idle.clear()
        return running

    def _on_loop(self, act: Callable[[], None]) -> None:
        """Do `act` on the event loop, now if this is its thread.

        A stream that Dynamo drops is closed by whatever thread lets go of it last, and on Dynamo's own no loop runs.
        """
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop or self._loop is None:
            act()
        else:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it every request
                self._loop.call_soon_threadsafe(act)

    def _leave(self, running: Running) -> None:
        """Forget a request, and have the core forget it too if it has not ended there: the client may just be gone."""
        self._live_client().cancel(running.submit.key)
        siblings = self._running[running.submit.request_id]
        siblings.remove(running)
        if not siblings:
            del self._running[running.submit.request_id]
        if not self._running:
            self._idle.set()

    async def abort(self, context: Any) -> None:
        """The client has gone: its stream ends now. Requests may share an id, so the context decides."""
        for running in self._running.get(str(context.id()), ()):
            if running.context.is_stopped():
                self._live_client().cancel(running.submit.key)

    async def cleanup(self) -> None:
        """Stop admission, let running requests end for up to `drain_timeout_s`, fail the rest, end the core.

        What waits in the core fails at once, so that it can start elsewhere now and not after the drain.

        May be called on a backend that never started, and more than once.
        """
        self._draining = True
        self._stop_loop_watch()
        if self._registration_watch is not None:
            self._registration_watch.cancel()
            self._registration_watch = None
        if self._client is None:
            return
        self._client.drain()
        try:
            await asyncio.wait_for(self._idle.wait(), self.config.drain_timeout_s)
        except TimeoutError:
            logger.warning("%d requests are still running and fail now", sum(map(len, self._running.values())))
        self._client.fail_streams("this worker shuts down")
        await asyncio.sleep(0)
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None
        await self._client.stop()

    async def kv_event_sources(self) -> list[PushSource]:
        """One source, for the one rank."""
        return [PushSource(on_ready=self._relay.attach, dp_rank=RANK)] if self.config.enable_kv_events else []

    def component_metrics_dp_ranks(self) -> list[int]:
        """The one rank."""
        return [RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Take Dynamo's publisher of load and report at once."""
        if self._load is not None:
            self._load.attach(publisher)
            self._report_load(self._live_client().stats)

    async def register_prometheus(self, metrics_handle: Any) -> None:
        """Add the `pagelane_*` metrics to Dynamo's /metrics page."""
        if self._registry is not None:
            metrics.register(metrics_handle, self._registry)

    def _probe_chunk(self) -> Chunk:
        self._refuse_if_going()
        if self._leaving:
            raise EngineShutdown("this worker was told to end")
        return final_chunk([], Finished(0, "stop", 1, 0, 0))

    def _refuse_if_going(self) -> None:
        if self.failure is not None:
            raise EngineShutdown(self.failure)
        if self._draining or self._client is None:
            raise EngineShutdown("this worker shuts down" if self._draining else "this worker has not started")

    def _on_failure(self, reason: str) -> None:
        logger.error("%s: this worker ends", reason)
        self._around.end_process()

    def _report_load(self, stats: Any) -> None:
        if self._load is not None:
            self._load.report(stats)

    async def _report_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.config.load_publish_interval_s)
            self._report_load(self._live_client().stats)

    def _published(self) -> tuple[int, int, int]:
        return self._relay.stored_blocks, self._relay.removed_blocks, self._relay.errors

    def _live_client(self) -> CoreClient:
        if self._client is None:
            raise EngineShutdown("this worker has not started")
        return self._client

    def _served_model(self) -> convert.ServedModel:
        if self._served is None:
            raise EngineShutdown("this worker has not started")
        return self._served

    def _observations(self) -> metrics.RequestMetrics:
        if self._observed is None:
            raise EngineShutdown("this worker has not started")
        return self._observed
