"""How many pages a number of bytes buys, and what follows for the length of a request."""

import re
from dataclasses import dataclass
from decimal import Decimal

from kv.geometry import KvGeometry

_UNITS = {
    "": 1, "b": 1,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_MIB = 1 << 20


class SizeError(ValueError):
    """A text is not a size in bytes."""


class KvBudgetError(ValueError):
    """The memory given to the KV cache does not hold what it must."""


def parse_size(text: str) -> int:
    """Bytes of a size such as `512MiB`, `1.5GB` or `4096`, rounded down; case does not matter.

    KiB, MiB, GiB and TiB are powers of 1024, KB, MB, GB and TB powers of 1000. Raises `SizeError` for anything else
    and for less than one byte.
    """
    found = _SIZE.fullmatch(text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise SizeError(f"{text!r} is no size: write a number and KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 512MiB")
    size = int(Decimal(found[1]) * unit)
    if size < 1:
        raise SizeError(f"{text!r} is {size} bytes, but a size is at least 1 byte")
    return size


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """What a KV pool can hold: the only page count that leaves it, equal to Dynamo's total_kv_blocks."""

    usable_pages: int
    """Pool pages minus the padding page."""
    page_size: int
    """Tokens per page."""

    @property
    def tokens(self) -> int:
        """Tokens that fit when every page is full."""
        return self.usable_pages * self.page_size


@dataclass(frozen=True, slots=True)
class KvBudget:
    """`memory_bytes` spent on whole pages of `geometry`, one of which is the padding page.

    Raises `KvBudgetError` if what is left holds fewer than `floor_tokens` tokens, or not a single page.
    """

    geometry: KvGeometry
    memory_bytes: int
    floor_tokens: int = 1

    def __post_init__(self) -> None:
        page_bytes = self.geometry.page_bytes
        usable_pages = self.memory_bytes // page_bytes - 1
        needed_pages = max(1, self.geometry.pages_for(self.floor_tokens))
        if usable_pages < needed_pages:
            needed_bytes = (needed_pages + 1) * page_bytes
            raise KvBudgetError(
                f"the KV cache gets {self.memory_bytes} bytes ({self.memory_bytes / _MIB:.1f} MiB), which hold "
                f"{max(usable_pages, 0)} usable pages of {page_bytes} bytes, but {needed_pages} are needed for "
                f"{max(self.floor_tokens, 1)} tokens: give it at least {needed_bytes} bytes "
                f"({needed_bytes / _MIB:.1f} MiB)" + ("" if needed_pages == 1 else " or lower the context limit")
            )

    @property
    def total_pages(self) -> int:
        """Pages of the pool, the padding page included."""
        return self.memory_bytes // self.geometry.page_bytes

    @property
    def bytes(self) -> int:
        """Bytes that the pages take, at most `memory_bytes`."""
        return self.total_pages * self.geometry.page_bytes

    @property
    def capacity(self) -> KvCapacity:
        """What the pool can hold."""
        return KvCapacity(self.total_pages - 1, self.geometry.page_size)


def servable_length(context_limit: int, capacity: KvCapacity) -> int:
    """Longest request in tokens, prompt and output together: what the model can see and the whole pool can hold."""
    return min(context_limit, capacity.tokens)
