"""The worker's backend on the GPU: 16 users through the real frontend, then load through `Backend.generate`.

    python -m tests.gpu.serve [--driver PATH] [--levels 1,16,64]

`--driver` names a file with coroutines `closed_loop(engine, name, users, requests, n_in, n_out, vocab, seed)` and
`warm_ttft(engine, name, n_in, vocab, seed)`: the load that the peers are measured with.
"""

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.gpu.harness import Results
from tests.gpu.shaped import write_config
from tests.models import _write_tokenizer

USERS = 16
SETTINGS = {
    "load_format": "dummy",
    "device": "cuda",
    "dtype": "bfloat16",
    "max_bucket": 256,
    "max_step_tokens": 2048,
    "context_limit": 8192,
}


def model_directory(shape: str, folder: Path) -> Path:
    """A shape's configuration, with a tokenizer that knows few of its tokens, and greedy by default."""
    directory = write_config(shape, folder)
    _write_tokenizer(directory, 512)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 0}))
    return directory


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


async def load(results: Results, directory: Path, driver: Path, levels: list[int]) -> None:
    """The peers' load, through the backend in this process and its core in another."""
    from worker.backend import Backend
    from worker.config import WorkerConfig

    spec = importlib.util.spec_from_file_location("driver", driver)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    backend = Backend(WorkerConfig(model=str(directory), **SETTINGS))
    began = time.perf_counter()
    await backend.start(1)
    try:
        engine, vocab = Engine(backend), 151936
        await module.closed_loop(engine, "warm-up", 4, 8, 128, 16, vocab, seed=1)
        results.emit("backend ready", seconds=time.perf_counter() - began)
        for level in levels:
            row = await module.closed_loop(
                engine, "pagelane", level, max(6, level * 2), 1024, 128, vocab, seed=1000 + level
            )
            results.emit("driver", **row)
        for n_in in (1024, 4096):
            results.emit(
                "driver", **await module.warm_ttft(engine, "pagelane", n_in, vocab, seed=2000 + n_in, repeats=4)
            )
    finally:
        await backend.cleanup()


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--driver", type=Path)
    parser.add_argument("--levels", default="1,16,64")
    arguments = parser.parse_args()
    results = Results("serve")
    with tempfile.TemporaryDirectory() as folder:
        directory = model_directory(arguments.shape, Path(folder) / "model")
        if arguments.driver is not None:
            with results.part("load"):
                levels = [int(level) for level in arguments.levels.split(",")]
                asyncio.run(load(results, directory, arguments.driver, levels))
        with results.part("smoke"):
            asyncio.run(smoke(results, directory))
    results.emit("summary", failed=results.failed)
    sys.exit(bool(results.failed))


if __name__ == "__main__":
    main()
