"""A GPU as a lane's start sees it: what it is, what is used of it, and by whom."""

import gc
import logging
import os
from dataclasses import replace
from typing import Protocol

import torch

from engine.cuda.driver import Driver, DriverError
from engine.cuda.graphs import CudaRecorder, Recorder
from engine.cuda.nvml import used_by_others
from engine.cuda.sizing import Card
from engine.cuda.vmm import CudaVirtualMemory, VirtualMemory

log = logging.getLogger(__name__)

CUBLAS_WORKSPACE = ":1024:1"
"""1 MiB. By default cuBLAS and torch take 32 MiB each on Hopper, and only one of them is used; the projections of
Qwen3-4B and -14B take as long with 1, within 3 %, from 1 to 2048 rows (H200).
"""


class Gpu(Protocol):
    """What building a lane needs of a GPU. All sizes are bytes."""

    device: torch.device
    card: Card
    others: int
    """In use by other processes when this one began; 0 where that cannot be told."""

    def used(self) -> int:
        """In use on the card beyond `others`."""
        ...

    def held(self) -> int:
        """Those of them that torch has, cached ones included."""
        ...

    def settle(self) -> None:
        """Collect garbage, wait for the device, and give back what torch caches."""
        ...

    def cap(self, nbytes: int) -> None:
        """Have torch take no more than `nbytes`."""
        ...

    def virtual_memory(self) -> VirtualMemory:
        """Raises `DriverError` where there is none."""
        ...

    def recorder(self) -> Recorder:
        """Makes graphs, with a memory pool of their own."""
        ...


class CudaGpu:
    """The current CUDA device."""

    def __init__(self) -> None:
        """Makes the process's context, and a stream for everything that this thread does from now on: cuBLAS has a
        workspace for each stream, and the default one cannot be captured.
        """
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        others = None if torch.cuda.is_initialized() else used_by_others(0)  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self.device)
        driver = Driver()
        try:
            driver.limit_stack(0)
        except DriverError as error:
            log.warning("the CUDA context takes more memory than it needs: %s", error)
        if torch.cuda.current_stream(self.device) == torch.cuda.default_stream(self.device):
            torch.cuda.set_stream(driver.stream(self.device))
        _, total = torch.cuda.mem_get_info(self.device)
        self.card = replace(Card.present(self.device), memory=total)
        self.others = others or 0

    def used(self) -> int:
        """See `Gpu`."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - self.others

    def held(self) -> int:
        """See `Gpu`."""
        return torch.cuda.memory_reserved(self.device)

    def settle(self) -> None:
        """See `Gpu`."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def cap(self, nbytes: int) -> None:
        """See `Gpu`."""
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / self.card.memory), self.device)

    def virtual_memory(self) -> VirtualMemory:
        """See `Gpu`."""
        return CudaVirtualMemory(self.device)

    def recorder(self) -> Recorder:
        """See `Gpu`."""
        return CudaRecorder(self.device, torch.cuda.current_stream(self.device))
