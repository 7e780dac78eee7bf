"""The kernel at the head of a step: page lists, positions, slots and token ids from the device's block table."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512
"""Pages or tokens that a program handles at once."""


@triton.jit(do_not_specialize=["rows", "decode_rows"])
def _step_head(
    block_table,
    last_tokens,
    row_slots,
    lengths,
    query_indptr,
    chunk_tokens,
    page_indptr,
    page_indices,
    last_page_len,
    token_ids,
    positions,
    slot_mapping,
    rows,
    decode_rows,
    TABLE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    others = tl.arange(0, ROWS)
    all_lengths = tl.load(lengths + others, mask=others < rows, other=0)
    all_pages = (all_lengths + PAGE_SIZE - 1) // PAGE_SIZE
    first_page = tl.sum(tl.where(others < row, all_pages, 0), 0)
    length = tl.load(lengths + row)
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if row == 0:
        tl.store(page_indptr, 0)
    tl.store(page_indptr + row + 1, first_page + pages)
    tl.store(last_page_len + row, length - (pages - 1) * PAGE_SIZE)

    slot = tl.load(row_slots + row).to(tl.int64)
    table = block_table + slot * TABLE_STRIDE
    step = tl.arange(0, BLOCK)
    for begin in range(0, pages, BLOCK):
        listed = begin + step
        tl.store(page_indices + first_page + listed, tl.load(table + listed, mask=listed < pages), mask=listed < pages)

    first = tl.load(query_indptr + row)
    count = tl.load(query_indptr + row + 1) - first
    for begin in range(0, count, BLOCK):
        token = begin + step
        inside = token < count
        position = length - count + token
        page = tl.load(table + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        tl.store(positions + first + token, position, mask=inside)
        tl.store(slot_mapping + first + token, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)
        if row < decode_rows:
            tl.store(token_ids + first + token, tl.load(last_tokens + slot), mask=inside)
        else:
            ids = tl.load(chunk_tokens + first + token, mask=inside)
            tl.store(token_ids + first + token, ids, mask=inside)


def write_step(
    *,
    block_table: Tensor,
    last_tokens: Tensor,
    row_slots: Tensor,
    lengths: Tensor,
    query_indptr: Tensor,
    chunk_tokens: Tensor,
    page_indptr: Tensor,
    page_indices: Tensor,
    last_page_len: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    rows: int,
    decode_rows: int,
    page_size: int,
) -> None:
    """Write everything that attention and append read of a step of `rows` rows, the first `decode_rows` decoding.

    Read, int32: `block_table [slots, pages of a row]`, `last_tokens [slots]`, `row_slots`, `lengths` (tokens in the
    cache once the step has run) `[>= rows]`, `query_indptr [>= rows + 1]`, `chunk_tokens`, one place per token of the
    step. Written: `page_indptr [rows + 1]`, `page_indices`, `last_page_len [rows]`, `token_ids`, `positions` (int32),
    `slot_mapping` (int64). A row's list holds exactly ceil(length / page_size) pages, whatever its table holds beyond.
    """
    _step_head[(rows,)](
        block_table,
        last_tokens,
        row_slots,
        lengths,
        query_indptr,
        chunk_tokens,
        page_indptr,
        page_indices,
        last_page_len,
        token_ids,
        positions,
        slot_mapping,
        rows,
        decode_rows,
        TABLE_STRIDE=block_table.stride(0),
        PAGE_SIZE=page_size,
        ROWS=triton.next_power_of_2(lengths.shape[0]),
        BLOCK=_BLOCK,
    )
