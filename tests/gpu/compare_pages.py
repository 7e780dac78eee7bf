"""Pages of 16 tokens against pages of 64: two lanes side by side on one card, measured in interleaved pairs.

    python -m tests.gpu.compare_pages [--quick] [--only decode,ttft,pool]

Each measurement is a line of its own ("raw"); `tests.gpu.page_table` makes the table in docs/page-size.md of them.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from engine.build import BuiltLane, build_lane
from engine.config import CoreConfig
from engine.cuda import lane as lane_module
from engine.cuda.gpu import CudaGpu
from engine.lane import Lane
from engine.scheduler import Scheduler
from tests.gpu import rehearsal
from tests.gpu.check_steady import wait
from tests.gpu.harness import Results
from tests.gpu.load import Client, on_pool

PAGES = (16, 64)
CONTEXT = 1024
BLOCK = 20
"""Steps of one side before it is the other's turn."""
POOL_TOKENS = 37_824
"""Multiple of both page sizes."""


class SharedGpu(CudaGpu):
    """The GPU, when this process has lanes already: what they use counts as another process's."""

    def __init__(self) -> None:
        super().__init__()
        free, total = torch.cuda.mem_get_info(self.device)
        self.others = total - free


@dataclass(frozen=True, slots=True)
class Side:
    """A lane with its page size."""

    page: int
    config: CoreConfig
    built: BuiltLane

    def fresh(self, tokens: int | None = None) -> Lane:
        """A lane with an empty pool on the same executor."""
        return on_pool(self.built.lane, self.config, self.built.vocab_size, tokens or self.built.capacity.tokens)


def build_sides(folder: Path) -> list[Side]:
    """Both lanes, each with about 0.4 of the card."""
    sides = []
    directory = rehearsal.model_directory("qwen3-4b", folder / "model")
    for place, page in enumerate(PAGES):
        config = rehearsal.config_of(directory, kv_page_size=page, gpu_memory_utilization=0.4 * (place + 1))
        if place and not rehearsal.rehearsed():
            with patch.object(lane_module, "CudaGpu", SharedGpu):
                sides.append(Side(page, config, build_lane(config, directory)))
        else:
            sides.append(Side(page, config, build_lane(config, directory)))
    return sides


def in_turn(sides: list[Side], pair: int) -> list[int]:
    """The order of a pair: who begins alternates."""
    places = list(range(len(sides)))
    return places if pair % 2 == 0 else places[::-1]


