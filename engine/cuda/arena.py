"""Activation memory on the device, taken once."""

import math

import torch
from torch import Tensor

from engine.plan import ALIGNMENT


class DeviceArena:
    """One allocation from which named tensors are cut; `reserve` them all, then `allocate`, then `take`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self._places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._memory: Tensor | None = None

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Plan a tensor. A name stands once."""
        if name in self._places or self._memory is not None:
            raise ValueError(f"{name!r} is reserved twice, or after the arena was allocated")
        self._places[name] = (self.nbytes, dtype, shape)
        self.nbytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def allocate(self) -> None:
        """Take the memory."""
        self._memory = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)

    def take(self, name: str) -> Tensor:
        """The tensor planned as `name`."""
        if self._memory is None:
            raise ValueError("the arena is not allocated yet")
        offset, dtype, shape = self._places[name]
        return self._memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
