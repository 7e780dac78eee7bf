"""The worker's backend on the GPU: 16 users through the real frontend, then load through `Backend.generate`.

    python -m tests.gpu.serve [--driver PATH] [--levels 1,16,64]
    python -m tests.gpu.serve --driver PATH --rows [--shape qwen3-14b] [--model DIR] [--max-step-tokens 8192]

`--driver` names a file with coroutines `closed_loop(engine, name, users, requests, n_in, n_out, vocab, seed)`,
`warm_ttft(engine, name, n_in, vocab, seed)` and `sweep(engine, name, vocab, out)`, which makes all rows: the load that
the peers are measured with. `--model` names a checkpoint; without it, weights are drawn on the card (dummy).
"""

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.gpu.harness import Results
from tests.gpu.rehearsal import SETTINGS
from tests.gpu.shaped import write_config
from tests.models import _write_tokenizer

USERS = 16
PEER_VOCAB = 150_000
"""Token ids of the rows' prompts lie below this: the peers' prompts are the same."""


def model_directory(shape: str, folder: Path) -> Path:
    """A shape's configuration, with a tokenizer that knows few of its tokens, and greedy by default."""
    directory = write_config(shape, folder)
    _write_small_files(directory)
    return directory


def _write_small_files(directory: Path) -> None:
    _write_tokenizer(directory, 512)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 0}))


class Engine:
    """What the load driver drives."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    async def generate(self, token_ids: list[int], max_tokens: int) -> AsyncIterator[int]:
        """Counts of new tokens, chunk by chunk."""
        from dynamo._core import Context

        request = {
            "token_ids": token_ids,
            "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
        }
        async for chunk in self.backend.generate(request, Context()):
            if chunk["token_ids"]:
                yield len(chunk["token_ids"])


async def smoke(results: Results, directory: Path) -> None:
    """`USERS` users at once, each a streamed completion through a Dynamo frontend on loopback."""
    import httpx

    from worker.local import LocalConfig, LocalStack

    log: list[str] = []
    flags = [part for key, value in SETTINGS.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    stack = LocalStack(
        LocalConfig(
            worker_flags=["--model", str(directory), "--served-model-name", "shape", *flags],
            environment={"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"},
            on_line=lambda name, line: log.append(f"{name} | {line}"),
            start_timeout_s=120.0,
        )
    )
    try:
        began = time.perf_counter()
        await stack.start()
        ready = time.perf_counter() - began
        async with httpx.AsyncClient(timeout=60.0) as client:

            async def user(number: int) -> int:
                body = {
                    "model": "shape",
                    "prompt": f"User {number} asks about the weather. " * (1 + number),
                    "max_tokens": 32,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                answer = await client.post(f"{stack.url}/v1/completions", json=body)
                if answer.status_code != 200:
                    raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
                return int(answer.json()["usage"]["completion_tokens"])

            began = time.perf_counter()
            counts = await asyncio.gather(*(user(number) for number in range(USERS)))
            seconds = time.perf_counter() - began
        results.emit("frontend, 16 users", ready_s=ready, seconds=seconds, tokens=counts, ok=counts == [32] * USERS)
    except BaseException:
        print("\n".join(log[-40:]), flush=True)
        raise
    finally:
        await stack.stop()


class RowWriter:
    """A file for `sweep` to write its rows to."""

    def __init__(self, results: Results, settings: dict[str, Any]) -> None:
        self._results = results
        self._settings = settings

    def write(self, text: str) -> None:
        """Emit a row."""
        self._results.emit("row", **self._settings, **json.loads(text))

    def flush(self) -> None:
        """Results are written at once."""


def read_driver(path: Path) -> Any:
    """The load driver's module."""
    spec = importlib.util.spec_from_file_location("driver", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def served(results: Results, directory: Path, settings: dict[str, Any]) -> AsyncIterator[Engine]:
    """The backend in this process, and its core in another."""
    from worker.backend import Backend
    from worker.config import WorkerConfig

    backend = Backend(WorkerConfig(model=str(directory), **settings))
    began = time.perf_counter()
    await backend.start(1)
    results.emit("backend ready", seconds=time.perf_counter() - began, **settings)
    try:
        yield Engine(backend)
    finally:
        await backend.cleanup()


async def load(results: Results, directory: Path, driver: Path, levels: list[int], settings: dict[str, Any]) -> None:
    """Some of the peers' load."""
    module, vocab = read_driver(driver), 151936
    async with served(results, directory, settings) as engine:
        await module.closed_loop(engine, "warm-up", 4, 8, 128, 16, vocab, seed=1)
        for level in levels:
            row = await module.closed_loop(
                engine, "pagelane", level, max(6, level * 2), 1024, 128, vocab, seed=1000 + level
            )
            results.emit("driver", **row)
        for n_in in (1024, 4096):
            results.emit(
                "driver", **await module.warm_ttft(engine, "pagelane", n_in, vocab, seed=2000 + n_in, repeats=4)
            )


async def rows(results: Results, directory: Path, driver: Path, levels: list[int], settings: dict[str, Any]) -> None:
    """All of the peers' load, a line for each row."""
    async with served(results, directory, settings) as engine:
        out = RowWriter(results, {"max_step_tokens": settings["max_step_tokens"]})
        await read_driver(driver).sweep(engine, "pagelane", vocab=PEER_VOCAB, levels=levels, out=out)


def checkpoint(directory: Path) -> Path:
    """A checkpoint's directory, with the small files that it lacks."""
    if not (directory / "tokenizer.json").exists():
        _write_small_files(directory)
    return directory


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--model", type=Path, help="a checkpoint of the shape, instead of dummy weights")
    parser.add_argument("--driver", type=Path)
    parser.add_argument("--levels", default=None, help="users; by default 1,16,64, and all of the driver's with --rows")
    parser.add_argument("--rows", action="store_true", help="all rows of the driver, and no frontend")
    parser.add_argument("--max-step-tokens", type=int, default=SETTINGS["max_step_tokens"])
    parser.add_argument("--page-size", type=int, default=16)
    arguments = parser.parse_args()
    settings = {**SETTINGS, "max_step_tokens": arguments.max_step_tokens, "kv_page_size": arguments.page_size}
    if arguments.model is not None:
        settings["load_format"] = "auto"
    name = f"rows-{arguments.shape}-{arguments.max_step_tokens}" if arguments.rows else "serve"
    results = Results(name)
    default = "1,16,32,64,128,256" if arguments.rows else "1,16,64"
    levels = [int(level) for level in (arguments.levels or default).split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is not None:
            directory = checkpoint(arguments.model)
        else:
            directory = model_directory(arguments.shape, Path(folder) / "model")
        if arguments.driver is not None:
            run = rows if arguments.rows else load
            with results.part("rows" if arguments.rows else "load"):
                asyncio.run(run(results, directory, arguments.driver, levels, settings))
        if not arguments.rows:
            with results.part("smoke"):
                asyncio.run(smoke(results, directory))
    results.emit("summary", failed=results.failed)
    sys.exit(bool(results.failed))


if __name__ == "__main__":
    main()
