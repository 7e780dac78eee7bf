"""Plans the attention of each step into the lane's arena: sizes all, checks all, then writes and queues one copy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from engine.cuda.decode_plan import DecodePlanner
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
    summary,
    tile_q_for,
)
from engine.cuda.policy import DecodeRows, chunk_kernel, splits, uses_xqa
from engine.cuda.staging import CopyDevice, StagingRing
from engine.plan import PlanCapacity, PlanError

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


class _Sizes(NamedTuple):
    """All numbers of a step's plans, before anything is written."""

    decode: Fa2Size | None
    decode_kernel: Kernel
    decode_rows: int
    chunks: Fa2Size | Fa3Size | None


class _Staged:
    """The plans' arrays in one staging buffer."""

    def __init__(self, staging: Array, layout: AttentionLayout) -> None:
        def array(name: str) -> Array:
            buffer = layout.buffers[name]
            return staging[buffer.offset : buffer.offset + buffer.nbytes].view(buffer.dtype)

        def fa2(prefix: str) -> Fa2Buffers:
            return Fa2Buffers(*(array(f"{prefix}_{name}") for name in Fa2Buffers.__slots__))

        self.whole, self.decode, self.chunks = fa2("whole"), fa2("decode"), fa2("chunk")
        DecodePlanner.clear(self.decode)
        lists = ("work_indptr", *FA3_LISTS) if layout.capacity.sm90 else ()
        self.fa3 = Fa3Buffers(*(array(f"fa3_{name}") for name in lists)) if lists else None


