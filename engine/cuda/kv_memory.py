"""The KV cache of a GPU: addresses for every page that there may be at once, memory when it is known how many fit."""

from typing import Protocol

import torch
from torch import Tensor

from engine.cuda.vmm import DeviceRange, VirtualMemory
from kv.geometry import KvGeometry

SCRATCH_PAGES = 2
"""Pages that have memory from the beginning: the padding page, and the one that all rows of measured steps lie on."""


class KvMemory(Protocol):
    """A cache `[pages, *page_shape]` that graphs may be captured over before the number of its pages is known."""

    kv: Tensor
    """At one address for good. Of its pages, the first `SCRATCH_PAGES` may be touched before `grow`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the card that it has."""
        ...

    def grow(self, pages: int) -> None:
        """Have memory for the first `pages` pages, zeroed: a masked slot's weight of 0 survives finite numbers only."""
        ...

    def close(self) -> None:
        """Give the memory back. Nothing may use the cache any more."""
        ...


class MappedKv:
    """`KvMemory` on virtual memory management. Raises `DriverError`."""

    def __init__(self, memory: VirtualMemory, geometry: KvGeometry, dtype: torch.dtype, pages: int) -> None:
        """Reserve addresses for `pages` pages."""
        self._page_bytes = geometry.page_bytes
        self._space = DeviceRange(memory, pages * geometry.page_bytes)
        try:
            self._space.map(SCRATCH_PAGES * geometry.page_bytes)
            self.kv = self._space.tensor((pages, *geometry.page_shape), dtype)
            self.kv[:SCRATCH_PAGES].zero_()
        except BaseException:
            self._space.close()
            raise

    @property
    def nbytes(self) -> int:
        """See `KvMemory`. Whole granules."""
        return self._space.mapped

    def grow(self, pages: int) -> None:
        """See `KvMemory`."""
        self._space.map(pages * self._page_bytes)
        self.kv[:pages].zero_()

    def close(self) -> None:
        """See `KvMemory`."""
        self._space.close()
