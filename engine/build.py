"""Puts a lane together: executor, page pool and scheduler for the device that the settings name."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.config import CoreConfig
from engine.lane import Lane
from engine.memory import load_line
from engine.scheduler import Scheduler
from engine.scheduling import SchedulerConfig
from engine.warmup import measure_step_costs
from kv.budget import KvCapacity
from kv.hashing import Blake2bHasher
from kv.pool import PagePool

log = logging.getLogger(__name__)

PROGRESS_S = 2.0
"""Seconds between two progress lines of a load."""


@dataclass(frozen=True, slots=True)
class BuiltLane:
    """A lane that can serve, and what its worker must know about it."""

    lane: Lane
    capacity: KvCapacity
    servable_length: int
    vocab_size: int
    load_line: str
    memory: dict[str, int]
    seconds: dict[str, float]


class LoadProgress:
    """Logs how far a load has come and at what rate, every few seconds and at the end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._logged = self._began

    def __call__(self, done: int, total: int) -> None:
        """Bytes read so far, of how many."""
        now = self._clock()
        if done < total and now - self._logged < PROGRESS_S:
            return
        self._logged = now
        rate = done / max(now - self._began, 1e-9)
        percent = 100 * done // total
        log.info("weights: %d of %d MiB, %d %%, %d MiB/s", done >> 20, total >> 20, percent, int(rate) >> 20)


def build_lane(config: CoreConfig, model_dir: Path, clock: Callable[[], float] = time.monotonic) -> BuiltLane:
    """Load the model and build the lane; every refusal is a `ValueError` with one line for the operator."""
    from engine.cpu.lane import create_cpu_lane

    check_device(config.device)
    built = create_cpu_lane(config, model_dir, LoadProgress(clock))
    hasher = Blake2bHasher(config.kv_page_size)
    costs = None
    if config.itl_target_ms is not None:
        costs = measure_step_costs(built.executor, config, built.servable_length, clock)
    limits = SchedulerConfig.of(config, built.servable_length, built.capacity.usable_pages, costs)
    scheduler = Scheduler(limits, PagePool(built.capacity), hasher)
    log.info("memory, planned and measured:\n%s", built.report.as_text())
    return BuiltLane(
        lane=Lane(scheduler, built.executor, clock),
        capacity=built.capacity,
        servable_length=built.servable_length,
        vocab_size=built.model_config.vocab_size,
        load_line=load_line(built.capacity, built.geometry, hasher.fingerprint),
        memory=built.report.as_dict(),
        seconds=built.seconds,
    )


def check_device(device: str) -> None:
    """Refuse what this version cannot run on; `auto` is the CPU as long as there is no lane for a GPU."""
    if device == "cuda":
        raise ValueError("device is 'cuda', but this version has no CUDA lane yet; set device to 'cpu' or 'auto'")
