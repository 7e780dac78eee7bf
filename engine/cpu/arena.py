"""Memory of the CPU lane, taken once: the plan's arena and the activations. Every view keeps its address for good."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import ALIGNMENT, PlanLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PLAN_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class PlanArena:
    """The buffers of a `PlanLayout` in one allocation, zeroed."""

    def __init__(self, layout: PlanLayout) -> None:
        self.memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._tensors = {
            buffer.name: self.memory[buffer.offset : buffer.offset + buffer.nbytes]
            .view(_PLAN_DTYPES[buffer.dtype])
            .view(buffer.shape)
            for buffer in layout.buffers
        }
        self._arrays = {name: tensor.numpy() for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """The whole buffer `name`, as the computation reads it."""
        return self._tensors[name]

    def array(self, name: str) -> "NDArray[np.generic]":
        """The same memory as a numpy array: writing single numbers through it is some ten times cheaper."""
        return self._arrays[name]


class Arena:
    """One allocation from which named tensors are cut; `reserve` them all, then `allocate`, then `take`."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._memory: Tensor | None = None
        self.nbytes = 0

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Plan a tensor. A name stands once."""
        if name in self._places or self._memory is not None:
            raise ValueError(f"{name!r} is reserved twice, or after the arena was allocated")
        self._places[name] = (self.nbytes, dtype, shape)
        self.nbytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def allocate(self) -> None:
        """Take the memory; before this, `nbytes` says how much it will be."""
        self._memory = torch.zeros(self.nbytes, dtype=torch.uint8)

    @property
    def memory(self) -> Tensor:
        """The allocation, as bytes."""
        if self._memory is None:
            raise ValueError("the arena is not allocated yet")
        return self._memory

    def take(self, name: str) -> Tensor:
        """The tensor planned as `name`."""
        offset, dtype, shape = self._places[name]
        return self.memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
