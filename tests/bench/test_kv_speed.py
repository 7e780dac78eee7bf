"""Time that the page bookkeeping takes out of a step. Each figure is the best of several runs: noise only ever adds."""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from kv.budget import KvCapacity
from kv.geometry import PAGE_SIZES
from kv.hashing import Blake2bHasher, pack_tokens, split_digests
from kv.pool import PagePool, SealedBlock
from kv.table import PageTables

pytestmark = pytest.mark.speed

ROWS = 256
POOL_PAGES = 50_000
PROMPT_BLOCKS = 8_192
MATCH_BAR_MS = 1.5
STEP_BAR_MS = 1.0
PATIENCE_S = 20.0


def milliseconds(action: Callable[[], object]) -> float:
    """CPU time of this thread: what other processes take of the core does not count."""
    start = time.thread_time()
    action()
    return (time.thread_time() - start) * 1e3


def best_of(measure: Callable[[], float], bar: float) -> float:
    """Least of at least 15 measurements; on a busy machine, go on until one meets the bar or `PATIENCE_S` is over."""
    end = time.monotonic() + PATIENCE_S
    best = min(measure() for _ in range(15))
    while best > bar and time.monotonic() < end:
        best = min(best, measure())
    return best


def test_match_of_a_128k_prompt() -> None:
    """8,192 digests against 50,000 sealed pages, which requests took turns to seal in chunks of 32 blocks."""
    hasher = Blake2bHasher(16)
    pool = PagePool(KvCapacity(POOL_PAGES, 16))
    rng = random.Random(1)
    prompt = hasher.chain(pack_tokens([rng.randrange(151_936) for _ in range(PROMPT_BLOCKS * 16)]))
    digests = [*prompt, *(rng.randbytes(16) for _ in range(POOL_PAGES - PROMPT_BLOCKS))]
    starts = list(range(0, POOL_PAGES, 32))
    rng.shuffle(starts)
    pages = pool.allocate(POOL_PAGES).pages
    for start in starts:
        for number in range(start, min(start + 32, POOL_PAGES)):
            pool.index.insert(digests[number], pages[number])
    packed = b"".join(prompt)
    assert pool.match(prompt, PROMPT_BLOCKS) == pages[:PROMPT_BLOCKS]

    def measure() -> float:
        # A request brings its own bytes objects, whose Python hashes have not been computed yet.
        asked = split_digests(packed, hasher.digest_size)
        return milliseconds(partial(pool.match, asked, PROMPT_BLOCKS))

    best = best_of(measure, MATCH_BAR_MS)
    print(f"\nmatch: best {best:.2f} ms, bar {MATCH_BAR_MS} ms")
    assert best <= MATCH_BAR_MS


class Batch:
    """256 rows that decode for ever in a pool without a free page, so that every page is gained by an eviction."""

    def __init__(self, page_size: int, *, staggered: bool) -> None:
        self.page_size = page_size
        self.hasher = Blake2bHasher(page_size)
        self.pool = PagePool(KvCapacity(POOL_PAGES, page_size))
        self.tables = PageTables(ROWS)
        self.rng = random.Random(2)
        self.lengths = [page_size + (row % page_size if staggered else 0) for row in range(ROWS)]
        self.parents: list[bytes | None] = [None] * ROWS
        # The same tokens again and again: a block's digest differs by its parent.
        self.tokens = [self.rng.randbytes(page_size * 4) for _ in range(ROWS)]
        self.pages = [[page] for page in self.pool.allocate(ROWS).pages]
        for row, pages in enumerate(self.pages):
            self.tables.begin(row, pages)
            if self.lengths[row] % page_size:
                self.seal(row, self.hash(row))
                self.grow(row, self.pool.allocate(1).pages[0])
        self.fill()
        self.tables.drain()
        self.pool.events.drain()

    def fill(self) -> None:
        """Cache blocks of other requests on every page that is left."""
        pages = self.pool.allocate(self.pool.free_pages).pages
        for page in pages:
            self.pool.seal(page, SealedBlock(self.rng.randbytes(16), None, bytes(self.page_size * 4), None))
        self.pool.release(pages)

    def hash(self, row: int) -> bytes:
        """Digest of the block that ends at the row's length."""
        return self.hasher.extend(self.parents[row] or self.hasher.root(None), self.tokens[row])

    def seal(self, row: int, digest: bytes) -> None:
        self.pool.seal(self.pages[row][-1], SealedBlock(digest, self.parents[row], self.tokens[row], None))
        self.parents[row] = digest

    def grow(self, row: int, page: int) -> None:
        self.pages[row].append(page)
        self.tables.append(row, page)

    def full_rows(self) -> list[int]:
        """Rows whose last page was filled by the step before."""
        return [row for row, length in enumerate(self.lengths) if length % self.page_size == 0]

    def step(self, hashed: Sequence[bytes] = ()) -> None:
        """Hash (unless done) and seal full pages, allocate for this step, collect events and table differences."""
        full = self.full_rows()
        for row, digest in zip(full, hashed or map(self.hash, full), strict=True):
            self.seal(row, digest)
        for row, page in zip(full, self.pool.allocate(len(full)).pages, strict=True):
            self.grow(row, page)
        self.lengths = [length + 1 for length in self.lengths]
        self.tables.drain()
        self.pool.events.drain()

    def page_of_steps(self) -> None:
        """As many steps as it takes every row to fill one page."""
        for _ in range(self.page_size):
            self.step()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_bookkeeping_of_a_step_with_256_rows(page_size: int) -> None:
    """Rows that reach their page boundaries one by one, hashing included: the mean over a page of steps."""
    batch = Batch(page_size, staggered=True)
    best = best_of(lambda: milliseconds(batch.page_of_steps) / page_size, STEP_BAR_MS)
    batch.pool.check()
    assert batch.pool.events.removed_blocks >= ROWS * 15
    print(f"\nstep, page {page_size}, staggered rows: best {best:.3f} ms, bar {STEP_BAR_MS} ms")
    assert best <= STEP_BAR_MS


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_bookkeeping_of_the_step_in_which_all_rows_fill_their_page(page_size: int) -> None:
    """The worst step, once in a page of steps: 256 blocks sealed, as many evicted. Hashing stands apart."""
    batch = Batch(page_size, staggered=False)
    hash_times = []

    def measure() -> float:
        digests: list[bytes] = []
        hash_times.append(milliseconds(lambda: digests.extend(map(batch.hash, range(ROWS)))))
        step_time = milliseconds(partial(batch.step, digests))
        for _ in range(page_size - 1):
            batch.step()
        return step_time

    best = best_of(measure, STEP_BAR_MS)
    batch.pool.check()
    assert batch.pool.events.removed_blocks >= ROWS * 15
    print(
        f"\nstep, page {page_size}, all rows at the boundary: best {best:.3f} ms, bar {STEP_BAR_MS} ms, "
        f"and {min(hash_times):.3f} ms to hash the blocks"
    )
    assert best <= STEP_BAR_MS
