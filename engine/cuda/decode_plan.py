"""The plan of a step's decode rows: one query token each, so that nearly all of it is constant or one running sum."""

import numpy as np

from engine.cuda.layout import AttentionCapacity
from engine.cuda.planner import Array, Fa2Buffers, Fa2Size, fill_fa2, size_fa2
from engine.cuda.policy import DecodeRows, decode_chunk_pages, max_decode_tiles


class DecodePlanner:
    """Makes what `size_fa2` and `fill_fa2` make for decode rows, in scratch of its own and a third of the time.

    A size is valid until the next one is made.
    """

    def __init__(self, capacity: AttentionCapacity) -> None:
        rows, tiles = capacity.step.max_rows, capacity.max_decode_tiles
        self._shape = capacity.shape
        self._tile_q = capacity.decode_tile_q
        self._tiles_of_a_row = capacity.decode_row_tiles
        self._ones = np.ones(rows, np.int64)
        self._row_tiles = np.full(rows, self._tiles_of_a_row, np.int64)
        self._pages, self._chunks = (np.empty(rows, np.int64) for _ in range(2))
        self._first_tiles = np.zeros(rows + 1, np.int32)
        self._row_numbers = np.arange(rows, dtype=np.int32)
        self._tile_numbers = np.arange(tiles, dtype=np.int32)

    def whole(self, step: DecodeRows) -> Fa2Size:
        """Size a plan that splits no row; its arrays are those of `fill_whole`, whatever the lengths are."""
        rows, page_size = step.rows, self._shape.page_size
        tiles = rows * self._tiles_of_a_row
        return Fa2Size(
            tile_q=self._tile_q,
            split=False,
            chunk_pages=-(-step.longest // page_size),
            queries=self._ones[:rows],
            row_tiles=self._row_tiles[:rows],
            row_chunks=self._ones[:rows],
            tiles=tiles,
            padded_tiles=tiles,
            query_rows=rows,
            partial_rows=0,
            masked=False,
        )

    def fill_whole(self, out: Fa2Buffers) -> None:
        """Write the plan of all rows unsplit: that of fewer rows is its beginning.

        The kernel takes the end of each row from the page lists, and reads the chunk size without using it.
        """
        fill_fa2(size_fa2(self._ones, self._ones, self._shape, self._tile_q, None), self._shape.page_size, out)

    def split(self, lengths: Array, step: DecodeRows, bucket: int | None, *, always: bool = False) -> Fa2Size:
        """Size a plan that splits rows of `lengths` tokens, filled up to `step.rows` with rows of one page.

        In a bucket the plan has the fixed grid and the mask of a captured launch. If no row gets several chunks, the
        plan is `whole`, unless it is to be a split one `always`.
        """
        shape, rows = self._shape, step.rows
        pages, chunks = self._pages[:rows], self._chunks[:rows]
        given = pages[: len(lengths)]
        np.add(lengths, shape.page_size - 1, out=given)
        np.floor_divide(given, shape.page_size, out=given)
        if rows > len(lengths):
            pages[len(lengths) :] = 1
        chunk_pages = decode_chunk_pages(pages, shape, self._tiles_of_a_row)
        if chunk_pages * shape.page_size >= step.longest and not always:
            return self.whole(step)
        np.add(pages, chunk_pages - 1, out=chunks)
        np.floor_divide(chunks, chunk_pages, out=chunks)
        np.add.accumulate(chunks, out=self._first_tiles[1 : rows + 1])
        partial_rows = int(self._first_tiles[rows])
        tiles = partial_rows * self._tiles_of_a_row
        return Fa2Size(
            tile_q=self._tile_q,
            split=True,
            chunk_pages=chunk_pages,
            queries=self._ones[:rows],
            row_tiles=self._row_tiles[:rows],
            row_chunks=chunks,
            tiles=tiles,
            padded_tiles=tiles if bucket is None else max_decode_tiles(bucket, self._tiles_of_a_row, shape),
            query_rows=rows,
            partial_rows=partial_rows,
            masked=bucket is not None,
        )

    @staticmethod
    def clear(out: Fa2Buffers) -> None:
        """Write what all split plans with one query tile a row have in common."""
        out.qo_tile_indices.fill(0)

    def fill_split(self, size: Fa2Size, out: Fa2Buffers) -> None:
        """Write the last size that `split` made. Nothing else is written; capacities have been checked.

        With one query tile a row, `qo_tile_indices` is left as `clear` made it.
        """
        if self._tiles_of_a_row > 1:
            fill_fa2(size, self._shape.page_size, out)
            return
        rows, tiles, padded = size.query_rows, size.tiles, size.padded_tiles
        chunks, first_tiles = size.row_chunks, self._first_tiles[: rows + 1]
        out.request_indices[:tiles] = self._row_numbers[:rows].repeat(chunks)
        np.subtract(self._tile_numbers[:tiles], first_tiles[:rows].repeat(chunks), out=out.kv_tile_indices[:tiles])
        out.o_indptr[: rows + 1] = first_tiles
        out.merge_indptr[: rows + 1] = first_tiles
        out.block_valid_mask[:tiles] = 1
        if padded > tiles:
            for array in (out.request_indices, out.kv_tile_indices, out.block_valid_mask):
                array[tiles:padded] = 0
        out.kv_chunk_size[0] = size.chunk_pages * self._shape.page_size
        out.total_num_rows[0] = rows
