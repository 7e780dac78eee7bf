"""2,000 steps of mixed load on a lane: nothing is allocated, nothing compiles, every decode step is a graph, and the
device does not wait for the host between two of them.

    python -m tests.gpu.check_steady [--quick] [--shape qwen3-4b]
"""

import argparse
import gc
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from engine.build import BuiltLane, build_lane
from engine.config import CoreConfig
from engine.lane import Lane
from tests.gpu import rehearsal
from tests.gpu.harness import Results
from tests.gpu.load import Client, Mix, MixedLoad, on_pool

SMALL_POOL = 60_000
"""Tokens: less than 256 streams of the mix want, so that rows are preempted."""
IDLE_P50_US, IDLE_P99_US = 30.0, 300.0
TAKEN = ("segment.all.allocated", "num_device_alloc", "num_device_free", "num_alloc_retries", "num_ooms")


def memory_counters() -> dict[str, int]:
    """How often torch has asked the driver for memory."""
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {name: stats.get(name, 0) for name in TAKEN}


def free_bytes() -> int:
    """What the device shows as free; the driver loads code lazily, which is no allocation of the lane's."""
    wait()
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def loaded_kernels() -> int:
    """Triton kernels that this process has compiled or loaded: every specialization counts once."""
    from triton.runtime.jit import JITFunction

    # Not by the collector's list: what is frozen is not in it.
    known = {id(value): value for module in list(sys.modules.values()) for value in list(vars(module).values())}
    count = 0
    for found in known.values():
        if type(found) is JITFunction:
            caches = getattr(found, "device_caches", None) or getattr(found, "cache", {})
            count += sum(len(entry[0] if isinstance(entry, tuple) else entry) for entry in list(caches.values()))
    return count


def counters_of(lane: Lane) -> dict[str, int]:
    """The lane's own counters that have to do with graphs and memory."""
    stats = lane.stats()
    names = ("graph_steps", "eager_steps", "allocations_after_warmup", "compilations_after_warmup")
    return {name: int(getattr(stats, name)) for name in names if hasattr(stats, name)}


@contextmanager
def launches(executor: Any, counts: dict[str, int]) -> Iterator[None]:
    """Count steps by kind, and those decode steps that no graph computed."""
    graphs = executor.graphs
    replayed = 0
    right_run, right_launch = type(graphs).run, type(executor).launch

    def run(self: Any, *arguments: Any) -> Any:
        nonlocal replayed
        replayed += 1
        return right_run(self, *arguments)

    def launch(self: Any, plan: Any) -> Any:
        nonlocal replayed
        before = replayed
        handle = right_launch(self, plan)
        kind = "unified" if plan.chunks else "decode"
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "decode" and replayed == before:
            counts["eager decode"] = counts.get("eager decode", 0) + 1
        return handle

    with patch.object(type(graphs), "run", run), patch.object(type(executor), "launch", launch):
        yield


def check_load(results: Results, name: str, lane: Lane, mix: Mix, turns: int) -> None:
    """Run the mix and look at what it took."""
    load = MixedLoad(lane, mix)
    executor: Any = lane.executor
    counts: dict[str, int] = {}
    missed, kernels, own = executor.graphs.eager, loaded_kernels(), counters_of(lane)
    memory, free = memory_counters(), free_bytes()
    with launches(executor, counts):
        for _ in range(turns):
            load.turn()
    taken = {name: value - memory[name] for name, value in memory_counters().items()}
    lost = free - free_bytes()
    load.client.cancel(load.client.live)
    load.client.drain()
    before, kernels = kernels, loaded_kernels() - kernels
    missed = executor.graphs.eager - missed
    own = {name: value - own[name] for name, value in counters_of(lane).items()}
    stats = lane.stats()
    errors = [one.message for one in load.client.finished.values() if one.reason == "error"]
    eager = counts.get("eager decode", 0)
    results.emit(
        f"steady: {name}",
        ok=not (any(taken.values()) or kernels or missed or eager or errors)
        # Kernels that are counted at all; a rehearsal has none.
        and before > 0
        and not own.get("allocations_after_warmup", 0)
        and not own.get("compilations_after_warmup", 0),
        turns=turns,
        steps=counts,
        memory=taken,
        less_free_bytes=lost,
        kernels_before=before,
        kernels_compiled=kernels,
        decode_steps_without_graph=eager + missed,
        counters=own,
        ended=len(load.client.finished),
        cancelled=load.cancelled,
        preemptions=stats.preemptions,
        tokens=load.client.tokens,
        cached_tokens=stats.cached_tokens,
        errors=errors[:3],
    )


