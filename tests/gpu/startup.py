"""From the start of a process to its first token, in fresh processes one after another; the first one warms caches.

python -m tests.gpu.startup [--shape qwen3-4b] [--starts 3]
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu import rehearsal
from tests.gpu.harness import Results

FIRST_TOKEN_S = 15.0
MARK = "FIRST TOKEN "
LIMIT_S = 90.0


def child(directory: Path, began: float, settings: dict[str, Any]) -> None:
    """Serve one token and say when."""
    import logging

    from tests.gpu.serve import Engine
    from worker.backend import Backend
    from worker.config import WorkerConfig

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    async def first_token() -> dict[str, Any]:
        imported = time.time()
        backend = Backend(WorkerConfig(model=str(directory), **settings))
        await backend.start(1)
        ready = time.time()
        try:
            async for _ in Engine(backend).generate(list(range(10, 42)), 1):
                pass
            now = time.time()
            phases = backend._ready.seconds if backend._ready is not None else {}
            return {
                "imported_s": imported - began,
                "ready_s": ready - began,
                "first_token_s": now - began,
                "core": phases,
            }
        finally:
            await backend.cleanup()

    print(MARK + json.dumps(asyncio.run(first_token())), flush=True)


def start(directory: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Start a process, wait for its token; its times and the lines of its log that name phases."""
    asked = json.dumps({"directory": str(directory), "began": time.time(), "settings": settings})
    command = [sys.executable, "-m", "tests.gpu.startup", "--child", asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not found:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-1500:]}")
    lines = [line for line in done.stderr.splitlines() if re.search(r"[0-9] s\b|KV cache|captured|started in", line)]
    return json.loads(found[-1].removeprefix(MARK)), [line[-220:] for line in lines[:30]]


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two starts")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = rehearsal.parsed(parser)
    if arguments.child:
        asked = json.loads(arguments.child)
        child(Path(asked["directory"]), asked["began"], asked["settings"])
        return
    from tests.gpu.serve import SETTINGS, model_directory

    results = Results("startup")
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = SETTINGS
        if arguments.rehearse:
            from tests.models import tiny_model

            directory = tiny_model(Path(folder) / "model", "qwen3", layers=1, vocab=320)
            settings = {"device": "cpu", "kv_cache_memory": "16MiB", "threads": 1}
        else:
            directory = model_directory(arguments.shape, Path(folder) / "model")
        for number in range(2 if arguments.quick else arguments.starts):
            with results.part(f"start {number}: ran"):
                times, lines = start(directory, settings)
                warm = number > 0
                results.emit(
                    f"start {number}{'' if warm else ', caches as they were'}",
                    **times,
                    bar_s=FIRST_TOKEN_S,
                    log=lines,
                    **({"ok": times["first_token_s"] <= FIRST_TOKEN_S} if warm else {}),
                )
    results.emit("summary", failed=results.failed)
    sys.exit(bool(results.failed))


if __name__ == "__main__":
    main()
