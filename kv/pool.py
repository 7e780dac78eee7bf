"""The page pool: who uses which page, what may be evicted, and the one place where KV events are made.

A page is in exactly one state:

    free ── allocate ──> referenced ── release, sealed owner ──> cached ── allocate (evicted) ──> referenced
      ^                   │      ^                                 │
      └── release, else ──┘      └──────────── acquire ────────────┘

Blocks in the index are closed under prefixes at any moment, so that every cached page can be hit and every event has a
live parent. Three rules uphold it:
- A sequence releases its pages tail first, so a block comes before its parent in the LRU order.
- A sequence may hold a private copy of a block that another page owns. When the owner is evicted, the copy takes its
  place.
- When a copy is released, its block was used just now: a cached owner moves to the recently used end, behind the blocks
  that followed the copy in its sequence.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kv.budget import KvCapacity
from kv.events import EventStream
from kv.hashing import event_hash
from kv.index import PrefixIndex


class SealedBlock(NamedTuple):
    """A block whose slots are all written."""

    digest: bytes
    parent_digest: bytes | None
    """Digest of the block before it; None for the first block of a sequence (the hasher's root is no block)."""
    tokens: bytes
    """Token ids, little-endian int32."""
    cache_salt: str | None


class Allocation(NamedTuple):
    """Pages with one reference each."""

    pages: list[int]
    evicted: list[bytes]
    """Digests of the blocks that left the index, in order; a block whose copy takes over does not leave."""


class OutOfPages(RuntimeError):
    """More pages are asked for than are free or cached. Nothing has changed."""

    def __init__(self, asked: int, available: int) -> None:
        self.asked = asked
        self.available = available
        super().__init__(f"{asked} pages are needed, but {available} are free or cached: release or preempt a sequence")


class PageStateError(RuntimeError):
    """A page is not in the state that the call needs. This is a bug of the caller, who can no longer trust the pool."""


class PagePool:
    """Pages 1 to `capacity.usable_pages`, all free at first. Page 0 is the padding page and is never handed out."""

    def __init__(self, capacity: KvCapacity) -> None:
        self.capacity = capacity
        self.events = EventStream()
        self.index = PrefixIndex()
        # A stack: the page that was freed last is handed out first, and fresh pages in ascending order.
        self._free = list(range(capacity.usable_pages, 0, -1))
        # Least recently used first. OrderedDict, because finding the first key of a dict slows down as it is emptied.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * (capacity.usable_pages + 1)

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing of use."""
        return len(self._free)

    @property
    def cached_pages(self) -> int:
        """Sealed pages without a reference: they can be hit, and evicted."""
        return len(self._cached)

    @property
    def referenced_pages(self) -> int:
        """Pages with at least one reference."""
        return self.capacity.usable_pages - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    def match(self, digests: Sequence[bytes], limit: int) -> list[int]:
        """Pages of the longest run of `digests` in the index, at most `limit`: `acquire` them before you allocate."""
        return self.index.match(digests, limit)

    def evictable(self, pages: Iterable[int]) -> int:
        """How many of `pages` are cached now, and so would leave `available` if they were acquired."""
        cached = self._cached
        return sum(page in cached for page in pages)

    def acquire(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, which must be cached or referenced (`PageStateError`)."""
        references = self._references
        cached = self._cached
        for page in pages:
            if not references[page]:
                if page not in cached:
                    raise PageStateError(f"page {page} is acquired, but it is free: match again after every allocate")
                del cached[page]
            references[page] += 1

    def allocate(self, count: int) -> Allocation:
        """Hand out `count` pages with one reference each: free ones, then the least recently used cached ones.

        Raises `OutOfPages`, and changes nothing, if there are not so many.
        """
        if count > self.available:
            raise OutOfPages(count, self.available)
        evicted = self._evict(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return Allocation(pages, evicted)

    def seal(self, page: int, block: SealedBlock) -> bool:
        """Register the block of a referenced page, whose slots are all written, and emit that it is stored.

        False, and no event, if another page owns the block: this one stays private, and is freed when it is released.
        Seal every full block of a sequence, in order, copies too. `PageStateError` if the page is not referenced or is
        sealed already, or if the parent is not in the index.
        """
        if not self._references[page]:
            raise PageStateError(f"page {page} is sealed, but nobody references it")
        if page in self.index.contents:
            raise PageStateError(f"page {page} is sealed twice")
        parent = block.parent_digest
        if parent is not None and parent not in self.index.owners:
            raise PageStateError(
                f"page {page} is sealed before its parent block {parent.hex()}: seal a sequence in order"
            )
        if not self.index.insert(block.digest, page):
            return False
        parent_hash = None if parent is None else event_hash(parent)
        self.events.stored(event_hash(block.digest), parent_hash, block.tokens, block.cache_salt)
        return True

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page. `pages` stand in the order of the sequence and are dropped from its tail.

        Without a reference left, the owner of a block becomes cached and any other page free. `PageStateError` if a
        page is not referenced.
        """
        references = self._references
        for page in reversed(pages):
            left = references[page] - 1
            if left < 0:
                raise PageStateError(f"page {page} is released, but nobody references it")
            references[page] = left
            if not left:
                self._retire(page)

    def _retire(self, page: int) -> None:
        """Cache or free a page that has lost its last reference."""
        digest = self.index.contents.get(page)
        if digest is None:
            self._free.append(page)
        elif self.index.owners[digest] == page:
            self._cached[page] = None
        else:
            owner = self.index.remove(page)
            self._free.append(page)
            if owner is not None and owner in self._cached:
                self._cached.move_to_end(owner)

    def _evict(self, count: int) -> list[bytes]:
        """Free the `count` least recently used cached pages; digests of the blocks that no copy keeps in the index."""
        index = self.index
        evicted: list[bytes] = []
        for _ in range(count):
            page, _ = self._cached.popitem(last=False)
            digest = index.contents[page]
            if index.remove(page) is None:
                evicted.append(digest)
            self._free.append(page)
        if evicted:
            self.events.removed([event_hash(digest) for digest in evicted])
        return evicted

    def check(self) -> None:
        """Raise `PageStateError` unless every page is in one state and the index agrees. Walks the pool: for tests."""
        free, cached = set(self._free), set(self._cached)
        referenced = {page for page, count in enumerate(self._references) if count}
        owners = set(self.index.owners.values())
        copies = set(self.index.copies())
        sealed = set(self.index.contents)
        faults = {
            "free twice": len(self._free) != len(free),
            "in two states": free & cached or free & referenced or cached & referenced,
            "in no state": set(range(1, self.capacity.usable_pages + 1)) != free | cached | referenced,
            "counted wrong": len(free) + len(cached) + self.referenced_pages != self.capacity.usable_pages,
            "referenced a negative number of times": any(count < 0 for count in self._references),
            "free and sealed": free & sealed,
            "cached and not an owner": cached - owners,
            "copies without a reference": copies - referenced,
            "owner and copy at once": owners & copies,
            "sealed, but neither owner nor copy": sealed != owners | copies,
        }
        found = [name for name, fault in faults.items() if fault]
        if found:
            raise PageStateError(f"there are pages that are {', '.join(found)}")
