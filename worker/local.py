"""A Dynamo frontend and workers on this machine: what `pagelane up` runs and the contract tests drive."""

import asyncio
import contextlib
import http.client
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec

from worker.broker import EventBroker
from worker.config import MAX_SYSTEM_PORT
from worker.process import Child, ChildConfig, start_child

LOOPBACK = "127.0.0.1"
PORTS = range(20000, MAX_SYSTEM_PORT + 1)
"""Where free ports are looked for: what Dynamo takes as a system port; ephemeral ports start above."""

MARKER = "PAGELANE_STACK"
"""Variable that every process of a stack inherits, with the stack's directory as its value."""

UNLISTED_S = 20.0
"""How long the frontend may take to list a model once it sees the workers; it needs well under a second."""

_POLL_S = 0.05
_WORKER_ID = re.compile(rb'worker_id="([0-9a-f]+)"')


class LocalError(Exception):
    """The stack cannot start or go on. The text is one line for the operator."""


class PortTaken(LocalError):
    """A port that was asked for by number is in use."""


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """What a stack is made of. Times in seconds."""

    worker_flags: Sequence[str] = ()
    """Command line of every worker."""
    workers: int = 1
    cards: Sequence[str] = ()
    """GPUs as CUDA_VISIBLE_DEVICES names them; the workers take turns. Empty leaves the choice to CUDA."""
    host: str = LOOPBACK
    """Address that the frontend listens on. Everything else stays on loopback."""
    port: int | None = None
    """HTTP port of the frontend; None takes a free one."""
    router_mode: str = "kv"
    migration_limit: int = 3
    frontend_flags: Sequence[str] = ()
    worker_command: Sequence[str] = (sys.executable, "-m", "worker")
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for all processes, over those of this one."""
    on_line: Callable[[str, str], None] = lambda name, line: None
    """Called with a process's name and each of its log lines."""
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 35.0
    """How long a worker may drain; above Dynamo's own deadline of 30."""


@dataclass(eq=False)
class LocalWorker:
    """A worker of the stack and where its /health and /metrics are."""

    child: Child
    system_port: int
    instance_id: int = 0
    """Dynamo's number of the worker, 0 until it serves. Workers' metrics show it in hex, frontends' in decimal."""

    @property
    def system_url(self) -> str:
        return f"http://{LOOPBACK}:{self.system_port}"


class _Instance(msgspec.Struct):
    endpoint: str
    instance_id: int