@contextmanager
def timed(owner: type, name: str, sink: dict[int, list[float]]) -> Iterator[None]:
    """Keep the seconds of every call of a method, by the identity of its object."""
    right = getattr(owner, name)

    def timing(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return right(self, *arguments, **named)
        finally:
            sink[id(self)].append(time.perf_counter() - began)

    with patch.object(owner, name, timing):
        yield


def compare_decode(results: Results, sides: list[Side], streams: int, pairs: int) -> None:
    """Milliseconds of a decode step, and CPU microseconds of its plans."""
    clients = [Client(side.fresh()) for side in sides]
    rng, vocab = random.Random(streams), sides[0].built.vocab_size
    length = rehearsal.scaled(CONTEXT, 20)
    prompts = [[rng.randrange(10, vocab) for _ in range(length)] for _ in range(streams)]
    for client in clients:
        for prompt in prompts:
            client.send(prompt, BLOCK * pairs + 2 * streams + 100)
        while len(client.first) < streams:
            client.step()
    parts = ("plan", "attention", "launch")
    for pair in range(pairs):
        for place in in_turn(sides, pair):
            client = clients[place]
            executor: Any = client.lane.executor
            sinks: dict[str, dict[int, list[float]]] = {part: defaultdict(list) for part in parts}
            attention = executor.parts.attention
            wait()
            with (
                timed(Scheduler, "plan", sinks["plan"]),
                timed(type(attention), "begin", sinks["attention"]),
                timed(type(executor), "launch", sinks["launch"]),
            ):
                began = time.perf_counter()
                for _ in range(BLOCK):
                    client.step()
                wait()
                seconds = time.perf_counter() - began
            keys = {"plan": id(client.lane.scheduler), "attention": id(attention), "launch": id(executor)}
            cpu = {f"{part}_us": 1e6 * statistics.median(sinks[part][keys[part]] or [0.0]) for part in parts}
            results.emit(
                "raw", what="decode", at=streams, page=sides[place].page, pair=pair, ms=1e3 * seconds / BLOCK, **cpu
            )
    for client in clients:
        client.cancel(client.live)
        client.drain()


def compare_ttft(results: Results, sides: list[Side], length: int, pairs: int) -> None:
    """Milliseconds to the first token of a prompt that was computed before, and how much of it was cached."""
    clients = [Client(side.fresh()) for side in sides]
    rng, vocab = random.Random(length), sides[0].built.vocab_size
    for pair in range(pairs):
        prompt = [rng.randrange(10, vocab) for _ in range(length)]
        for temperature in ("cold", "warm"):
            for place in in_turn(sides, pair):
                client = clients[place]
                wait()
                key = client.send(prompt, 1)
                client.drain()
                results.emit(
                    "raw",
                    what=f"{temperature} ttft",
                    at=length,
                    page=sides[place].page,
                    pair=pair,
                    ms=1e3 * client.ttft(key),
                    cached=client.finished[key].cached_tokens,
                )


@dataclass(frozen=True, slots=True)
class Wish:
    """A request of the pool's trace."""

    prompt: list[int]
    max_tokens: int


def trace(requests: int, vocab: int, seed: int) -> list[Wish]:
    """Questions of 8 to 120 tokens behind 48 contexts of 100 to 600, each asked several times: sharing by prefix."""
    rng = random.Random(seed)

    def draw(low: int, high: int) -> list[int]:
        return [rng.randrange(10, vocab) for _ in range(rng.randint(low, high))]

    contexts = [draw(100, 600) for _ in range(48)]
    return [Wish(rng.choice(contexts) + draw(8, 120), rng.randint(32, 192)) for _ in range(requests)]


def compare_pool(results: Results, sides: list[Side], streams: int, pairs: int) -> None:
    """A pool that is too small: tokens a second of so many users, preemptions, and what the prefix cache gave."""
    requests = rehearsal.scaled(3 * streams, 6)
    for pair in range(pairs):
        wishes = trace(requests, sides[0].built.vocab_size, 100 * streams + pair)
        if rehearsal.rehearsed():
            wishes = [Wish(wish.prompt[:40], 8) for wish in wishes]
        for place in in_turn(sides, pair):
            client = Client(sides[place].fresh(rehearsal.scaled(POOL_TOKENS, 384)))
            waiting = list(wishes)
            wait()
            began = time.perf_counter()
            while waiting or not client.lane.idle:
                for _ in range(min(len(waiting), streams - len(client.sent) + len(client.finished))):
                    wish = waiting.pop()
                    client.send(wish.prompt, wish.max_tokens)
                client.step()
            wait()
            seconds = time.perf_counter() - began
            stats = client.lane.stats()
            results.emit(
                "raw",
                what="small pool",
                at=streams,
                page=sides[place].page,
                pair=pair,
                tokens_per_s=client.tokens / seconds,
                preemptions=stats.preemptions,
                cached_tokens=stats.cached_tokens,
                prompt_tokens=stats.prompt_tokens,
                recomputed_tokens=stats.recomputed_tokens,
                steps=stats.decode_steps + stats.unified_steps,
                errors=sum(one.reason == "error" for one in client.finished.values()),
            )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few pairs")
    parser.add_argument("--only", default="decode,ttft,pool")
    arguments = rehearsal.parsed(parser)
    rehearsal.begin()
    results = Results("pages")
    few = arguments.quick or arguments.rehearse
    comparisons = {
        "decode": (compare_decode, rehearsal.scaled((1, 16, 32, 64), (1, 3)), 2 if few else 15),
        "ttft": (compare_ttft, rehearsal.scaled((69, 137, 273, 4096), (69, 100)), 2 if few else 25),
        "pool": (compare_pool, rehearsal.scaled((64, 128), (3,)), 1 if few else 3),
    }
    with results.part("all"), tempfile.TemporaryDirectory() as folder:
        sides = build_sides(Path(folder))
        for side in sides:
            results.emit("lane", page=side.page, line=side.built.load_line)
        for name, (compare, points, pairs) in comparisons.items():
            if name not in arguments.only.split(","):
                continue
            for point in points:
                with results.part(f"{name} {point}: ran"):
                    compare(results, sides, point, pairs)
    results.emit("summary", failed=results.failed)
    sys.exit(bool(results.failed))


if __name__ == "__main__":
    main()
