"""Page pool: cases worth a name. What holds under any order of calls is in tests/property/test_pool.py."""

import pytest

from kv.budget import KvCapacity
from kv.events import Stored, replay
from kv.hashing import Blake2bHasher, event_hash, pack_tokens
from kv.pool import OutOfPages, PagePool, PageStateError, SealedBlock

PAGE_SIZE = 16
HASHER = Blake2bHasher(PAGE_SIZE)


def blocks(*symbols: int, salt: str | None = None) -> list[SealedBlock]:
    """Consecutive blocks, each of one repeated token id."""
    tokens = [pack_tokens([symbol] * PAGE_SIZE) for symbol in symbols]
    digests = HASHER.chain(b"".join(tokens), salt)
    return [SealedBlock(d, p, t, salt) for d, p, t in zip(digests, [None, *digests], tokens, strict=False)]


def pool_of(pages: int) -> PagePool:
    return PagePool(KvCapacity(pages, PAGE_SIZE))


def store(pool: PagePool, sequence: list[SealedBlock]) -> list[int]:
    """Compute a sequence without looking at the cache; its pages stay referenced."""
    pages = pool.allocate(len(sequence)).pages
    for page, block in zip(pages, sequence, strict=True):
        pool.seal(page, block)
    return pages


def test_the_padding_page_is_never_handed_out() -> None:
    assert sorted(pool_of(5).allocate(5).pages) == [1, 2, 3, 4, 5]


def test_out_of_pages_names_both_numbers_and_changes_nothing() -> None:
    pool = pool_of(4)
    pool.release(store(pool, blocks(1, 2)))
    pool.allocate(1)
    pool.events.drain()
    with pytest.raises(OutOfPages, match="4 pages are needed, but 3 are") as error:
        pool.allocate(4)
    assert (error.value.asked, error.value.available) == (4, 3)
    assert (pool.free_pages, pool.cached_pages, pool.referenced_pages) == (1, 2, 1)
    assert pool.events.drain() == []


def test_a_sequence_is_evicted_from_its_tail() -> None:
    pool = pool_of(3)
    sequence = blocks(1, 2, 3)
    digests = [block.digest for block in sequence]
    pages = store(pool, sequence)
    pool.release(pages)
    assert pool.allocate(1).evicted == [digests[2]]
    assert pool.match(digests, 3) == pages[:2]


def test_a_hit_protects_a_page_from_eviction() -> None:
    pool = pool_of(2)
    (first,), (second,) = blocks(1), blocks(2)
    pool.release(store(pool, [first]))
    pool.release(store(pool, [second]))
    hit = pool.match([first.digest], 1)
    assert pool.evictable(hit) == 1
    pool.acquire(hit)
    assert pool.evictable(hit) == 0
    assert pool.allocate(1).evicted == [second.digest]


def test_a_block_computed_twice_is_stored_once_and_its_copy_is_freed() -> None:
    pool = pool_of(4)
    (block,) = blocks(1)
    (owner,) = pool.allocate(1).pages
    (copy,) = pool.allocate(1).pages
    assert pool.seal(owner, block)
    assert not pool.seal(copy, block)
    pool.release([copy])
    assert (pool.free_pages, pool.cached_pages) == (3, 0)
    pool.release([owner])
    assert (pool.free_pages, pool.cached_pages) == (3, 1)
    assert pool.events.drain() == [Stored([event_hash(block.digest)], None, block.tokens, None)]


def test_a_copy_takes_over_when_the_owner_is_evicted() -> None:
    # Without this, the second sequence's next block would be stored under a parent that the router has just lost.
    pool = pool_of(3)
    parent, child = blocks(1, 2)
    (owner,) = store(pool, [parent])
    copy, tail = pool.allocate(2).pages
    assert not pool.seal(copy, parent)
    pool.release([owner])
    assert pool.allocate(1).evicted == []
    assert pool.match([parent.digest], 1) == [copy]
    assert pool.seal(tail, child)
    assert len(replay(pool.events.drain())) == 2


def test_releasing_a_copy_keeps_its_owner_longer_than_the_blocks_that_follow() -> None:
    # The owner was used before the child; without the touch it would be evicted first and leave the child unreachable.
    pool = pool_of(3)
    parent, child = blocks(1, 2)
    owner = store(pool, [parent])
    copy = pool.allocate(2).pages
    pool.seal(copy[0], parent)
    pool.seal(copy[1], child)
    pool.release(owner)
    pool.release(copy)
    assert pool.allocate(2).evicted == [child.digest]
    assert pool.allocate(1).evicted == [parent.digest]
    assert replay(pool.events.drain()) == set()


def test_unsealed_pages_become_free() -> None:
    pool = pool_of(3)
    pages = pool.allocate(3).pages
    pool.seal(pages[0], blocks(1)[0])
    pool.release(pages)
    assert (pool.free_pages, pool.cached_pages) == (2, 1)


def test_tenants_do_not_share() -> None:
    pool = pool_of(2)
    store(pool, blocks(1, salt="one"))
    assert pool.match([block.digest for block in blocks(1, salt="two")], 1) == []


def test_wrong_states_are_refused() -> None:
    pool = pool_of(3)
    parent, child = blocks(1, 2)
    (page,) = pool.allocate(1).pages
    with pytest.raises(PageStateError, match="page 3 is acquired, but it is free"):
        pool.acquire([3])
    with pytest.raises(PageStateError, match="page 3 is released, but nobody references it"):
        pool.release([3])
    with pytest.raises(PageStateError, match="page 3 is sealed, but nobody references it"):
        pool.seal(3, parent)
    with pytest.raises(PageStateError, match="before its parent block"):
        pool.seal(page, child)
    assert pool.seal(page, parent)
    with pytest.raises(PageStateError, match="page 1 is sealed twice"):
        pool.seal(page, parent)


def test_check_finds_a_page_that_was_lost() -> None:
    pool = pool_of(3)
    pages = pool.allocate(2).pages
    pool.check()
    pool._references[pages[0]] = 0
    with pytest.raises(PageStateError, match="in no state"):
        pool.check()
