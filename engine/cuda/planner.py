"""FlashInfer's plan for its FA2 paged-attention kernel, made in numpy: which tile computes which part of which row.

Rules follow `PrefillSplitQOKVIndptr` in FlashInfer 0.6.18.post1 (include/flashinfer/attention/scheduler.cuh); recorded
plans of that code are the test. A *tile* is `tile_q` packed queries (query tokens x query heads of a group) of one row
against one chunk of its KV; the kernel's grid is tiles x KV heads. Where a row's KV has several chunks, the kernel
writes partial results that a second kernel merges.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MIN_CHUNK_TOKENS = 128
"""FlashInfer splits no finer than this."""
_CANDIDATES = 16
"""Chunk sizes that the search counts at once: two rounds of numpy calls where halving takes seven."""
_FEW = 32
"""Rows up to which plain Python sums and counts faster than numpy: 1.2 us for the summary of 16, against 2.7."""


@dataclass(frozen=True)
class AttentionShape:
    """What a plan depends on besides the rows."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    sm_count: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @cached_property
    def split_budget(self) -> int:
        """Tiles that fill the card, two CTAs on each SM: FlashInfer's bound on the tiles of a split plan."""
        return max(2 * self.sm_count // self.kv_heads, 1)

    @cached_property
    def min_chunk_pages(self) -> int:
        """Pages of the smallest KV chunk."""
        return max(MIN_CHUNK_TOKENS // self.page_size, 1)


class Summary(NamedTuple):
    """Of int64 `[rows]` with at least one row."""

    least: int
    most: int
    total: int


def summary(values: Array) -> Summary:
    """In plain Python where that is faster than three numpy calls."""
    if len(values) <= _FEW:
        listed = values.tolist()
        return Summary(min(listed), max(listed), sum(listed))
    return Summary(int(np.minimum.reduce(values)), int(np.maximum.reduce(values)), int(np.add.reduce(values)))


def tile_q_for(packed_queries: int, head_dim: int) -> int:
    """Packed queries of a tile, for rows of `packed_queries` on average: `FA2DetermineCtaTileQ` for sm80 and later,
    head dims up to 256 and a KV cache of two bytes an element.
    """
    if packed_queries > 64 and head_dim < 256:
        return 128
    return 64 if packed_queries > 16 else 16


class Fa2Size(NamedTuple):
    """A plan's numbers, known before anything is written. Arrays are int64 `[rows]`."""

    tile_q: int
    split: bool
    """Partial results are written and merged. Also true of a plan for a graph in which no row has several chunks."""
    chunk_pages: int
    """Pages of a KV chunk; without split, at least those of the longest row."""
    queries: Array
    row_tiles: Array
    """Query tiles of each row."""
    row_chunks: Array
    """KV chunks of each row, at least 1."""
    tiles: int
    padded_tiles: int
    """Grid of the kernel: `tiles`, or more under a graph, where a mask switches the surplus off."""
    query_rows: int
    partial_rows: int
    """Rows of `heads x head_dim` partial results: sum of queries x chunks. 0 without split."""
    masked: bool
    """The plan is made for a captured launch, whose grid is fixed."""


def search_chunk_pages(row_tiles: Array, pages: Array, shape: AttentionShape) -> int:
    """Fewest pages in a KV chunk so that all tiles fit `split_budget` (`PrefillBinarySearchKVChunkSize`).

    If even whole rows do not fit, the answer is the longest row: no split. Arguments are int64 `[rows]`.
    """
    whole, work = int(np.add.reduce(row_tiles)), int(row_tiles @ pages)
    low, high = _chunk_bounds(whole, work, int(np.maximum.reduce(pages)), shape.split_budget, shape)
    before_last = pages - 1

    def tiles(chunks: Array) -> Array:
        return before_last // chunks[:, None] @ row_tiles + whole

    return _fewest(low, high, tiles, shape.split_budget)


def search_even_chunk_pages(pages: Array, of: Summary, row_tiles: int, shape: AttentionShape, most: int) -> int:
    """The same for rows of `row_tiles` tiles each, `of` being their summary; more than `most` pages are `most + 1` or
    above.
    """
    rows, budget = len(pages), shape.split_budget // row_tiles
    if of.most == of.least and rows <= budget:
        return max(shape.min_chunk_pages, -(-of.most // (budget // rows)))
    low, high = _chunk_bounds(rows, of.total, of.most, budget, shape)
    if high > most:
        high = max(low, most + 1)
    return _fewest_even(low, high, pages, of.total, budget)


def _fewest_even(low: int, high: int, pages: Array, total: int, budget: int) -> int:
    """The least of `low` to `high` that cuts rows of `pages` into at most `budget` chunks; `high` is taken to do so.

    Rounding up adds half a chunk a row, about: that gives the first guess, and each count corrects the next one. Every
    third guess halves, so that the search ends as soon as halving would, but for a factor of 3.
    """
    if low == high:
        return low
    rows, surplus, tries = len(pages), len(pages) / 2, 0
    before_last = pages - 1
    listed = before_last.tolist() if rows <= _FEW else None
    while low < high:
        tries += 1
        if tries % 3:
            guess = min(max(int(total / (budget - surplus)) if surplus < budget else high, low), high - 1)
        else:
            guess = (low + high) // 2
        if listed is not None:
            chunks = sum([count // guess for count in listed]) + rows
        else:
            chunks = int(np.add.reduce(before_last // guess)) + rows
        if chunks > budget:
            low = guess + 1
        else:
            high = guess
        surplus = chunks - total / guess
    return low


def _chunk_bounds(whole: int, work: int, longest: int, budget: int, shape: AttentionShape) -> tuple[int, int]:
    """Fewest pages in a chunk: at least and at most. `whole` tiles without split read `work` pages together."""
    least = shape.min_chunk_pages
    if longest <= least or whole > budget:
        return max(longest, least), max(longest, least)
    # A row of p pages has at least p / c and at most (p + c - 1) / c chunks of c pages.
    low = max(least, -(-work // budget))
    high = longest if whole == budget else min(longest, -(-(work - whole) // (budget - whole)))
    return low, max(low, high)


def _fewest(low: int, high: int, tiles: Callable[[Array], Array], budget: int) -> int:
    """The least of `low` to `high` with `tiles` within `budget`; `high` is taken to have."""
    while low < high:
        chunks = np.arange(low, high, -(-(high - low) // _CANDIDATES))
        too_small = int(np.count_nonzero(tiles(chunks) > budget))
        if too_small < len(chunks):
            high = int(chunks[too_small])
        if too_small:
            low = int(chunks[too_small - 1]) + 1
    return low


def size_fa2(
    queries: Array,
    pages: Array,
    shape: AttentionShape,
    tile_q: int,
    chunk_pages: int | None,
    *,
    padded_tiles: int | None = None,
) -> Fa2Size:
    """Size a plan for rows with `queries` query tokens and `pages` pages each (int64 `[rows]`, both at least 1).

    `chunk_pages` splits the KV of every row into chunks of so many pages; None leaves rows whole. `padded_tiles` makes
    the plan for a graph whose grid is fixed: it must be split, since FlashInfer's kernel heeds the mask only then.
    Raises `ValueError` for rows that no plan can hold and for tiles beyond `padded_tiles`.
    """
    if not len(queries) or int(queries.min()) < 1 or int(pages.min()) < 1:
        raise ValueError("every row of a plan needs at least one query token and one page, and a plan at least one row")
    if padded_tiles is not None and chunk_pages is None:
        raise ValueError("a plan with a padded grid must be split: without split, FlashInfer's kernel ignores the mask")
    row_tiles = -(-(queries * shape.group) // tile_q)
    longest = int(pages.max())
    row_chunks = np.ones_like(pages) if chunk_pages is None else -(-pages // chunk_pages)
    split = chunk_pages is not None and (padded_tiles is not None or chunk_pages < longest)
    tiles = int(row_tiles @ row_chunks)
    if padded_tiles is not None and tiles > padded_tiles:
        raise ValueError(f"the plan has {tiles} tiles, but the graph's grid {padded_tiles}: lengthen the KV chunks")
    return Fa2Size(
        tile_q=tile_q,
        split=split,
        chunk_pages=longest if chunk_pages is None else chunk_pages,
        queries=queries,
        row_tiles=row_tiles,
        row_chunks=row_chunks,
        tiles=tiles,
        padded_tiles=tiles if padded_tiles is None else padded_tiles,
        query_rows=int(queries.sum()),
        partial_rows=int(queries @ row_chunks) if split else 0,
        masked=padded_tiles is not None,
    )


@dataclass(frozen=True, slots=True)
class Fa2Buffers:
    """Where a plan is written: int32, but `block_valid_mask` uint8 and `total_num_rows` the bits of a uint32.

    Lengths are capacities; `[n]` below is what a plan uses.
    """

    request_indices: Array
    """`[padded_tiles]`: row of each tile."""
    qo_tile_indices: Array
    """`[padded_tiles]`: query tile within the row."""
    kv_tile_indices: Array
    """`[padded_tiles]`: KV chunk within the row."""
    o_indptr: Array
    """`[rows + 1]`: where the rows' results begin, in rows of `heads x head_dim`; partial ones if split."""
    merge_indptr: Array
    """`[query_rows + 1]`: where the partial results of each query token begin."""
    block_valid_mask: Array
    """`[padded_tiles]`: 1 for a tile that computes."""
    kv_chunk_size: Array
    """`[1]`: tokens of a KV chunk."""
    total_num_rows: Array
    """`[1]`: query rows."""


def fill_fa2(size: Fa2Size, page_size: int, out: Fa2Buffers) -> None:
    """Write the plan. Nothing else is written; capacities have been checked."""
    rows, tiles, padded = len(size.queries), size.tiles, size.padded_tiles
    per_row = size.row_tiles * size.row_chunks
    ends = np.cumsum(per_row)
    of_row = np.repeat(np.arange(rows), per_row)
    within = np.arange(tiles) - np.repeat(ends - per_row, per_row)
    out.request_indices[:tiles] = of_row
    if tiles == rows:
        out.qo_tile_indices[:tiles] = 0
        out.kv_tile_indices[:tiles] = 0
    else:
        chunks = np.repeat(size.row_chunks, per_row)
        out.qo_tile_indices[:tiles], out.kv_tile_indices[:tiles] = np.divmod(within, chunks)
    for array in (out.request_indices, out.qo_tile_indices, out.kv_tile_indices):
        array[tiles:padded] = 0
    out.o_indptr[0] = 0
    np.cumsum(size.queries * size.row_chunks, out=out.o_indptr[1 : rows + 1])
    out.kv_chunk_size[0] = size.chunk_pages * page_size
    out.total_num_rows[0] = size.query_rows
    if size.split:
        out.merge_indptr[0] = 0
        np.cumsum(np.repeat(size.row_chunks, size.queries), out=out.merge_indptr[1 : size.query_rows + 1])
        out.block_valid_mask[:tiles] = 1
        out.block_valid_mask[tiles:padded] = 0
