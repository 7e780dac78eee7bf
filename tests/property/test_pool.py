"""Invariants 2 and 4: pool, index and events under any order of calls, against a model that derives all from facts."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv.budget import KvCapacity
from kv.events import Removed, Stored, replay
from kv.geometry import PAGE_SIZES
from kv.hashing import TOKEN_BYTES, Blake2bHasher, event_hash, pack_tokens
from kv.index import PrefixIndex, max_hit_blocks
from kv.pool import OutOfPages, PagePool, PageStateError, SealedBlock

USABLE_PAGES = 6
HASHERS = {page_size: Blake2bHasher(page_size) for page_size in PAGE_SIZES}


@dataclass(eq=False)
class Sequence:
    """A request as the pool sees it: blocks of one repeated symbol each, on pages, sealed in order."""

    symbols: list[int]
    salt: str | None
    pages: list[int] = field(default_factory=list)
    sealed: int = 0


class Model:
    """Who holds what, as plain facts; every state is derived from them when it is asked for."""

    def __init__(self) -> None:
        self.holders: list[list[int]] = []
        self.contents: dict[int, bytes] = {}
        """Digest of each sealed page, in the order of sealing."""
        self.owners: dict[bytes, int] = {}
        self.last_use: dict[bytes, int] = {}
        self.clock = 0

    def references(self) -> Counter[int]:
        return Counter(page for pages in self.holders for page in pages)

    def cached(self) -> set[int]:
        return set(self.owners.values()) - set(self.references())

    def free(self) -> set[int]:
        return set(range(1, USABLE_PAGES + 1)) - set(self.references()) - self.cached()

    def evict(self) -> list[bytes]:
        """Evict the least recently used block; what left the index."""
        page = min(self.cached(), key=lambda page: self.last_use[self.contents[page]])
        digest = self.contents.pop(page)
        del self.owners[digest]
        for other, content in self.contents.items():
            if content == digest:
                self.owners[digest] = other
                return []
        return [digest]

    def seal(self, page: int, digest: bytes) -> bool:
        self.contents[page] = digest
        return self.owners.setdefault(digest, page) == page

    def drop(self, pages: list[int]) -> None:
        """Forget a holder: this very list, since another one may be equal now and grow later."""
        self.holders = [holder for holder in self.holders if holder is not pages]

    def release(self, pages: list[int]) -> None:
        self.drop(pages)
        for page in reversed(pages):
            if page not in self.references() and page in self.contents:
                self.clock += 1
                self.last_use[self.contents[page]] = self.clock
                if self.owners[self.contents[page]] != page:
                    del self.contents[page]


def one_by_one(events: list[Stored | Removed], page_size: int) -> list[tuple[object, ...]]:
    """Events without their merging: one entry for each block."""
    entries: list[tuple[object, ...]] = []
    block_bytes = page_size * TOKEN_BYTES
    for event in events:
        if isinstance(event, Removed):
            entries += [("removed", block) for block in event.hashes]
            continue
        parent = event.parent
        assert len(event.tokens) == len(event.hashes) * block_bytes
        for number, block in enumerate(event.hashes):
            tokens = event.tokens[number * block_bytes : (number + 1) * block_bytes]
            entries.append(("stored", block, parent, tokens, event.cache_salt))
            parent = block
    return entries


class PoolMachine(RuleBasedStateMachine):
    """Requests that come, grow, are sealed, pinned by steps in flight, and go, in a pool that is always too small."""

    @initialize(page_size=st.sampled_from(PAGE_SIZES))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.hasher = HASHERS[page_size]
        self.pool = PagePool(KvCapacity(USABLE_PAGES, page_size))
        self.model = Model()
        self.sequences: list[Sequence] = []
        self.pins: list[list[int]] = []
        self.events: list[Stored | Removed] = []
        self.expected: list[tuple[object, ...]] = []
        """Every block stored or removed, one by one."""

    def block_tokens(self, symbol: int) -> bytes:
        return pack_tokens([symbol] * self.page_size)

    def digests(self, sequence: Sequence) -> list[bytes]:
        return self.hasher.chain(b"".join(map(self.block_tokens, sequence.symbols)), sequence.salt)

    def allocate(self, count: int) -> list[int] | None:
        """Pages, checked against the model; None if there are too few, in which case nothing has changed."""
        available = len(self.model.free()) + len(self.model.cached())
        if count > available:
            with pytest.raises(OutOfPages, match=rf"^{count} pages .* {available} "):
                self.pool.allocate(count)
            return None
        evicted = []
        while count > len(self.model.free()):
            evicted += self.model.evict()
        free = self.model.free()
        allocation = self.pool.allocate(count)
        assert allocation.evicted == evicted
        assert set(allocation.pages) <= free
        assert len(set(allocation.pages)) == count
        self.expect_removed(evicted)
        return allocation.pages

    def expect_removed(self, digests: list[bytes]) -> None:
        self.expected += [("removed", event_hash(digest)) for digest in digests]

    @rule(
        symbols=st.sampled_from([(0,), (0, 0), (0, 0, 0), (0, 1), (0, 0, 1), (1,), (1, 0, 0, 1, 1)]),
        salt=st.sampled_from([None, None, None, "tenant"]),
        hits=st.booleans(),
        seals=st.booleans(),
    )
    def admit(self, symbols: tuple[int, ...], salt: str | None, hits: bool, seals: bool) -> None:
        """A new request; without `hits` it looks too early and computes copies; `seals` computes it at once."""
        sequence = Sequence(list(symbols), salt)
        digests = self.digests(sequence)
        limit = max_hit_blocks(len(symbols) * self.page_size, self.page_size) if hits else 0
        hit = self.pool.match(digests, limit)
        run = [self.model.owners.get(digest) for digest in digests[:limit]]
        assert hit == run[: run.index(None) if None in run else limit]
        assert self.pool.evictable(hit) == len(set(hit) & self.model.cached())

        self.pool.acquire(hit)
        self.model.holders.append(hit)
        pages = self.allocate(len(symbols) - len(hit))
        if pages is None:
            self.pool.release(hit)
            self.model.release(hit)
            return
        self.model.drop(hit)
        sequence.pages, sequence.sealed = hit + pages, len(hit)
        self.model.holders.append(sequence.pages)
        self.sequences.append(sequence)
        if seals:
            self.seal_blocks(sequence, len(symbols))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), symbol=st.integers(0, 1))
    def grow(self, data: st.DataObject, symbol: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        pages = self.allocate(1)
        if pages is not None:
            sequence.symbols.append(symbol)
            sequence.pages += pages

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.sampled_from([1, 2, 5]))
    def seal(self, data: st.DataObject, count: int) -> None:
        self.seal_blocks(data.draw(st.sampled_from(self.sequences)), count)

    def seal_blocks(self, sequence: Sequence, count: int) -> None:
        """Seal the next `count` blocks of a sequence, as far as it goes."""
        digests = self.digests(sequence)
        for block in range(sequence.sealed, min(sequence.sealed + count, len(digests))):
            page, digest = sequence.pages[block], digests[block]
            parent = digests[block - 1] if block else None
            sealed = SealedBlock(digest, parent, self.block_tokens(sequence.symbols[block]), sequence.salt)
            is_owner = self.model.seal(page, digest)
            assert self.pool.seal(page, sealed) == is_owner
            if is_owner:
                parent_hash = event_hash(parent) if parent else None
                self.expected.append(("stored", event_hash(digest), parent_hash, sealed.tokens, sequence.salt))
            with pytest.raises(PageStateError, match="twice"):
                self.pool.seal(page, sealed)
            sequence.sealed += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        pages = list(data.draw(st.sampled_from(self.sequences)).pages)
        self.pool.acquire(pages)
        self.model.holders.append(pages)
        self.pins.append(pages)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pages = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.pool.release(pages)
        self.model.release(pages)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.pool.release(sequence.pages)
        self.model.release(sequence.pages)

    @rule()
    def drain(self) -> None:
        """Replaying all events gives the index, and they tell of every block once: however they were merged."""
        self.events += self.pool.events.drain()
        assert replay(self.events) == {event_hash(digest) for digest in self.model.owners}
        assert one_by_one(self.events, self.page_size) == self.expected

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        self.pool.check()
        model, pool = self.model, self.pool
        counts = (pool.free_pages, pool.cached_pages, pool.referenced_pages)
        assert counts == (len(model.free()), len(model.cached()), len(set(model.references())))
        assert pool.free_pages + pool.cached_pages + pool.referenced_pages == USABLE_PAGES
        assert pool.available == pool.free_pages + pool.cached_pages
        assert pool.index.owners == model.owners

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.drain()
        for pages in [*self.pins, *(sequence.pages for sequence in self.sequences)]:
            self.pool.release(pages)
        self.pool.check()
        assert self.pool.referenced_pages == 0


PoolMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


@given(tokens=st.integers(1, 1 << 20), page_size=st.sampled_from(PAGE_SIZES))
def test_a_hit_leaves_a_token_to_compute_and_no_more_than_a_page(tokens: int, page_size: int) -> None:
    computed = tokens - max_hit_blocks(tokens, page_size) * page_size
    assert 1 <= computed <= page_size


@given(st.lists(st.integers(0, 40), unique=True), st.lists(st.integers(0, 40)), st.integers(-2, 50))
def test_match_is_the_longest_cached_run(cached: list[int], asked: list[int], limit: int) -> None:
    index = PrefixIndex()
    for page, name in enumerate(cached, 1):
        index.insert(bytes([name]), page)
    run = 0
    while run < min(len(asked), limit) and asked[run] in cached:
        run += 1
    assert index.match([bytes([name]) for name in asked], limit) == [cached.index(name) + 1 for name in asked[:run]]
