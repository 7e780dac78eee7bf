"""FlashInfer's plan for its FA3 paged-prefill kernel on sm90, made here: which CTA computes which query tile.

Follows `PrefillSM90Plan` in FlashInfer 0.6.18.post1 (include/flashinfer/attention/scheduler.cuh): the kernel is
persistent, one CTA on each SM, and tiles go to the CTA with the least work so far. Ties are broken by the lowest CTA
rather than by the C++ library's heap, which changes no CTA's load (recorded loads are the test) and no result.
"""

from dataclasses import dataclass
from heapq import heapreplace

import numpy as np

from engine.cuda.planner import Array, AttentionShape
from engine.cuda.policy import fa3_tile_q

MAX_WORKS_PER_HEAD = 4096
"""Above this bound FlashInfer lists the tiles of one head and lets every head follow the same list."""


@dataclass(frozen=True, slots=True)
class Fa3Size:
    """A plan's numbers, known before anything is written. Arrays are int64."""

    queries: Array
    """`[rows]`, as are the lengths; the next three have one entry for each tile of a head."""
    lengths: Array
    tile_rows: Array
    """Row of each tile, the longest row first."""
    tile_indices: Array
    """Tile within the row, the last first."""
    costs: Array
    """Work of the tile, in KV tokens."""
    heads: int
    """Heads that are listed: 1 with `same_schedule`."""
    same_schedule: bool

    @property
    def works(self) -> int:
        """Entries of the work lists."""
        return len(self.costs) * self.heads


def max_works_per_head(query_rows: int, rows: int, head_dim: int) -> int:
    """Bound on the tiles of `query_rows` query tokens in at most `rows` rows."""
    return -(-query_rows // fa3_tile_q(head_dim)) + rows - 1


def size_fa3(queries: Array, lengths: Array, shape: AttentionShape) -> Fa3Size:
    """Size a causal plan for rows with `queries` query tokens at the end of `lengths` tokens (int64 `[rows]`)."""
    if not len(queries) or int(queries.min()) < 1 or bool((lengths < queries).any()):
        raise ValueError("every row of a plan needs 1 <= query tokens <= length, and a plan at least one row")
    tile_q = fa3_tile_q(shape.head_dim)
    same = max_works_per_head(int(queries.sum()), len(queries), shape.head_dim) > MAX_WORKS_PER_HEAD
    order = np.argsort(-lengths, kind="stable")
    tiles = -(-queries[order] // tile_q)
    rows = np.repeat(order, tiles)
    ends = np.cumsum(tiles)
    indices = np.repeat(ends, tiles) - 1 - np.arange(int(ends[-1]))
    # A tile sees the keys up to its last query; the row's last tile sees all.
    seen = np.minimum(lengths[rows] - queries[rows] + (indices + 1) * tile_q, lengths[rows])
    return Fa3Size(queries, lengths, rows, indices, 2 * tile_q + seen, 1 if same else shape.heads, same)


@dataclass(frozen=True, slots=True)
class Fa3Buffers:
    """Where the work lists are written; int32. `[works]` but for `work_indptr`, `[SMs + 1]`."""

    work_indptr: Array
    """Where each CTA's works begin."""
    qo_tile_indices: Array
    qo_indptr: Array
    """First query token of the work's row."""
    kv_indptr: Array
    """First entry of the row's pages in the page list."""
    qo_lens: Array
    kv_lens: Array
    head_indices: Array
    batch_indices: Array
    """Row of each work."""


def assign(costs: list[int], heads: int, ctas: int) -> list[int]:
    """CTA of every work: tiles in order, once for each head, each to the CTA with the least work so far."""
    # One number holds load and CTA, so that the heap compares plain integers.
    heap = list(range(ctas))
    steps = [cost * ctas for cost in costs]
    assigned = []
    for _ in range(heads):
        for step in steps:
            least = heap[0]
            assigned.append(least % ctas)
            heapreplace(heap, least + step)
    return assigned


def fill_fa3(size: Fa3Size, first_pages: Array, sm_count: int, out: Fa3Buffers) -> None:
    """Write the work lists. `first_pages[i]` is where row i's pages begin in the page list."""
    works, queries = size.works, size.queries
    ctas = np.asarray(assign(size.costs.tolist(), size.heads, sm_count))
    order = np.argsort(ctas, kind="stable")
    out.work_indptr[0] = 0
    np.cumsum(np.bincount(ctas, minlength=sm_count), out=out.work_indptr[1 : sm_count + 1])
    tile = order % len(size.costs)
    rows = size.tile_rows[tile]
    out.qo_tile_indices[:works] = size.tile_indices[tile]
    out.head_indices[:works] = order // len(size.costs)
    out.batch_indices[:works] = rows
    out.qo_indptr[:works] = (np.cumsum(queries) - queries)[rows]
    out.kv_indptr[:works] = first_pages[rows]
    out.qo_lens[:works] = queries[rows]
    out.kv_lens[:works] = size.lengths[rows]
