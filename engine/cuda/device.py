"""Pinned memory, copies and events of a GPU, for the staging ring."""

import torch
from torch import Tensor

from engine.cuda.layout import AttentionLayout, Range
from engine.cuda.planner import Array
from engine.cuda.staging import Event

TORCH_DTYPES = {"uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class TorchDevice:
    """`staging.CopyDevice` on torch. Copies and events go to the current stream of the arena's device."""

    def __init__(self, arena: Tensor) -> None:
        self.arena = arena
        # The arrays of the ring by identity; they live as long as this object.
        self._pinned: dict[int, tuple[Array, Tensor]] = {}
        # Target and source of each copy: a ring has few ranges, and slicing costs as much as queueing the copy.
        self._copies: dict[tuple[int, Range], tuple[Tensor, Tensor]] = {}

    def pinned(self, nbytes: int) -> Array:
        """See `CopyDevice`."""
        memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        array: Array = memory.numpy()
        self._pinned[id(array)] = array, memory
        return array

    def copy(self, source: Array, at: Range) -> None:
        """See `CopyDevice`."""
        pair = self._copies.get((id(source), at))
        if pair is None:
            memory = self._pinned[id(source)][1]
            pair = self._copies[id(source), at] = self.arena[at.begin : at.end], memory[at.begin : at.end]
        pair[0].copy_(pair[1], non_blocking=True)

    def event(self) -> Event:
        """See `CopyDevice`."""
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event


def views(arena: Tensor, layout: AttentionLayout) -> dict[str, Tensor]:
    """Every buffer of the layout as a tensor of its own dtype and shape (`*_partials` as bytes)."""
    return {
        name: arena[buffer.offset : buffer.offset + buffer.nbytes].view(TORCH_DTYPES[buffer.dtype]).view(buffer.shape)
        for name, buffer in layout.buffers.items()
    }