class _Health(msgspec.Struct):
    instances: list[_Instance] = []


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class LocalStack:
    """One frontend and any number of workers, with a discovery directory of their own.

    All methods belong to one event loop. `stop` may be called at any time and leaves no process and no file behind.
    """

    def __init__(self, config: LocalConfig) -> None:
        self.config = config
        self.workers: list[LocalWorker] = []
        self.frontend: Child | None = None
        self.exits: asyncio.Queue[Child] = asyncio.Queue()
        """Processes that have ended, in order, those included that were told to."""
        self.port = config.port or 0
        self.model = ""
        """Name of the served model, once there is one."""
        self._directory: Path | None = None
        self._broker: EventBroker | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._started = 0
        self._unlisted = False
        """True if the frontend saw every worker and yet listed no model, when it was last asked."""

    @property
    def url(self) -> str:
        """Base URL of the frontend."""
        host = LOOPBACK if self.config.host in ("0.0.0.0", "::") else self.config.host  # noqa: S104 - only compared
        return f"http://{host}:{self.port}"

    @property
    def directory(self) -> Path:
        """The stack's temporary directory, from `start` on."""
        if self._directory is None:
            raise LocalError("the stack has not been started")
        return self._directory

    async def start(self) -> None:
        """Start everything and wait until the frontend routes to every worker.

        Raises `PortTaken` before anything is started, and `LocalError` when a process ends or the time is over; `stop`
        then still has to be called.
        """
        self.port = self.port or free_port(PORTS)
        check_port(self.config.host, self.port)
        self._directory = Path(tempfile.mkdtemp(prefix="pagelane-local-"))
        self._broker = EventBroker(LOOPBACK)
        await self.start_frontend()
        for _ in range(self.config.workers):
            await self.add_worker(wait=False)
        await self.wait_ready()

    async def start_frontend(self) -> None:
        """Start the frontend, on the same port every time."""
        command = [
            *(sys.executable, "-m", "dynamo.frontend"),
            *("--http-host", self.config.host, "--http-port", str(self.port)),
            *("--router-mode", self.config.router_mode, "--migration-limit", str(self.config.migration_limit)),
            *self.config.frontend_flags,
        ]
        # The frontend keeps copies of the workers' model cards under its home directory: they go with the stack.
        environment = self.environment() | {"HOME": str(self.directory)}
        self.frontend = await self._start("frontend", command, environment)

    async def add_worker(
        self, *flags: str, environment: Mapping[str, str] | None = None, wait: bool = True
    ) -> LocalWorker:
        """Start one more worker with `flags` after those of the configuration; `wait` until requests can reach it."""
        port = free_port(PORTS)
        variables = self.environment() | {"DYN_SYSTEM_HOST": LOOPBACK, "DYN_SYSTEM_PORT": str(port)}
        command = [*self.config.worker_command, *self.config.worker_flags, *flags]
        if self.config.cards:
            variables["CUDA_VISIBLE_DEVICES"] = self.config.cards[self._started % len(self.config.cards)]
        name = f"worker {self._started}"
        self._started += 1
        worker = LocalWorker(await self._start(name, command, variables | dict(environment or {})), port)
        self.workers.append(worker)
        if wait:
            await self.wait_ready()
        return worker

    async def remove_worker(self, worker: LocalWorker, *, kill: bool = False) -> int:
        """End a worker, by SIGTERM and its drain or by SIGKILL. Returns its exit code."""
        self.workers.remove(worker)
        if kill:
            worker.child.kill()
            return await worker.child.wait()
        return await worker.child.stop(self.config.stop_timeout_s)

    async def restart_frontend(self) -> None:
        """End the frontend and start it again on its port; wait until it routes to every worker."""
        if self.frontend is not None:
            await self.frontend.stop(self.config.stop_timeout_s)
        await self.start_frontend()
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Wait until the frontend lists a model and every living worker. Raises `LocalError` if one ends meanwhile."""
        deadline = asyncio.get_running_loop().time() + self.config.start_timeout_s
        unlisted_since: float | None = None
        while not await self._routed():
            now = asyncio.get_running_loop().time()
            unlisted_since = (unlisted_since or now) if self._unlisted else None
            if unlisted_since is not None and now - unlisted_since > UNLISTED_S:
                raise LocalError(
                    "every worker serves, but the frontend does not list the model: it cannot use the model's "
                    "tokenizer.json, tokenizer_config.json or chat template (its own lines above may say why)"
                )
            for child in self.children():
                if not child.alive:
                    await child.wait()
                    raise LocalError(child.last_words)
            if asyncio.get_running_loop().time() > deadline:
                raise LocalError(f"not ready after {self.config.start_timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    async def _routed(self) -> bool:
        health = await get(f"{self.url}/health")
        models = await get(f"{self.url}/v1/models")
        if health is None or models is None:
            return False
        names = msgspec.json.decode(models, type=_Models).data
        instances = msgspec.json.decode(health, type=_Health).instances
        self.model = names[0].id if names else ""
        self._unlisted = False
        serving = {instance.instance_id for instance in instances if instance.endpoint == "generate"}
        if not serving.issuperset([await self._identify(worker) for worker in self.workers]):
            return False
        self._unlisted = not names
        return bool(names)

    async def _identify(self, worker: LocalWorker) -> int:
        if not worker.instance_id and await get(f"{worker.system_url}/health") is not None:
            label = _WORKER_ID.search(await get(f"{worker.system_url}/metrics") or b"")
            worker.instance_id = int(label[1], 16) if label else 0
        return worker.instance_id

    def children(self) -> list[Child]:
        """The frontend and the workers."""
        return [*([self.frontend] if self.frontend else []), *(worker.child for worker in self.workers)]

    async def stop(self) -> list[int]:
        """End the workers, which finish their running requests, then the frontend; remove the directory.

        Returns the ids of processes that outlived this and had to be killed: none, if all is well.
        """
        try:
            await asyncio.gather(*(worker.child.stop(self.config.stop_timeout_s) for worker in self.workers))
            if self.frontend is not None:
                await self.frontend.stop(5.0)
        finally:
            left = self.processes()
            self.kill()
        await asyncio.gather(*(child.wait() for child in self.children()))
        for watcher in self._watchers:
            watcher.cancel()
        if self._broker is not None:
            self._broker.close()
            self._broker = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        return left

    def kill(self) -> None:
        """SIGKILL to every process of the stack, now, orphans of killed workers included."""
        for child in self.children():
            child.kill()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Process ids that carry the stack's marker in their environment: its children and everything they started."""
        if self._directory is None:
            return []
        mark = f"{MARKER}={self._directory}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def environment(self) -> dict[str, str]:
        """Variables of every process of the stack."""
        return {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.directory / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": LOOPBACK,
            "DYN_TCP_RESPONSE_STREAM_HOST": response_stream_host(metadata.version("ai-dynamo")),
            "DYN_EVENT_PLANE_HOST": LOOPBACK,
            **({"DYN_ZMQ_BROKER_URL": self._broker.url} if self._broker is not None else {}),
            # An error of a streamed request becomes a status code only if the frontend looks before it sends 200.
            "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "50",
            "DYN_LOGGING_JSONL": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.directory),
            MARKER: str(self.directory),
            **self.config.environment,
        }

    async def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        child = await start_child(ChildConfig(name, command, environment, self.config.on_line))
        watcher = asyncio.create_task(self._watch(child))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return child

    async def _watch(self, child: Child) -> None:
        await child.wait()
        self.exits.put_nowait(child)


def response_stream_host(version: str) -> str:
    """What DYN_TCP_RESPONSE_STREAM_HOST must hold: up to ai-dynamo 1.4 the name of an interface, later its address."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return "lo" if (major, minor) < (1, 5) else LOOPBACK


def check_port(host: str, port: int) -> None:
    """Raise `PortTaken` if nothing can listen on `host`:`port`."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise PortTaken(f"cannot listen on {host}:{port} ({reason}): choose another with --port") from None


def free_port(ports: range) -> int:
    """A port of `ports` on loopback that is not in use, drawn at random so that two stacks seldom race for one."""
    for port in random.SystemRandom().sample(ports, 100):
        with contextlib.suppress(PortTaken):
            check_port(LOOPBACK, port)
            return port
    raise LocalError(f"found no free port between {ports.start} and {ports.stop - 1}")


async def get(url: str) -> bytes | None:
    """Body of a GET that answers 200, else None."""
    return await asyncio.to_thread(_get, url)


def _get(url: str) -> bytes | None:
    address, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", f"/{path}")
        response = connection.getresponse()
        body = response.read()
        return body if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
