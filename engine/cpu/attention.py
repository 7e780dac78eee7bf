"""Attention over a page-first KV buffer in torch: any GQA group, decode rows in batches, chunks one by one.

Pages are gathered per layer into one workspace, and torch's scaled_dot_product_attention runs on the gathered rows; its
CPU kernel keeps scores and softmax in float32 for every input type. The length of a row is derived from its page list,
as FlashInfer derives it: `(pages - 1) * page_size + last_page_len`.

Slots that a mask hides are read all the same and multiplied by a weight of zero, which only finite numbers survive. So
the slots behind a row's end are zeros, and so is the padding page: see `PagedAttention.begin`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu.arena import Arena
from engine.plan import PlanCapacity

_LEAST_WORKSPACE_PAGES = 256
_LEAST_MASK_ELEMENTS = 1 << 20
_SHORT_PAGES = 8
"""Rows up to this many pages are batched whatever their lengths: there the calls cost more than the padding."""


def workspace_pages(capacity: PlanCapacity) -> int:
    """Pages gathered at once: the longest row must fit, and so should a batch of short ones."""
    return max(capacity.max_pages_per_row, min(capacity.max_pages, _LEAST_WORKSPACE_PAGES))


def mask_elements(capacity: PlanCapacity) -> int:
    """Mask entries of one call; a full workspace of decode rows must fit, and so must one query of a chunk."""
    return max(workspace_pages(capacity) * capacity.page_size, _LEAST_MASK_ELEMENTS)


def batch_rows(pages: Sequence[int], budget: int) -> list[list[int]]:
    """Split rows that hold `pages` pages into batches that are padded to their longest row.

    A batch takes at most `budget` pages and at most half of it is padding, short rows excepted. Rows of a single batch
    keep their order.
    """
    if pages and len(pages) * max(pages) <= budget and (max(pages) <= _SHORT_PAGES or 2 * min(pages) >= max(pages)):
        return [list(range(len(pages)))]
    batches: list[list[int]] = []
    for row in sorted(range(len(pages)), key=lambda row: -pages[row]):
        longest = pages[batches[-1][0]] if batches else 0
        alike = longest <= _SHORT_PAGES or 2 * pages[row] >= longest
        if batches and alike and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def grouped(queries: Tensor, kv_heads: int) -> Tensor:
    """`[tokens, heads, head_dim]` as `[tokens, kv_heads, group, head_dim]`; a group is consecutive heads."""
    tokens, heads, head_dim = queries.shape
    return queries.view(tokens, kv_heads, heads // kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class StepPages:
    """Page lists of a step, as the plan's buffers hold them (int32, on the CPU). Decode rows first, then chunks."""

    query_indptr: Tensor
    """`[rows + 1]`; row i computes the tokens `query_indptr[i]` to `query_indptr[i + 1] - 1`."""
    page_indptr: Tensor
    """`[rows + 1]`."""
    page_indices: Tensor
    """`[page_indptr[-1]]`."""
    last_page_len: Tensor
    """`[rows]`, 1 to page_size."""
    slot_mapping: Tensor
    """`[tokens]`, int64: page * page_size + offset of the slot that each token is written to."""
    decode_rows: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows attended in one call. `queries` is their place among the step's tokens."""

    queries: slice | Tensor
    sources: Tensor
    """int64 `[2 * rows * pages]`: gather rows of K, then of V, for layer 0."""
    lengths: list[int]
    pages: int
    first_position: int
    """Of a chunk: position of its first query. Unused for decode rows."""
    chunk: bool
    mask: Tensor | None = None
    """Kept for all layers of the step where the arena has room; built at every layer otherwise."""


