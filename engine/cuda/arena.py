"""Device memory that is taken once and cut into named tensors. Tensors of different phases of a step share it."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.plan import aligned

Phase = Literal["attend", "mlp", "choose"]
"""Parts of a step that follow one another on one stream, `attend` and `mlp` in every layer; `choose` is what comes
behind the last layer: logits, tokens and log probabilities.
"""


class _Wish(NamedTuple):
    """A tensor that is planned."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    phases: frozenset[Phase]
    """When the tensor is in use; empty for always."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def meets(self, other: "_Wish") -> bool:
        return not self.phases.isdisjoint(other.phases)


class DeviceArena:
    """One allocation from which named tensors are cut; `reserve` them all, then `allocate`, then `take`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wishes: dict[str, _Wish] = {}
        self._offsets: dict[str, int] = {}
        self._memory: Tensor | None = None

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Plan a tensor that keeps its contents. A name stands once."""
        self._reserve(name, _Wish(shape, dtype, frozenset()))

    def during(self, *phases: Phase) -> "ArenaPhase":
        """Where to plan tensors whose contents matter in `phases` alone."""
        return ArenaPhase(self, frozenset(phases))

    def _reserve(self, name: str, wish: _Wish) -> None:
        if name in self._wishes or self._memory is not None:
            raise ValueError(f"{name!r} is reserved twice, or after the arena was allocated")
        self._wishes[name] = wish
        self._offsets = {}

    @property
    def nbytes(self) -> int:
        """Bytes that what is planned takes. Nothing is allocated by asking."""
        offsets = self._placed()
        return max((offsets[name] + aligned(wish.nbytes) for name, wish in self._wishes.items()), default=0)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the tensors that keep their contents."""
        return sum(aligned(wish.nbytes) for wish in self._wishes.values() if not wish.phases)

    def _placed(self) -> dict[str, int]:
        """Offsets: what is kept comes first, and everything else in the lowest gap among what is used with it."""
        if self._offsets:
            return self._offsets
        end = 0
        shared: dict[str, _Wish] = {}
        for name, wish in self._wishes.items():
            if wish.phases:
                shared[name] = wish
            else:
                self._offsets[name] = end
                end += aligned(wish.nbytes)
        taken: list[tuple[int, int, _Wish]] = []
        for name, wish in shared.items():
            offset, size = end, aligned(wish.nbytes)
            for begin, behind, other in sorted(taken, key=lambda place: place[0]):
                if wish.meets(other) and begin < offset + size:
                    offset = max(offset, behind)
            taken.append((offset, offset + size, wish))
            self._offsets[name] = offset
        return self._offsets

    def allocate(self) -> None:
        """Take the memory, zeroed."""
        self._memory = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)

    def take(self, name: str) -> Tensor:
        """The tensor planned as `name`."""
        if self._memory is None:
            raise ValueError("the arena is not allocated yet")
        wish, offset = self._wishes[name], self._placed()[name]
        return self._memory[offset : offset + wish.nbytes].view(wish.dtype).view(wish.shape)


class ArenaPhase(NamedTuple):
    """Plans tensors of an arena that may lie where tensors of other phases do."""

    arena: DeviceArena
    phases: frozenset[Phase]

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Plan a tensor. A name stands once in the arena."""
        self.arena._reserve(name, _Wish(shape, dtype, self.phases))

    def take(self, name: str) -> Tensor:
        """The tensor planned as `name`."""
        return self.arena.take(name)
