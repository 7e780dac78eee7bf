"""The engine core as a process over a simulated device, its loop, lane and scheduler real: `-m tests.sim_core`.

Cheap enough for long runs of several workers on two cores, and it can be told to fail: an order in
`DIRECTORY/<pid>.order` is carried out by the next step and removed.
"""

import argparse
import ctypes
import json
import os
import sys
import threading
import time
from array import array
from hashlib import blake2b
from pathlib import Path

from engine.__main__ import main
from engine.build import BuiltLane
from engine.config import CoreConfig
from engine.lane import Lane
from engine.scheduler import Scheduler
from engine.scheduling import SchedulerConfig
from engine.step import StepPlan, StepResult
from kv.budget import KvCapacity
from kv.hashing import Blake2bHasher, event_hash
from kv.pool import PagePool
from tests.sim import SimExecutor

VOCAB = 320
"""As in `tests.models.tiny_model`, whose tokenizer the frontend uses."""
LETTERS = range(37, 87)
"""Ids that a tiny model's tokenizer decodes to one printable letter each; the simulated model says nothing else."""


def next_token(tokens: list[int]) -> int:
    """The simulated model: a letter that depends on the whole sequence."""
    digest = blake2b(array("i", tokens).tobytes(), digest_size=4).digest()
    return LETTERS[int.from_bytes(digest, "little") % len(LETTERS)]


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    """What a greedy request must give, wherever and beside whatever it runs."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def expected_text(prompt: list[int], max_tokens: int) -> str:
    """The same as a client reads it."""
    return "".join(chr(ord("A") + token - LETTERS[0]) for token in expected_tokens(prompt, max_tokens))


class SimDevice(SimExecutor):
    """A simulated device that takes `step_s` for a step, and fails when it is told to."""

    def __init__(self, config: CoreConfig, options: argparse.Namespace) -> None:
        super().__init__(config.kv_page_size, options.sim_pages, config.max_bucket)
        self.step_s = options.sim_step_s
        self.order = Path(options.sim_directory) / f"{os.getpid()}.order"
        self.failing = ("", 0)
        self.ends = 0.0

    def launch(self, plan: StepPlan) -> tuple[StepResult, float]:
        """Compute the step; it counts as running until its time is over."""
        self.obey()
        result = super().launch(plan)
        self.launched.clear()
        self.ends = max(self.ends, time.monotonic()) + self.step_s
        return result, self.ends

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        """The result, once the step's time is over."""
        result, ends = handle
        time.sleep(max(0.0, ends - time.monotonic()))
        return result

    def obey(self) -> None:
        """Carry out an order: `error N` and `memory N` fail N steps; `sleep`, `deadlock`, `lock` never end one."""
        if os.path.exists(self.order):
            name, _, count = self.order.read_text().partition(" ")
            self.order.unlink()
            self.failing = (name, int(count or 1))
        name, count = self.failing
        if count:
            self.failing = (name, count - 1)
            fail(name)

    def _sample(self, row: int, length: int) -> int:
        tokens = []
        for position in range(length):
            slot = self.kv[self._page(row, position)][position % self.page_size]
            assert slot is not None, f"row {row} reads position {position}, which nobody has written"
            assert slot[0] == position, f"row {row} reads position {position} and finds {slot[0]}"
            tokens.append(slot[1])
        self.last_token[row] = next_token(tokens)
        return self.last_token[row]


def fail(name: str) -> None:
    """Do what an order says."""
    if name == "error":
        raise RuntimeError("injected error")
    if name == "memory":
        raise MemoryError("injected: out of memory")
    if name == "sleep":
        time.sleep(3600)
    if name == "lock":  # keeps the interpreter's lock, as a loop in a C extension does
        ctypes.PyDLL(None).sleep(3600)
    if name == "deadlock":
        lock = threading.Lock()
        with lock:
            lock.acquire()


def build(config: CoreConfig, options: argparse.Namespace) -> BuiltLane:
    """A lane over the simulated device."""
    time.sleep(options.sim_load_s)
    hasher = Blake2bHasher(config.kv_page_size)
    capacity = KvCapacity(options.sim_pages, config.kv_page_size)
    length = min(config.context_limit or 2048, capacity.tokens)
    pool = PagePool(capacity)
    scheduler = Scheduler(SchedulerConfig.of(config, length, capacity.usable_pages), pool, hasher)
    return BuiltLane(
        lane=Lane(scheduler, SimDevice(config, options), time.monotonic),
        capacity=capacity,
        servable_length=length,
        vocab_size=VOCAB,
        load_line=f"KV cache (simulated): {capacity.usable_pages} pages of {capacity.page_size} tokens",
        memory={"kv_pool": 0},
        seconds={},
        parameters=frozenset(),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a simulated core is told beside its configuration."""
    parser.add_argument("--sim-directory", required=True, help="where orders are looked for and the index is written")
    parser.add_argument("--sim-pages", type=int, default=2048, help="usable pages")
    parser.add_argument("--sim-step-s", type=float, default=0.005, help="seconds that a step takes")
    parser.add_argument("--sim-load-s", type=float, default=0.0, help="seconds that loading takes")


def run(argv: list[str]) -> int:
    """Serve; at the end, write the prefix index as Dynamo's block hashes to `DIRECTORY/<parent's pid>.index`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    parser.add_argument("address")
    options = parser.parse_args(argv)
    lanes: list[BuiltLane] = []

    def build_once(config: CoreConfig) -> BuiltLane:
        lanes.append(build(config, options))
        return lanes[0]

    sys.argv = [sys.argv[0], options.address]
    code = main(build_once)
    if lanes and not code:
        hashes = [event_hash(digest) for digest in lanes[0].lane.scheduler.pool.index.digests()]
        (Path(options.sim_directory) / f"{os.getppid()}.index").write_text(json.dumps(hashes))
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
