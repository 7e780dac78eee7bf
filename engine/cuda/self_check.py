"""Holds this project's FA2 plans against those of the FlashInfer that is installed, at the start of a lane."""

from typing import Any

import numpy as np
import torch

from engine.cuda.flashinfer_raw import FlashInferError, HostRows, Signatures, Workspaces
from engine.cuda.planner import Array, AttentionShape, Fa2Buffers, Fa2Size, fill_fa2, size_fa2, tile_q_for
from engine.cuda.policy import decode_chunk_pages

_WORKSPACE_BYTES = 16 << 20
_CASES: tuple[tuple[list[int], list[int]], ...] = (
    ([1], [5000]),
    ([1] * 40, [700 + 13 * row for row in range(40)]),
    ([1] * 12, [900] * 11 + [20000]),
    ([300, 17, 128], [300, 1200, 4000]),
)
"""Query tokens and lengths of rows."""


def check_planner(raw: Signatures, fa2: Any, shape: AttentionShape) -> int:
    """Compare plans, whole and split, on a few shapes; returns how many. `fa2` is FlashInfer's module, loaded.

    FlashInfer plans on the host into pinned memory, where its answer is read. Raises `FlashInferError` at the first
    difference: then this FlashInfer is not the one that the planner was written for.
    """
    device = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    pinned = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True)
    count = 0
    for query_list, length_list in _CASES:
        queries, lengths = np.array(query_list, np.int64), np.array(length_list, np.int64)
        pages = -(-lengths // shape.page_size)
        for chunk_pages in (None, decode_chunk_pages(pages, shape, 1)):
            tile_q = tile_q_for(int(queries.sum()) * shape.group // len(queries), shape.head_dim)
            size = size_fa2(queries, pages, shape, tile_q, chunk_pages)
            # FlashInfer reserves float32 partial results of whole tiles, and their sums.
            partial_bytes = 4 * shape.heads * size.tiles * tile_q * (shape.head_dim + 1) + 64
            floats = torch.empty(partial_bytes, dtype=torch.uint8, device="cuda")
            host, spaces = _host_rows(queries, pages, lengths), Workspaces(floats, device, pinned)
            info = raw.plan_fa2(fa2, spaces, host, shape, chunk_pages)
            torch.cuda.synchronize()
            _compare(info, pinned.numpy(), size, shape.page_size)
            count += 1
    return count


def _host_rows(queries: Array, pages: Array, lengths: Array) -> HostRows:
    def ints(values: Array) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32))

    def indptr(counts: Array) -> torch.Tensor:
        return ints(np.concatenate(([0], np.cumsum(counts))))

    return HostRows(indptr(queries), indptr(pages), ints(lengths))


def _compare(info: list[int], theirs: Array, size: Fa2Size, page_size: int) -> None:
    rows, tiles = len(size.queries), size.padded_tiles
    found = [info[0], info[1], info[3], info[14]]
    expected = [tiles, size.query_rows, size.tile_q, int(size.split)]
    if found != expected:
        raise FlashInferError(f"FlashInfer's plan for {rows} rows is {found} in brief, but this planner's {expected}")
    counts = [tiles, tiles, tiles, rows + 1, size.query_rows + 1, tiles, 1, 1]
    kinds = [np.uint8 if name == "block_valid_mask" else np.int32 for name in Fa2Buffers.__slots__]
    ours = Fa2Buffers(*(np.zeros(count, kind) for count, kind in zip(counts, kinds, strict=True)))
    fill_fa2(size, page_size, ours)
    places = {"request_indices": 4, "qo_tile_indices": 5, "kv_tile_indices": 6, "o_indptr": 8}
    if size.split:
        places |= {"merge_indptr": 7, "kv_chunk_size": 9}
    for name, place in places.items():
        mine = getattr(ours, name)
        if not np.array_equal(mine, theirs[info[place] : info[place] + mine.nbytes].view(np.int32)):
            raise FlashInferError(f"{name} of FlashInfer's plan for {rows} rows differs from this planner's")
