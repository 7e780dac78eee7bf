"""Writes a step into the plan's buffers: page lists, positions and slots from the block table and the row lengths."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.cpu.arena import PlanArena
from engine.cpu.attention import StepPages
from engine.plan import PlanCapacity
from engine.sampling import SamplingRows
from engine.step import StepPlan

Array = NDArray[Any]

_SAMPLING_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed")


def page_counts(lengths: Array, page_size: int) -> tuple[Array, Array]:
    """Pages of rows with `lengths` tokens, and the tokens on the last page of each (1 to page_size)."""
    pages = (lengths + page_size - 1) // page_size
    return pages, lengths - (pages - 1) * page_size


def row_pages(table: Array, slot: int, pages: int) -> Array:
    """The first `pages` pages of a row slot. Pages that the table holds beyond them were allocated ahead of need."""
    return table[slot, :pages]


def token_positions(first: int, count: int) -> Array:
    """Positions of `count` consecutive tokens."""
    return np.arange(first, first + count)


class StepInputs:
    """The plan's buffers, with methods that write a step into them. The plan has been checked against the capacity."""

    def __init__(self, capacity: PlanCapacity, arena: PlanArena) -> None:
        self._arena = arena
        self._page_size = capacity.page_size
        self._table: Array = arena.array("block_table")
        self._rows = self._tokens = self._pages = self._sampled = self._decode_rows = 0

    def write(self, plan: StepPlan) -> None:
        """Apply the plan's row starts and table updates, then derive everything else from the table."""
        self._start_rows(plan)
        for update in plan.table:
            self._table[update.row, update.index] = update.page
        slots = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        counts = [1] * len(plan.decode_rows) + [len(chunk.tokens) for chunk in plan.chunks]
        lengths = [*plan.decode_lengths, *(chunk.start + len(chunk.tokens) for chunk in plan.chunks)]
        self._rows, self._tokens, self._decode_rows = len(slots), sum(counts), len(plan.decode_rows)
        self._write_rows(slots, counts, lengths)
        self._write_tokens(plan, slots, counts, lengths)
        self._write_sampled(plan, slots, lengths)

    def _start_rows(self, plan: StepPlan) -> None:
        for row, sampling, _ in plan.starts:
            for name in _SAMPLING_COLUMNS:
                value = getattr(sampling, name)
                # The buffer keeps the bits of an unsigned seed as a signed number.
                self._arena.array(name)[row] = value - (1 << 64) if name == "seed" and value >> 63 else value

    def _write_rows(self, slots: list[int], counts: list[int], lengths: list[int]) -> None:
        array, rows = self._arena.array, self._rows
        pages, last = page_counts(np.asarray(lengths, dtype=np.int64), self._page_size)
        array("last_page_len")[:rows] = last
        array("query_indptr")[0] = array("page_indptr")[0] = 0
        array("query_indptr")[1 : rows + 1] = np.cumsum(counts)
        ends = np.cumsum(pages)
        array("page_indptr")[1 : rows + 1] = ends
        self._pages = int(ends[-1]) if rows else 0
        for slot, count, end in zip(slots, pages.tolist(), ends.tolist(), strict=True):
            array("page_indices")[end - count : end] = row_pages(self._table, slot, count)

    def _write_tokens(self, plan: StepPlan, slots: list[int], counts: list[int], lengths: list[int]) -> None:
        array = self._arena.array
        tokens, positions, mapping = array("token_ids"), array("positions"), array("slot_mapping")
        tokens[: self._decode_rows] = array("last_tokens")[plan.decode_rows]
        end = 0
        for slot, count, length in zip(slots, counts, lengths, strict=True):
            begin, end = end, end + count
            positions[begin:end] = token_positions(length - count, count)
            at = np.arange(length - count, length)
            pages = self._table[slot, at // self._page_size].astype(np.int64)
            mapping[begin:end] = pages * self._page_size + at % self._page_size
        end = self._decode_rows
        for chunk in plan.chunks:
            begin, end = end, end + len(chunk.tokens)
            tokens[begin:end] = chunk.tokens

    def _write_sampled(self, plan: StepPlan, slots: list[int], lengths: list[int]) -> None:
        array = self._arena.array
        samples = [True] * self._decode_rows + [chunk.samples for chunk in plan.chunks]
        rows = [row for row, sampled in enumerate(samples) if sampled]
        self._sampled = len(rows)
        array("sampled_tokens_at")[: len(rows)] = array("query_indptr")[1 : self._rows + 1][rows] - 1
        array("sampled_slots")[: len(rows)] = [slots[row] for row in rows]
        array("sampled_positions")[: len(rows)] = [lengths[row] for row in rows]

    @property
    def token_ids(self) -> Tensor:
        """int32 `[tokens]`."""
        return self._arena.tensor("token_ids")[: self._tokens]

    @property
    def positions(self) -> Tensor:
        """int32 `[tokens]`."""
        return self._arena.tensor("positions")[: self._tokens]

    @property
    def sampled_tokens_at(self) -> Tensor:
        """int32 `[sampled rows]`: which of the step's tokens each sampled row ends in."""
        return self._arena.tensor("sampled_tokens_at")[: self._sampled]

    @property
    def pages(self) -> StepPages:
        """Page lists of the step."""
        tensor = self._arena.tensor
        return StepPages(
            query_indptr=tensor("query_indptr")[: self._rows + 1],
            page_indptr=tensor("page_indptr")[: self._rows + 1],
            page_indices=tensor("page_indices")[: self._pages],
            last_page_len=tensor("last_page_len")[: self._rows],
            slot_mapping=tensor("slot_mapping")[: self._tokens],
            decode_rows=self._decode_rows,
        )

    def sampling(self, begin: int, end: int) -> SamplingRows:
        """Parameters of the sampled rows `begin` to `end - 1`."""
        slots = self._arena.tensor("sampled_slots")[begin:end]
        columns = [self._arena.tensor(name)[slots] for name in _SAMPLING_COLUMNS]
        return SamplingRows._make([*columns, self._arena.tensor("sampled_positions")[begin:end]])

    def keep(self, begin: int, end: int, tokens: Tensor) -> None:
        """Remember the tokens of the sampled rows `begin` to `end - 1`, each in its row slot, for the next step."""
        self._arena.tensor("last_tokens")[self._arena.tensor("sampled_slots")[begin:end]] = tokens.int()
