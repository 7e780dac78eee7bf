"""Counts what a lane's GPU is not supposed to do any more when the lane serves."""

from collections.abc import Callable
from typing import Any

import torch

from engine.cuda.executor import CudaExecutor
from engine.step import DeviceCounters

LOOK_S = 1.0
"""Torch's statistics take some 50 us: they are read once in so many seconds, not in every step."""


class CudaCounters:
    """What has happened since this object was made, which is when the lane is warm."""

    def __init__(self, executor: CudaExecutor, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._clock = clock
        self._steps = executor.graph_steps, executor.eager_steps
        self._compiled = 0
        self._before = self._asked = device_allocations(executor.inputs.device["token_ids"].device)
        self._looked = clock()
        self._count_compilations()

    def __call__(self) -> DeviceCounters:
        """As of now; allocations as of the last second."""
        now, executor = self._clock(), self._executor
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._asked = device_allocations(executor.inputs.device["token_ids"].device)
        graphs, eager = self._steps
        return DeviceCounters(
            graph_steps=executor.graph_steps - graphs,
            eager_steps=executor.eager_steps - eager,
            allocations_after_warmup=self._asked - self._before,
            compilations_after_warmup=self._compiled,
        )

    def _count_compilations(self) -> None:
        """Triton calls its hook for every specialization that it compiles or loads from its cache."""
        from triton import knobs

        others = knobs.runtime.jit_post_compile_hook

        def hook(*arguments: Any, **details: Any) -> Any:
            self._compiled += 1
            return None if others is None else others(*arguments, **details)

        knobs.runtime.jit_post_compile_hook = hook


def device_allocations(device: torch.device) -> int:
    """How often torch has asked the driver for memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0))
