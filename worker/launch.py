"""`pagelane up`: a Dynamo frontend and workers on this machine, with one readable log, until Ctrl-C."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from worker.config import ConfigError, WorkerConfig
from worker.flags import HelpRequested, help_text, load_config
from worker.local import LOOPBACK, LocalConfig, LocalError, LocalStack, PortTaken, check_port
from worker.process import REASON, Child, ChildConfig, start_child

USAGE_ERROR = 2
IMPORT_STOP_S = 2.0
"""How long an import may take to remove what it has written, in seconds."""
_GPUS = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver has a folder for each GPU."""
ROUTER_MODES = ("kv", "round-robin", "random", "least-loaded", "power-of-two")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What `pagelane up` was asked for."""

    workers: int
    port: int
    host: str
    router_mode: str
    worker_flags: Sequence[str]
    """What is left of the command line: flags of `python -m worker`."""
    worker: WorkerConfig
    """The same, read."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> UpConfig:
    """Read the command line. Raises `ConfigError` for anything that launcher or worker would refuse."""
    parser = _Parser("pagelane up", add_help=False, allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--router-mode", choices=ROUTER_MODES, default="kv")
    known, flags = parser.parse_known_args(list(argv))
    if known.workers < 1:
        raise ConfigError(f"--workers is {known.workers}, but must be at least 1")
    if not 1 <= known.port <= 65535:
        raise ConfigError(f"--port is {known.port}, but must be between 1 and 65535")
    worker = load_config(flags, environ)
    return UpConfig(known.workers, known.port, known.host, known.router_mode, flags, worker)


def usage() -> str:
    """Help of `pagelane up`: its own flags, then the worker's."""
    own = (
        "usage: pagelane up --config FILE [--workers N] [--port P] [--host H] [--router-mode MODE] [--KEY VALUE ...]",
        "",
        "Serve a model on this machine: a Dynamo frontend and N workers, until Ctrl-C.",
        "",
        "  --workers N (default 1)",
        "      Workers to start. They share the machine's cores, unless --threads says how many each takes, and get a",
        "      GPU each of those that CUDA_VISIBLE_DEVICES names, or of all.",
        "  --port P (default 8000), --host H (default 127.0.0.1)",
        "      Where the OpenAI API listens. Everything else stays on loopback, on ports that are free.",
        f"  --router-mode MODE ({', '.join(ROUTER_MODES)}; default kv)",
        "      How the frontend chooses a worker; kv sends a request where its prefix already lies.",
        "",
        "A worker that dies is reported and not restarted; the rest serve on, and the last one's end ends all.",
        "DYN_LOG sets the level of the processes' logs. Every flag of a worker passes through:",
    )
    mark = "\n  --config FILE\n"
    return "\n".join(own) + "\n" + mark + help_text().partition(mark)[2]


def share_cores(config: UpConfig, cores: int) -> Sequence[str]:
    """The workers' flags, with an equal share of `cores` for each where the user named no number of threads."""
    if config.workers == 1 or config.worker.threads is not None:
        return config.worker_flags
    return [*config.worker_flags, "--threads", str(max(1, cores // config.workers))]


def visible_cards(environ: Mapping[str, str], driver: Path = _GPUS) -> Sequence[str]:
    """The GPUs that workers may use, each as CUDA_VISIBLE_DEVICES would name it alone."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [card.strip() for card in named.split(",") if card.strip()]
    return [str(number) for number in range(len(list(driver.iterdir())))] if driver.is_dir() else []


def share_cards(config: UpConfig, cards: Sequence[str]) -> Sequence[str]:
    """The GPU of each worker in turn. Raises `ConfigError` if two that must have a GPU would get the same one."""
    if config.worker.device == "cpu" or config.workers == 1:
        return ()
    if config.worker.device == "cuda" and 0 < len(cards) < config.workers:
        raise ConfigError(
            f"--workers is {config.workers}, but this machine offers {len(cards)} GPU{'s' if len(cards) > 1 else ''} "
            f"(CUDA_VISIBLE_DEVICES or the driver's list) and each worker takes one: lower --workers to {len(cards)}"
        )
    return cards


def curl_line(url: str, model: str) -> str:
    """A command to paste that asks the model something."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "temperature": 0, "max_tokens": 64})
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def print_line(name: str, line: str) -> None:
    """One line of the log, behind the name of the process that wrote it."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{name:<9} | {line}\n")
        sys.stdout.flush()


class Launcher:
    """Runs one stack from start to stop and says what happens to it."""

    def __init__(self, config: UpConfig) -> None:
        cores = len(os.sched_getaffinity(0))
        self._config = config
        self._stack = LocalStack(
            LocalConfig(
                worker_flags=share_cores(config, cores),
                workers=config.workers,
                cards=share_cards(config, visible_cards(os.environ)),
                host=config.host,
                port=config.port,
                router_mode=config.router_mode,
                # The frontend goes with the workers: there is no other worker that it could route to meanwhile.
                environment={"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"},
                on_line=print_line,
            )
        )
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Returns the process's exit code: 0 after a stop that was asked for, 2 for a taken port, else 1."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._serve()
        except PortTaken as error:
            complain(str(error))
            return USAGE_ERROR
        except LocalError as error:
            complain(str(error))
            return 1
        finally:
            await self._stack.stop()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._say("killing everything")
            self._stack.kill()
        self._stop.set()

    async def _serve(self) -> int:
        begin = time.monotonic()
        check_port(self._config.host, self._config.port)
        plural = "s" if self._config.workers > 1 else ""
        self._say(f"starting a frontend and {self._config.workers} worker{plural} for {self._config.worker.model}")
        if not (await self._or_stop(self._import()) and await self._or_stop(self._stack.start())):
            return self._stopped()
        url, model = self._stack.url, self._stack.model
        self._say(f"ready after {time.monotonic() - begin:.1f} s: {model} at {url}/v1, stop with Ctrl-C")
        self._say(f"try: {curl_line(url, model)}")
        while await self._or_stop(self._next_exit()):
            if not any(worker.child.alive for worker in self._stack.workers):
                raise LocalError("no worker is left")
        return self._stopped()

    async def _import(self) -> None:
        """Import a model that is no directory yet, once for all workers. Raises `LocalError` if it cannot be served."""
        worker = self._config.worker
        revision = [] if worker.revision is None else [worker.revision]
        command = [sys.executable, "-m", "worker.resolve", worker.model, worker.load_format, *revision]
        child = await start_child(ChildConfig("import", command, os.environ, self._on_import_line))
        try:
            code = await child.wait()
        finally:
            await child.stop(IMPORT_STOP_S)
        if code:
            raise LocalError(child.reason)

    def _on_import_line(self, _name: str, line: str) -> None:
        if not line.startswith(REASON):
            self._say(line)

    async def _next_exit(self) -> None:
        """Wait for a process that ends by itself and report it. Raises `LocalError` if it is the frontend."""
        child: Child = await self._stack.exits.get()
        if child is self._stack.frontend:
            raise LocalError(child.last_words)
        complain(child.last_words)

    async def _or_stop(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do `work` unless a signal comes first. True if it was done."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return not self._stop.is_set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return False

    def _stopped(self) -> int:
        self._say("stopping: running requests finish first; a second Ctrl-C kills")
        return 0

    def _say(self, line: str) -> None:
        print_line("pagelane", line)


def complain(line: str) -> None:
    """One line about what went wrong."""
    sys.stderr.write(f"pagelane: {line}\n")
    sys.stderr.flush()


def main(argv: Sequence[str]) -> int:
    """`pagelane up`. Returns the exit code."""
    try:
        launcher = Launcher(parse(argv, os.environ))
    except HelpRequested:
        sys.stdout.write(usage() + "\n")
        return 0
    except ConfigError as error:
        complain(str(error))
        return USAGE_ERROR
    return asyncio.run(launcher.run())
