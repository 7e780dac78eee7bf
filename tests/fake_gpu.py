"""A GPU's memory on a CPU: reserved addresses that hold NaN until they have memory, and numbers for all the rest."""

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cuda import lane as lane_module
from engine.cuda.decoder import TorchOps
from engine.cuda.driver import DriverError
from engine.cuda.graphs import Graph, Recorder, Work
from engine.cuda.sizing import Card
from engine.cuda.vmm import DeviceRange
from tests.cuda_on_cpu import GatheringAttention, Rerun, Reruns

MIB = 1 << 20
GRANULE = 1 << 16
POISON = 0xFF
"""All bits set is NaN in every format."""


class FakeVirtualMemory:
    """`VirtualMemory` over anonymous memory. What has not been mapped is poisoned, and must still be when it is."""

    granularity = GRANULE

    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu
        self.reserved: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}

    def reserve(self, nbytes: int) -> int:
        assert nbytes % GRANULE == 0
        memory = mmap.mmap(-1, nbytes)
        array = np.frombuffer(memory, np.uint8)
        array[:] = POISON
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.reserved[address] = array
        return address

    def map(self, address: int, nbytes: int) -> int:
        assert nbytes % GRANULE == 0
        if self.gpu.used() + nbytes > self.gpu.card.memory - self.gpu.others - self.gpu.hidden:
            raise DriverError(f"cuMemCreate of {nbytes} bytes failed with 2: out of memory")
        base = max(start for start in self.reserved if start <= address)
        untouched = self.reserved[base][address - base : address - base + nbytes]
        assert (untouched == POISON).all(), "addresses were written to before they had memory"
        self.mapped[address] = nbytes
        return address

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        assert self.mapped.pop(handle) == nbytes

    def free(self, address: int, nbytes: int) -> None:
        assert not self.mapped
        self.gpu.closed += 1

    def bytes(self, space: DeviceRange) -> Tensor:
        return torch.from_numpy(self.reserved[space.address])


class FakeRecorder:
    """Graphs that cost memory: some of the driver's, some of torch's, kept for the next graphs when they are gone."""

    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu
        self.graphs = 0

    def record(self, work: Work) -> Graph:
        executor = work.func.__self__  # type: ignore[attr-defined]
        work()
        self.graphs += 1
        self.gpu.driver = max(self.gpu.driver, self.graphs * self.gpu.graph_driver)
        self.gpu.pool = self.graphs * self.gpu.graph_pool
        return Rerun(Reruns(executor.inputs), work, executor.inputs.rows)


class FakeGpu:
    """`engine.cuda.gpu.Gpu`: memory of which the context has 7 MiB and torch 20, whatever a test allocates."""

    CONTEXT, HELD = 7 * MIB, 20 * MIB

    def __init__(
        self, total: int = 64 * MIB, others: int = 0, *, virtual: bool = True, hidden: int = 0, sm_count: int = 4
    ) -> None:
        self.device = torch.device("cpu")
        self.card = Card("a card", sm_count, (9, 0), total)
        self.others = others
        self.hidden = hidden
        """Bytes that are reported as free and are not."""
        self.driver = self.pool = self.closed = self.cached = 0
        self.graph_driver, self.graph_pool = 40960, 8192
        self.caps: list[int] = []
        self.recorders: list[FakeRecorder] = []
        self.memory = FakeVirtualMemory(self) if virtual else None

    def used(self) -> int:
        mapped = sum(self.memory.mapped.values()) if self.memory else 0
        return self.CONTEXT + self.held() + self.driver + mapped

    def held(self) -> int:
        return self.HELD + self.pool + self.cached

    def settle(self) -> None:
        """Nothing is cached."""

    def cap(self, nbytes: int) -> None:
        self.caps.append(nbytes)

    def virtual_memory(self) -> FakeVirtualMemory:
        if self.memory is None:
            raise DriverError("cuMemGetAllocationGranularity of [] bytes failed with 801: not supported")
        return self.memory

    def recorder(self) -> Recorder:
        self.recorders.append(FakeRecorder(self))
        return self.recorders[-1]


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Have lanes compute in plain torch and float32: what they do with memory is theirs."""
    patch.setattr(lane_module, "DTYPES", {"float32": torch.float32})
    patch.setattr(lane_module, "HEAD_DIMS", (16,))
    patch.setattr(lane_module, "load_modules", lambda needs: {"fa2": None})
    patch.setattr(lane_module, "check_planner", lambda *_: 8)
    patch.setattr(lane_module, "signatures", lambda version: None)
    patch.setattr(lane_module, "installed_version", lambda: "0")
    patch.setattr(lane_module, "FusedOps", TorchOps)
    patch.setattr(
        lane_module, "FlashInferAttention", lambda plans, kv, inputs, arena, modules: GatheringAttention(kv, inputs)
    )


def driven(lane: Any) -> SimpleNamespace:
    """What `CudaDriver` wants of a lane."""
    return SimpleNamespace(executor=lane.executor, geometry=lane.geometry)
