"""What one step may hold, and where its metadata lies: pure numbers, shared by every lane, no torch.

`PlanCapacity` bounds a step, `PlanLayout` turns the bounds into named buffers at fixed offsets of one arena.
Allocation, byte accounting and the memory report read the layout; buffer lengths stand nowhere else.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.step import StepPlan

INT32_MAX = 2**31 - 1
ALIGNMENT = 256
"""Bytes on which every buffer starts: CUDA's widest vector loads and copies ask for no more."""

DType = Literal["uint8", "int32", "int64", "float32"]
ITEM_BYTES: dict[str, int] = {"uint8": 1, "int32": 4, "int64": 8, "float32": 4}


class PlanError(ValueError):
    """A step or a configuration exceeds a bound of the plan. Raised before anything is written."""

    def __init__(self, dimension: str, value: int, limit: int, hint: str = "") -> None:
        super().__init__(f"{dimension} is {value}, but at most {limit} fit{f': {hint}' if hint else ''}")
        self.dimension = dimension
        self.value = value
        self.limit = limit


@dataclass(frozen=True, slots=True)
class PlanCapacity:
    """The largest step of a lane. Raises `PlanError` if a derived number does not fit the kernels' int32 indices."""

    max_bucket: int
    """Row slots: requests that are active, prefilling or draining at once."""
    max_step_tokens: int
    context_limit: int
    """Longest sequence in tokens. A surplus token in flight may stand behind it, so buffers hold one more."""
    page_size: int
    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("max_bucket", "max_step_tokens", "context_limit", "page_size", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"PlanCapacity.{name} is {getattr(self, name)}, but must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.max_step_tokens < self.max_bucket:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}, but must be at least max_bucket, {self.max_bucket}"
            )
        bounded = {
            "max_context (context_limit + 1)": (self.max_context, "lower context_limit"),
            "max_pages (rows x pages of a row)": (self.max_pages, "lower max_bucket or context_limit"),
            # Kernels count the slots of all page lists through, one behind the other.
            "slots of the page lists (max_pages x page size)": (
                self.max_pages * self.page_size,
                "lower max_bucket or context_limit",
            ),
            "query elements of a step": (self.max_step_tokens * self.heads * self.head_dim, "lower max_step_tokens"),
        }
        for dimension, (value, hint) in bounded.items():
            if value > INT32_MAX:
                raise PlanError(dimension, value, INT32_MAX, hint)

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence, the surplus token included."""
        return self.context_limit + 1

    @property
    def max_rows(self) -> int:
        """Rows of the largest step, decode rows and chunks together: each row slot stands at most once in a step."""
        return self.max_bucket

    @property
    def max_pages_per_row(self) -> int:
        """Entries of a row's block table: ceil((context_limit + 1) / page_size)."""
        return -(-self.max_context // self.page_size)

    @property
    def max_pages(self) -> int:
        """Logical bound of a step's page lists. Not the pool's size: a shared page is listed once per row."""
        return self.max_rows * self.max_pages_per_row

    def check_pool(self, pages: int) -> None:
        """Raise `PlanError` if a pool of `pages` pages (the padding page included) has slots beyond int32."""
        if pages * self.page_size > INT32_MAX:
            raise PlanError(
                "slots of the KV pool (pages x page size)", pages * self.page_size, INT32_MAX, "give it less memory"
            )

    def check(self, plan: StepPlan, pages: int) -> None:
        """Raise `PlanError` unless every number of `plan` fits; `pages` counts the pool, padding page included.

        Looks at everything that is used as an index or a length, so that a caller may write without checking again.
        """
        rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        self._check_at_most("rows of the step", len(rows), self.max_rows)
        self._check_at_most("tokens of the step", plan.tokens, self.max_step_tokens)
        if len(plan.decode_rows) != len(plan.decode_lengths):
            raise ValueError(f"{len(plan.decode_rows)} decode rows, but {len(plan.decode_lengths)} lengths")
        if len(set(rows)) != len(rows):
            raise ValueError(f"a row slot stands twice in step {plan.number}: {sorted(rows)}")
        for row in _outside([*rows, *(start.row for start in plan.starts)], 0, self.max_bucket - 1):
            self._check_index("row slot", row, self.max_bucket)
        for update in plan.table:
            self._check_index("row slot of a table update", update.row, self.max_bucket)
            self._check_index(f"page index of row {update.row}", update.index, self.max_pages_per_row)
            self._check_index(f"page of row {update.row}", update.page, pages)
        for length in _outside(plan.decode_lengths, 1, self.max_context):
            self._check_length(plan.decode_rows[plan.decode_lengths.index(length)], length)
        for chunk in plan.chunks:
            if not chunk.tokens or chunk.start < 0:
                raise ValueError(f"chunk of row {chunk.row} has {len(chunk.tokens)} tokens at position {chunk.start}")
            self._check_length(chunk.row, chunk.start + len(chunk.tokens))

    def _check_length(self, row: int, length: int) -> None:
        if length < 1:
            raise ValueError(f"length of row {row} is {length}, but must be at least 1")
        self._check_at_most(f"length of row {row}", length, self.max_context)

    @staticmethod
    def _check_at_most(dimension: str, value: int, limit: int) -> None:
        if value > limit:
            raise PlanError(dimension, value, limit)

    @staticmethod
    def _check_index(dimension: str, value: int, count: int) -> None:
        if not 0 <= value < count:
            raise PlanError(dimension, value, count - 1)


def _outside(values: list[int], lowest: int, highest: int) -> list[int]:
    """The values outside the bounds. Two passes in C where all lie within: a step of 256 rows is checked in 15 us."""
    if not values or (lowest <= min(values) and max(values) <= highest):
        return []
    return [value for value in values if not lowest <= value <= highest]


class Buffer(NamedTuple):
    """One named array of the arena."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the arena; a multiple of `ALIGNMENT`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without the gap behind it."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Buffers of a plan in one arena, in a fixed order.

    Per row slot, kept between steps: `block_table`, `last_tokens`, the sampling parameters (`seed` holds the bits of
    the unsigned 64-bit seed) and, for rows with penalties, their tokens in `history`. Per step, rewritten: the rest.
    `query_indptr` and `page_indptr` are prefix sums over the step's rows, decode rows first; the pages of row i are
    `page_indices[page_indptr[i] : page_indptr[i + 1]]`, and its length is
    `(pages - 1) * page_size + last_page_len[i]`, as FlashInfer derives it.
    """

    capacity: PlanCapacity

    def _shapes(self) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        capacity = self.capacity
        slots, rows, tokens = (capacity.max_bucket,), (capacity.max_rows,), (capacity.max_step_tokens,)
        yield "block_table", "int32", (capacity.max_bucket, capacity.max_pages_per_row)
        yield "last_tokens", "int32", slots
        yield "temperature", "float32", slots
        yield "top_k", "int32", slots
        yield "top_p", "float32", slots
        yield "min_p", "float32", slots
        yield "seed", "int64", slots
        yield "history", "int32", (capacity.max_bucket, capacity.max_context)
        yield "query_indptr", "int32", (capacity.max_rows + 1,)
        yield "page_indptr", "int32", (capacity.max_rows + 1,)
        yield "page_indices", "int32", (capacity.max_pages,)
        yield "last_page_len", "int32", rows
        yield "token_ids", "int32", tokens
        yield "positions", "int32", tokens
        yield "slot_mapping", "int64", tokens
        yield "sampled_tokens_at", "int32", rows
        yield "sampled_slots", "int32", rows
        yield "sampled_positions", "int64", rows

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every buffer with its place."""
        placed: list[Buffer] = []
        offset = 0
        for name, dtype, shape in self._shapes():
            placed.append(Buffer(name, dtype, shape, offset))
            offset += aligned(placed[-1].nbytes)
        return tuple(placed)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        last = self.buffers[-1]
        return last.offset + aligned(last.nbytes)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
