"""Plans the attention of each step into the lane's arena: sizes all, checks all, then writes and queues one copy."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from engine.cuda.fa3 import Fa3Buffers, Fa3Size, fill_fa3, size_fa3
from engine.cuda.flashinfer_raw import Signatures
from engine.cuda.layout import FA3_LISTS, AttentionCapacity, AttentionLayout, Range
from engine.cuda.planner import (
    Array,
    Fa2Buffers,
    Fa2Size,
    fill_fa2,
    search_chunk_pages,
    size_fa2,
    tile_q_for,
)
from engine.cuda.policy import DecodeRows, chunk_kernel, decode_chunk_pages, max_decode_tiles, splits, uses_xqa
from engine.cuda.staging import CopyDevice, StagingRing
from engine.plan import PlanError

Kernel = Literal["fa2", "fa3", "xqa"]


class Launch(NamedTuple):
    """How to compute one part of a step's rows: its decode rows or its chunks."""

    kernel: Kernel
    split: bool
    """KV is split and partial results are merged (FA2)."""
    rows: int
    """Rows of the launch; with a bucket, the bucket."""
    tokens: int
    """Query tokens of the launch."""
    info: list[int]
    """FlashInfer's `plan_info`; empty for XQA, which has no plan. In a bucket it is the same in every step with the
    same kernel and split, as a captured launch needs.
    """


class PlannedStep(NamedTuple):
    """The attention of a step. Decode rows come first, in rows, tokens and page lists; chunks follow."""

    decode: Launch | None
    chunks: Launch | None


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, int64 arrays. A decode row has one query token; lengths count the step's own tokens."""

    decode_lengths: Array
    chunk_tokens: Array
    chunk_lengths: Array


@dataclass(frozen=True, slots=True)
class _Sizes:
    """All numbers of a step's plans, before anything is written."""

    decode: Fa2Size | None
    decode_kernel: Kernel
    decode_rows: int
    chunks: Fa2Size | Fa3Size | None
    first_pages: Array
    """Where the pages of each chunk's row begin in the step's page list."""


class _Staged:
    """The plans' arrays in one staging buffer."""

    def __init__(self, staging: Array, layout: AttentionLayout) -> None:
        def array(name: str) -> Array:
            buffer = layout.buffers[name]
            return staging[buffer.offset : buffer.offset + buffer.nbytes].view(buffer.dtype)

        fa2 = [[array(f"{prefix}_{name}") for name in Fa2Buffers.__slots__] for prefix in ("decode", "chunk")]
        self.decode, self.chunks = (Fa2Buffers(*arrays) for arrays in fa2)
        lists = ("work_indptr", *FA3_LISTS) if layout.capacity.sm90 else ()
        self.fa3 = Fa3Buffers(*(array(f"fa3_{name}") for name in lists)) if lists else None


