"""Puts a lane together: executor, page pool and scheduler for the device that the settings name."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import CoreConfig
from engine.lane import Lane
from engine.memory import load_line
from engine.scheduler import Scheduler
from engine.scheduling import SchedulerConfig
from engine.step import DeviceCounters
from engine.warmup import measure_step_costs
from kv.budget import KvCapacity
from kv.hashing import Blake2bHasher
from kv.pool import PagePool

if TYPE_CHECKING:
    from engine.cpu.lane import CpuLane
    from engine.cuda.lane import CudaLane

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
    parameters: frozenset[str]
    """Optional request parameters that the executor honours."""
    step_costs: tuple[tuple[int, int, float], ...] = ()
    """See `engine.messages.Ready`."""


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
    hasher = Blake2bHasher(config.kv_page_size)
    built, line, counting = _create(config, model_dir, hasher.fingerprint, LoadProgress(clock))
    counters = counting(clock)  # what measuring takes counts, since the pool has the rest of the memory by now
    costs, seconds = None, dict(built.seconds)
    if config.itl_target_ms is not None:
        began = clock()
        costs = measure_step_costs(built.executor, config, built.servable_length, clock)
        seconds["step costs"] = clock() - began
        log.info("milliseconds of a step:\n%s", costs.as_text())
    limits = SchedulerConfig.of(
        config, built.servable_length, built.capacity.usable_pages, costs, built.model_config.vocab_size
    )
    scheduler = Scheduler(limits, PagePool(built.capacity), hasher)
    log.info("memory, planned and measured:\n%s", built.report.as_text())
    return BuiltLane(
        lane=Lane(scheduler, built.executor, clock, counters),
        capacity=built.capacity,
        servable_length=built.servable_length,
        vocab_size=built.model_config.vocab_size,
        load_line=line,
        memory=built.report.as_dict(),
        seconds=seconds,
        parameters=built.executor.parameters,
        step_costs=costs.points() if costs else (),
    )


_Counting = Callable[[Callable[[], float]], Callable[[], DeviceCounters]]
"""Begins to count, on a clock, what the device does."""


def _create(
    config: CoreConfig, model_dir: Path, fingerprint: str, progress: LoadProgress
) -> "tuple[CpuLane | CudaLane, str, _Counting]":
    """The lane for the device that the settings name, its load line, and what counts for its device."""
    if use_cuda(config.device):
        from engine.cuda.lane import create_cuda_lane

        cuda = create_cuda_lane(config, model_dir, progress)
        return cuda, cuda.load_line(fingerprint), cuda.counting
    from engine.cpu.lane import create_cpu_lane

    cpu = create_cpu_lane(config, model_dir, progress)
    return cpu, load_line(cpu.capacity, cpu.geometry, fingerprint), lambda _: DeviceCounters


def use_cuda(device: str) -> bool:
    """True if the lane is to run on a GPU: it is asked for, or `auto` and there is one. Refuses `cuda` without one."""
    if device == "cpu":
        return False
    import torch

    if torch.cuda.is_available():
        return True
    if device == "cuda":
        without = "" if torch.version.cuda else f": torch {torch.__version__} is built without CUDA"
        raise ValueError(f"device is 'cuda', but torch finds no GPU here{without}; set device to 'cpu' or 'auto'")
    return False