class PagedAttention:
    """`engine.models.decoder.Attention` over `kv` `[pages, layers, 2, page_size, kv_heads, head_dim]`.

    `begin` takes the page lists of a step; calls follow for every layer.
    """

    @staticmethod
    def reserve(arena: Arena, capacity: PlanCapacity, dtype: torch.dtype) -> None:
        """Plan workspace and output for the largest step."""
        gathered = 2 * workspace_pages(capacity) * capacity.page_size
        arena.reserve("gathered_kv", (gathered, capacity.kv_heads, capacity.head_dim), dtype)
        arena.reserve("gather_rows", (2 * workspace_pages(capacity),), torch.int64)
        arena.reserve("attention_mask", (2, mask_elements(capacity)), dtype)
        arena.reserve("attended", (capacity.max_step_tokens, capacity.heads, capacity.head_dim), dtype)
        arena.reserve("append_rows", (capacity.max_step_tokens,), torch.int64)

    def __init__(self, kv: Tensor, capacity: PlanCapacity, arena: Arena) -> None:
        _, self._layers, _, self._page_size, self._kv_heads, self._head_dim = kv.shape
        self._kv = kv
        self._slots = kv.view(-1, self._kv_heads * self._head_dim)
        self._runs = kv.view(-1, self._page_size * self._kv_heads * self._head_dim)
        self._budget = workspace_pages(capacity)
        self._gathered = arena.take("gathered_kv")
        self._gather_rows = arena.take("gather_rows")
        self._kept_masks, self._mask = arena.take("attention_mask").unbind()
        self._kept = 0
        self._attended = arena.take("attended")
        self._append_rows = arena.take("append_rows")
        self._batches: list[_Batch] = []
        self._first_slots = torch.empty(0, dtype=torch.int64)

    def begin(self, pages: StepPages) -> None:
        """Prepare a step: where its keys and values go, and which rows attend together.

        Zeroes, in every layer, the last page of each row that begins it in this step. A row writes its tokens in order
        and takes over only full pages, so it enters a page at its first slot, and whatever lies there by then was left
        by another sequence, perhaps not finite.
        """
        page, offset = pages.slot_mapping // self._page_size, pages.slot_mapping % self._page_size
        self._first_slots = page * (self._layers * 2 * self._page_size) + offset
        self._kept = 0
        self._zero_begun_pages(pages)
        page_ends, query_ends = pages.page_indptr.tolist(), pages.query_indptr.tolist()
        listed = [pages.page_indices[begin:end].long() for begin, end in pairwise(page_ends)]
        queries = [slice(begin, end) for begin, end in pairwise(query_ends)]
        lengths = [
            (len(row) - 1) * self._page_size + last
            for row, last in zip(listed, pages.last_page_len.tolist(), strict=True)
        ]
        counts = [len(row) for row in listed[: pages.decode_rows]]
        self._batches = [self._decode_batch(rows, listed, lengths) for rows in batch_rows(counts, self._budget)] + [
            self._chunk(queries[row], listed[row], lengths[row]) for row in range(pages.decode_rows, len(listed))
        ]

    def _zero_begun_pages(self, pages: StepPages) -> None:
        begun = pages.query_indptr.diff() >= pages.last_page_len
        self._kv.index_fill_(0, pages.page_indices[pages.page_indptr[1:][begun] - 1].long(), 0)

    def _decode_batch(self, rows: list[int], listed: list[Tensor], lengths: list[int]) -> _Batch:
        longest = max(len(listed[row]) for row in rows)
        padded = torch.zeros((len(rows), longest), dtype=torch.int64)
        for place, row in enumerate(rows):
            padded[place, : len(listed[row])] = listed[row]
        in_order = rows == list(range(rows[0], rows[0] + len(rows)))
        queries = slice(rows[0], rows[0] + len(rows)) if in_order else torch.tensor(rows)
        batch = _Batch(
            queries, self._sources(padded.flatten()), [lengths[row] for row in rows], longest, 0, chunk=False
        )
        room = self._room(len(rows) * longest * self._page_size)
        return batch if room is None else replace(batch, mask=_row_mask(batch.lengths, room))

    def _chunk(self, queries: slice, listed: Tensor, length: int) -> _Batch:
        count = queries.stop - queries.start
        first = length - count
        batch = _Batch(queries, self._sources(listed), [length], len(listed), first, chunk=True)
        room = self._room(count * length) if first else None
        return batch if room is None else replace(batch, mask=_causal_mask(count, length, first, room))

    def _room(self, elements: int) -> Tensor | None:
        """Mask entries that stay untouched until the next step, if there are so many left."""
        if self._kept + elements > self._kept_masks.shape[0]:
            return None
        self._kept += elements
        return self._kept_masks[self._kept - elements : self._kept]

    def _sources(self, pages: Tensor) -> Tensor:
        keys = pages * (self._layers * 2)
        return torch.cat((keys, keys + 1))

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `engine.models.decoder.Attention`. The result is valid until the next call."""
        tokens = queries.shape[0]
        self._append(layer, keys, values)
        attended = self._attended[:tokens]
        for batch in self._batches:
            kv = self._gather(layer, batch)
            if batch.chunk:
                self._attend_chunk(batch, queries[batch.queries], kv, attended[batch.queries])
            else:
                attended[batch.queries] = self._attend_rows(batch, queries[batch.queries], kv)
        return attended.flatten(1)

    def _append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        rows = self._append_rows[: keys.shape[0]]
        torch.add(self._first_slots, layer * 2 * self._page_size, out=rows)
        self._slots.index_copy_(0, rows, keys.flatten(1))
        self._slots.index_copy_(0, rows.add_(self._page_size), values.flatten(1))

    def _gather(self, layer: int, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, kv_heads, pages * page_size, head_dim]` of a batch, cut to the longest row."""
        count, rows = batch.sources.shape[0], len(batch.lengths)
        sources = torch.add(batch.sources, layer * 2, out=self._gather_rows[:count])
        runs = self._gathered.view(-1, self._runs.shape[1])[:count]
        torch.index_select(self._runs, 0, sources, out=runs)
        shaped = runs.view(2, rows, batch.pages * self._page_size, self._kv_heads, self._head_dim)
        keys, values = shaped[:, :, : max(batch.lengths)].transpose(2, 3)
        return keys, values

    def _attend_rows(self, batch: _Batch, queries: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        mask = batch.mask if batch.mask is not None else _row_mask(batch.lengths, self._mask)
        # A group's heads stand in for query positions: the kernel then reads each KV head once.
        return F.scaled_dot_product_attention(grouped(queries, self._kv_heads), *kv, attn_mask=mask).flatten(1, 2)

    def _attend_chunk(self, batch: _Batch, queries: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        length, first = batch.lengths[0], batch.first_position
        heads = grouped(queries, self._kv_heads).flatten(1, 2).transpose(0, 1)[None]
        target = out.transpose(0, 1)
        if first == 0:
            target.copy_(F.scaled_dot_product_attention(heads, *kv, is_causal=True, enable_gqa=True)[0])
            return
        tile = queries.shape[0] if batch.mask is not None else max(1, self._mask.shape[0] // length)
        for begin in range(0, queries.shape[0], tile):
            some = heads[:, :, begin : begin + tile]
            mask = batch.mask
            if mask is None:
                mask = _causal_mask(some.shape[2], length, first + begin, self._mask)
            attended = F.scaled_dot_product_attention(some, *kv, attn_mask=mask, enable_gqa=True)
            target[:, begin : begin + tile] = attended[0]


def _row_mask(lengths: list[int], memory: Tensor) -> Tensor:
    """Additive mask `[rows, 1, 1, longest]` that hides what lies behind each row's end, in `memory`."""
    longest = max(lengths)
    mask = memory[: len(lengths) * longest].view(len(lengths), longest).zero_()
    for row, length in enumerate(lengths):
        mask[row, length:] = -torch.inf
    return mask[:, None, None]


def _causal_mask(count: int, length: int, first: int, memory: Tensor) -> Tensor:
    """Additive mask `[count, length]` of queries at positions `first` onwards, in `memory`."""
    return memory[: count * length].view(count, length).fill_(-torch.inf).triu_(first + 1)