def check_idle(results: Results, lane: Lane, vocab: int, rows: int, steps: int) -> None:
    """Device time between the end of a decode step and the start of the next, scheduler and planning included."""
    client, rng = Client(lane), random.Random(rows)
    length = rehearsal.scaled(1024, 8)
    for _ in range(rows):
        client.send([rng.randrange(10, vocab) for _ in range(length)], steps + 4 * rows + 60)
    while len(client.first) < rows:
        client.step()
    marks: list[tuple[Any, Any]] = []
    with bracketed(lane.executor, marks):
        for _ in range(steps):
            client.step()
    wait()
    client.cancel(client.live)
    client.drain()
    marks = marks[20:] if len(marks) > 40 else marks
    gaps = sorted(1e3 * one[1].elapsed_time(two[0]) for one, two in pairwise(marks))
    p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    results.emit(
        f"idle between decode steps, {rows} rows",
        p50_us=p50,
        p99_us=p99,
        graph_ms=statistics.median(one.elapsed_time(two) for one, two in marks),
        steps=len(marks),
        ok=p50 <= IDLE_P50_US and p99 <= IDLE_P99_US,
    )


@contextmanager
def bracketed(executor: Any, marks: list[tuple[Any, Any]]) -> Iterator[None]:
    """Record an event before and behind every graph."""
    right: Callable[..., None] = type(executor.graphs).run

    def run(self: Any, *arguments: Any) -> None:
        before, behind = event(), event()
        before.record()
        right(self, *arguments)
        behind.record()
        marks.append((before, behind))

    with patch.object(type(executor.graphs), "run", run):
        yield


class _NoEvent:
    """An event of a machine without a GPU."""

    def record(self) -> None:
        """Nothing happens."""

    def elapsed_time(self, other: object) -> float:
        """No time passes."""
        return 0.0


def event() -> Any:
    """A timed event."""
    return torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else _NoEvent()


def wait() -> None:
    """Until the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build(shape: str, folder: Path) -> tuple[CoreConfig, BuiltLane]:
    """The lane that is loaded."""
    rehearsal.begin()
    directory = rehearsal.model_directory(shape, folder / "model")
    config = rehearsal.config_of(directory)
    built = build_lane(config, directory)
    # As the core does before it serves.
    gc.collect()
    gc.freeze()
    return config, built


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--quick", action="store_true", help="300 steps")
    arguments = rehearsal.parsed(parser)
    results = Results("steady")
    with results.part("all"), tempfile.TemporaryDirectory() as folder:
        config, built = build(arguments.shape, Path(folder))
        results.emit("lane", line=built.load_line, seconds=built.seconds, memory=built.memory)
        turns = rehearsal.scaled(150 if arguments.quick else 1000, 20)
        mix = Mix(
            built.vocab_size,
            streams=config.max_bucket + 8,
            longest_prompt=rehearsal.scaled(600, 60),
            longest_output=rehearsal.scaled(300, 20),
            burst=rehearsal.scaled(24, 6),
        )
        small = on_pool(built.lane, config, built.vocab_size, rehearsal.scaled(SMALL_POOL, 200))
        for name, lane in (("the whole pool", built.lane), (f"{SMALL_POOL} tokens", small)):
            with results.part(f"steady: {name}: ran"):
                check_load(results, name, lane, mix, turns)
        for rows in rehearsal.scaled((1, 64, 256), (1, 3)):
            with results.part(f"idle, {rows} rows: ran"):
                lane = on_pool(built.lane, config, built.vocab_size, built.capacity.tokens)
                check_idle(results, lane, built.vocab_size, rows, rehearsal.scaled(170, 10))
    results.emit("summary", failed=results.failed)
    sys.exit(bool(results.failed))


if __name__ == "__main__":
    main()