class AttentionPlans:
    """The plans of the last step that fitted. `update` may be called while copies of earlier steps are queued."""

    def __init__(self, layout: AttentionLayout, raw: Signatures, device: CopyDevice, slots: int = 3) -> None:
        """`slots` staging buffers: one more than there may be steps in flight."""
        self.layout = layout
        self.current = PlannedStep(None, None)
        self._capacity = layout.capacity
        self._shape = layout.capacity.shape
        self._raw = raw
        self._ring = StagingRing(device, layout.staged_nbytes, slots, lambda memory: _Staged(memory, layout))
        self._offsets = {name: buffer.offset for name, buffer in layout.buffers.items()}

    def update(self, rows: StepRows, bucket: int | None = None) -> PlannedStep:
        """Plan a step and queue the copy of its plans.

        With `bucket`, decode rows are filled up to so many with rows of one token, and the launch has a fixed grid;
        chunks are not allowed beside them. Raises `PlanError` if a number exceeds its capacity and `ValueError` for
        rows that cannot be; then nothing has been written and the last plan stays.
        """
        _check_rows(rows, bucket, self._capacity)
        sizes = self._size(rows, bucket)
        self._check_sizes(sizes)
        if sizes.decode is not None or sizes.chunks is not None:
            self._write(sizes, self._ring.acquire())
            self._ring.submit(self._used(sizes))
        self.current = PlannedStep(self._decode_launch(sizes), self._chunk_launch(sizes))
        return self.current

    def _size(self, rows: StepRows, bucket: int | None) -> _Sizes:
        page_size = self._capacity.step.page_size
        decode_pages = -(-rows.decode_lengths // page_size)
        chunk_pages = -(-rows.chunk_lengths // page_size)
        first_pages = int(decode_pages.sum()) + np.cumsum(chunk_pages) - chunk_pages
        count = len(decode_pages) if bucket is None else bucket
        chunks = self._size_chunks(rows, chunk_pages) if len(rows.chunk_tokens) else None
        if not count:
            return _Sizes(None, "fa2", 0, chunks, first_pages)
        lengths = rows.decode_lengths
        step = DecodeRows(count, int(lengths.max(initial=1)), int(lengths.sum()) + count - len(lengths))
        if self._capacity.xqa and uses_xqa(step, self._shape):
            return _Sizes(None, "xqa", count, chunks, first_pages)
        decode_pages = np.append(decode_pages, np.ones(count - len(lengths), np.int64))
        return _Sizes(self._size_decode(decode_pages, step, bucket), "fa2", count, chunks, first_pages)

    def _size_decode(self, pages: Array, step: DecodeRows, bucket: int | None) -> Fa2Size:
        shape, tiles = self._shape, self._capacity.decode_row_tiles
        ones = np.ones(step.rows, np.int64)
        if not splits(step, shape):
            return size_fa2(ones, pages, shape, self._capacity.decode_tile_q, None)
        chunk_pages = decode_chunk_pages(pages, shape, tiles)
        grid = None if bucket is None else max_decode_tiles(bucket, tiles, shape)
        return size_fa2(ones, pages, shape, self._capacity.decode_tile_q, chunk_pages, padded_tiles=grid)

    def _size_chunks(self, rows: StepRows, pages: Array) -> Fa2Size | Fa3Size:
        queries, shape = rows.chunk_tokens, self._shape
        if self._capacity.sm90 and chunk_kernel(queries, shape) == "fa3":
            return size_fa3(queries, rows.chunk_lengths, shape)
        packed = queries * shape.group
        tile_q = tile_q_for(int(packed.sum()) // len(queries), shape.head_dim)
        chunk_pages = search_chunk_pages(-(-packed // tile_q), pages, shape)
        return size_fa2(queries, pages, shape, tile_q, chunk_pages)

    def _check_sizes(self, sizes: _Sizes) -> None:
        capacity = self._capacity
        if sizes.decode is not None:
            _at_most("tiles of the decode plan", sizes.decode.padded_tiles, capacity.max_decode_tiles)
            _at_most("partial rows of the decode plan", sizes.decode.partial_rows, capacity.decode_partial_rows)
        if isinstance(sizes.chunks, Fa3Size):
            _at_most("works of the FA3 plan", sizes.chunks.works, capacity.max_works)
        elif sizes.chunks is not None:
            _at_most("tiles of the chunk plan", sizes.chunks.padded_tiles, capacity.max_chunk_tiles)
            _at_most("partial rows of the chunk plan", sizes.chunks.partial_rows, capacity.chunk_partial_rows)

    def _write(self, sizes: _Sizes, staged: _Staged) -> None:
        page_size = self._capacity.step.page_size
        if sizes.decode is not None:
            fill_fa2(sizes.decode, page_size, staged.decode)
        if isinstance(sizes.chunks, Fa2Size):
            fill_fa2(sizes.chunks, page_size, staged.chunks)
        elif sizes.chunks is not None and staged.fa3 is not None:
            fill_fa3(sizes.chunks, sizes.first_pages, self._capacity.sm_count, staged.fa3)

    def _used(self, sizes: _Sizes) -> Range:
        ranges = self.layout.ranges
        if isinstance(sizes.chunks, Fa3Size):
            return Range(ranges["decode" if sizes.decode else "fa3"].begin, ranges["fa3"].end)
        if sizes.chunks is not None:
            return Range(ranges["chunks"].begin, ranges["decode" if sizes.decode else "chunks"].end)
        return ranges["decode"]

    def _decode_launch(self, sizes: _Sizes) -> Launch | None:
        if sizes.decode is None:
            rows = sizes.decode_rows
            return Launch(sizes.decode_kernel, False, rows, rows, []) if rows else None
        info = self._raw.fa2_info(sizes.decode, "decode", self._offsets)
        return Launch("fa2", sizes.decode.split, sizes.decode_rows, sizes.decode.query_rows, info)

    def _chunk_launch(self, sizes: _Sizes) -> Launch | None:
        if sizes.chunks is None:
            return None
        rows, tokens = len(sizes.chunks.queries), int(sizes.chunks.queries.sum())
        if isinstance(sizes.chunks, Fa3Size):
            return Launch("fa3", False, rows, tokens, self._raw.fa3_info(sizes.chunks, self._offsets))
        return Launch("fa2", sizes.chunks.split, rows, tokens, self._raw.fa2_info(sizes.chunks, "chunk", self._offsets))


def _check_rows(rows: StepRows, bucket: int | None, capacity: AttentionCapacity) -> None:
    decode, chunks = len(rows.decode_lengths), len(rows.chunk_tokens)
    if bucket is not None:
        if chunks:
            raise ValueError(f"a step in a bucket computes decode rows only, but has {chunks} chunks")
        _at_most("decode rows in a bucket", decode, bucket)
    step = capacity.step
    _at_most("rows of the step", max(decode, bucket or 0) + chunks, step.max_rows)
    _at_most("tokens of the step", decode + int(rows.chunk_tokens.sum()), step.max_step_tokens)
    if chunks != len(rows.chunk_lengths):
        raise ValueError(f"{chunks} chunks, but {len(rows.chunk_lengths)} lengths of their rows")
    for lengths in (rows.decode_lengths, rows.chunk_lengths):
        _at_most("length of a row", int(lengths.max(initial=0)), step.max_context)
    if int(rows.decode_lengths.min(initial=1)) < 1:
        raise ValueError(f"length of a decode row is {int(rows.decode_lengths.min())}, but must be at least 1")
    if int(rows.chunk_tokens.min(initial=1)) < 1 or bool((rows.chunk_lengths < rows.chunk_tokens).any()):
        raise ValueError("every chunk needs 1 <= query tokens <= length of its row")


def _at_most(dimension: str, value: int, limit: int) -> None:
    if value > limit:
        raise PlanError(dimension, value, limit)