class AttentionPlans:
    """The plans of the last step that fitted. `update` may be called while copies of earlier steps are queued."""

    def __init__(self, layout: AttentionLayout, raw: Signatures, device: CopyDevice, slots: int = 3) -> None:
        """`slots` staging buffers: one more than there may be steps in flight."""
        self.layout = layout
        self.current = PlannedStep(None, None)
        self._capacity = layout.capacity
        self._limits = _Limits.of(layout.capacity)
        self._shape = layout.capacity.shape
        self._raw = raw
        self._ring = StagingRing(device, layout.staged_nbytes, slots, lambda memory: _Staged(memory, layout))
        self._at = {prefix: layout.offsets(prefix) for prefix in ("whole", "decode", "chunk", "fa3")}
        self._decode = DecodePlanner(layout.capacity)
        self._decode.fill_whole(self._ring.acquire().whole)
        self._ring.submit(layout.ranges["whole"])

    def update(self, rows: StepRows, bucket: int | None = None, *, always_split: bool = False) -> PlannedStep:
        """Plan a step and queue the copy of its plans.

        With `bucket`, decode rows are filled up to so many with rows of one token, and the launch has a fixed grid;
        chunks are not allowed beside them. With `always_split` there is one way to launch the decode rows of a bucket,
        whatever their lengths are: the one that suits them all, if not each best. Raises `PlanError` if a number
        exceeds its capacity and `ValueError` for rows that cannot be; then nothing has been written and the last plan
        stays.
        """
        sizes = self._size(rows, _check_rows(rows, bucket, self._capacity), bucket, always_split)
        self._limits.check(sizes)
        used = self._used(sizes)
        if used is not None:
            self._write(sizes, rows, self._ring.acquire())
            self._ring.submit(used)
        self.current = PlannedStep(self._decode_launch(sizes), self._chunk_launch(sizes))
        return self.current

    def probes(self, bucket: int, *, always_split: bool = False) -> list[StepRows]:
        """Steps of decode rows, one for each kernel and split that steps in `bucket` are computed with; short ones.

        Looks at rows of one length and at one long row among rows of one token, for lengths up to the longest sequence:
        the policy asks for the rows' number, their longest and their sum alone, and between these two lies every sum.
        """
        found: dict[tuple[Kernel, bool], StepRows] = {}
        for rows in _probe_rows(bucket, self._capacity.step.max_context):
            sizes = self._size(rows, _check_rows(rows, bucket, self._capacity), bucket, always_split)
            found.setdefault((sizes.decode_kernel, sizes.decode is not None and sizes.decode.split), rows)
        return list(found.values())

    def _size(self, rows: StepRows, step: DecodeRows, bucket: int | None, always_split: bool) -> _Sizes:
        chunks = self._size_chunks(rows) if len(rows.chunk_tokens) else None
        if not step.rows:
            return _Sizes(None, "fa2", 0, chunks)
        if not always_split:
            if self._capacity.xqa and uses_xqa(step, self._shape):
                return _Sizes(None, "xqa", step.rows, chunks)
            if not splits(step, self._shape):
                return _Sizes(self._decode.whole(step), "fa2", step.rows, chunks)
        size = self._decode.split(rows.decode_lengths, step, bucket, always=always_split)
        return _Sizes(size, "fa2", step.rows, chunks)

    def _size_chunks(self, rows: StepRows) -> Fa2Size | Fa3Size:
        queries, shape = rows.chunk_tokens, self._shape
        if self._capacity.sm90 and chunk_kernel(queries, shape) == "fa3":
            return size_fa3(queries, rows.chunk_lengths, shape)
        packed, pages = queries * shape.group, -(-rows.chunk_lengths // shape.page_size)
        tile_q = tile_q_for(int(packed.sum()) // len(queries), shape.head_dim)
        chunk_pages = search_chunk_pages(-(-packed // tile_q), pages, shape)
        return size_fa2(queries, pages, shape, tile_q, chunk_pages)

    def _write(self, sizes: _Sizes, rows: StepRows, staged: _Staged) -> None:
        page_size = self._shape.page_size
        if sizes.decode is not None and sizes.decode.split:
            self._decode.fill_split(sizes.decode, staged.decode)
        if isinstance(sizes.chunks, Fa2Size):
            fill_fa2(sizes.chunks, page_size, staged.chunks)
        elif sizes.chunks is not None and staged.fa3 is not None:
            # The chunks' pages follow those of the decode rows in the step's page list.
            pages = -(-rows.chunk_lengths // page_size)
            first_pages = int((-(-rows.decode_lengths // page_size)).sum()) + np.cumsum(pages) - pages
            fill_fa3(sizes.chunks, first_pages, self._capacity.sm_count, staged.fa3)

    def _used(self, sizes: _Sizes) -> Range | None:
        """What of a staging buffer the step's plans fill: nothing if no row is split and there are no chunks."""
        ranges, split = self.layout.ranges, sizes.decode is not None and sizes.decode.split
        if isinstance(sizes.chunks, Fa3Size):
            return Range(ranges["decode" if split else "fa3"].begin, ranges["fa3"].end)
        if sizes.chunks is not None:
            return Range(ranges["chunks"].begin, ranges["decode" if split else "chunks"].end)
        return ranges["decode"] if split else None

    def _decode_launch(self, sizes: _Sizes) -> Launch | None:
        rows, size = sizes.decode_rows, sizes.decode
        if size is None:
            return Launch(sizes.decode_kernel, False, rows, rows, []) if rows else None
        return Launch(
            "fa2", size.split, rows, rows, self._raw.fa2_info(size, self._at["decode" if size.split else "whole"])
        )

    def _chunk_launch(self, sizes: _Sizes) -> Launch | None:
        if sizes.chunks is None:
            return None
        rows, tokens = len(sizes.chunks.queries), int(sizes.chunks.queries.sum())
        if isinstance(sizes.chunks, Fa3Size):
            return Launch("fa3", False, rows, tokens, self._raw.fa3_info(sizes.chunks, self._at["fa3"]))
        return Launch("fa2", sizes.chunks.split, rows, tokens, self._raw.fa2_info(sizes.chunks, self._at["chunk"]))


class _Limits(NamedTuple):
    """What the plans' buffers hold."""

    decode_tiles: int
    decode_partial_rows: int
    chunk_tiles: int
    chunk_partial_rows: int
    works: int

    @staticmethod
    def of(capacity: AttentionCapacity) -> "_Limits":
        return _Limits(
            capacity.max_decode_tiles,
            capacity.decode_partial_rows,
            capacity.max_chunk_tiles,
            capacity.chunk_partial_rows,
            capacity.max_works,
        )

    def check(self, sizes: _Sizes) -> None:
        """Raise `PlanError` unless all plans fit."""
        if sizes.decode is not None:
            _at_most("tiles of the decode plan", sizes.decode.padded_tiles, self.decode_tiles)
            _at_most("tiles of the bucket's plan", sizes.decode.tiles, sizes.decode.padded_tiles)
            _at_most("partial rows of the decode plan", sizes.decode.partial_rows, self.decode_partial_rows)
        if isinstance(sizes.chunks, Fa3Size):
            _at_most("works of the FA3 plan", sizes.chunks.works, self.works)
        elif sizes.chunks is not None:
            _at_most("tiles of the chunk plan", sizes.chunks.padded_tiles, self.chunk_tiles)
            _at_most("partial rows of the chunk plan", sizes.chunks.partial_rows, self.chunk_partial_rows)


def _probe_rows(bucket: int, longest: int) -> Iterator[StepRows]:
    none = np.zeros(0, np.int64)
    for length in sorted({longest, *(1 << power for power in range(longest.bit_length()))}):
        skewed = np.ones(bucket, np.int64)
        skewed[0] = length
        yield StepRows(skewed, none, none)
        yield StepRows(np.full(bucket, length, np.int64), none, none)


def _check_rows(rows: StepRows, bucket: int | None, capacity: AttentionCapacity) -> DecodeRows:
    """Check what the caller gave; returns the decode rows in brief, those that fill up a bucket included."""
    lengths, chunks, step = rows.decode_lengths, len(rows.chunk_tokens), capacity.step
    decode = len(lengths)
    if bucket is not None:
        if chunks:
            raise ValueError(f"a step in a bucket computes decode rows only, but has {chunks} chunks")
        _at_most("decode rows in a bucket", decode, bucket)
    filled = decode if bucket is None else bucket
    _at_most("rows of the step", filled + chunks, step.max_rows)
    _check_chunks(rows, step)
    if not decode:
        return DecodeRows(filled, 1, filled)
    shortest, longest, total = summary(lengths)
    _at_most("length of a row", longest, step.max_context)
    if shortest < 1:
        raise ValueError(f"length of a decode row is {shortest}, but must be at least 1")
    return DecodeRows(filled, longest, total + filled - decode)


def _check_chunks(rows: StepRows, step: PlanCapacity) -> None:
    tokens, lengths, decode = rows.chunk_tokens, rows.chunk_lengths, len(rows.decode_lengths)
    if len(tokens) != len(lengths):
        raise ValueError(f"{len(tokens)} chunks, but {len(lengths)} lengths of their rows")
    if not len(tokens):
        return
    _at_most("tokens of the step", decode + int(tokens.sum()), step.max_step_tokens)
    _at_most("length of a row", int(lengths.max()), step.max_context)
    if int(tokens.min()) < 1 or bool((lengths < tokens).any()):
        raise ValueError("every chunk needs 1 <= query tokens <= length of its row")


def _at_most(dimension: str, value: int, limit: int) -> None:
    if value > limit:
        raise PlanError(dimension, value, limit)
