"""Where the attention plans of a step lie: one device arena at fixed offsets, sized once. Numpy alone.

The arena begins with the *staged* sections, which the host fills in pinned memory at the same offsets. They are in such
an order that what a step uses is one range, and one copy: `chunks` and `decode`, `decode` alone, or `decode` and `fa3`.
`whole`, the decode plan that splits no row, is the same in every step and copied once. What follows the staged sections
lives on the device only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from engine.cuda.fa3 import MAX_WORKS_PER_HEAD, max_works_per_head
from engine.cuda.planner import AttentionShape, tile_q_for
from engine.cuda.policy import max_decode_tiles
from engine.plan import INT32_MAX, Buffer, DType, PlanCapacity, PlanError, aligned

Section = Literal["whole", "chunks", "decode", "fa3", "device"]
STAGED: tuple[Section, ...] = ("whole", "chunks", "decode", "fa3")
FA3_LISTS = ("qo_tile_indices", "qo_indptr", "kv_indptr", "qo_lens", "kv_lens", "head_indices", "batch_indices")
ELEMENT_BYTES = 2
"""Of activations, KV and partial results: the lane computes in bfloat16 or float16."""


@dataclass(frozen=True)
class AttentionCapacity:
    """The largest attention plans of a lane. Raises `PlanError` if a derived number does not fit the kernels' int32."""

    step: PlanCapacity
    sm_count: int
    sm90: bool
    """The card runs FA3."""
    xqa: bool
    """Decode rows may run on XQA."""

    def __post_init__(self) -> None:
        if self.sm_count < 1:
            raise ValueError(f"AttentionCapacity.sm_count is {self.sm_count}, but must be at least 1")
        elements = self.step.heads * self.step.head_dim
        bounded = {
            "tiles of the decode plan": (self.max_decode_tiles, "lower max_bucket"),
            "tiles of the chunk plan": (self.max_chunk_tiles, "lower max_step_tokens"),
            "elements of the decode rows' partial results": (self.decode_partial_rows * elements, "lower max_bucket"),
            "elements of the chunks' partial results": (self.chunk_partial_rows * elements, "run on a smaller card"),
            "works of the FA3 plan": (self.max_works, "lower max_step_tokens"),
        }
        for dimension, (value, hint) in bounded.items():
            if value > INT32_MAX:
                raise PlanError(dimension, value, INT32_MAX, hint)

    @property
    def shape(self) -> AttentionShape:
        """What plans depend on besides the rows."""
        step = self.step
        return AttentionShape(step.heads, step.kv_heads, step.head_dim, step.page_size, self.sm_count)

    @property
    def decode_tile_q(self) -> int:
        """Packed queries of a decode tile. Pinned: it depends on the group alone."""
        return tile_q_for(self.shape.group, self.step.head_dim)

    @property
    def decode_row_tiles(self) -> int:
        """Query tiles of a decode row."""
        return -(-self.shape.group // self.decode_tile_q)

    @property
    def max_decode_tiles(self) -> int:
        """Tiles of the largest decode plan, whole or split."""
        return max_decode_tiles(self.step.max_rows, self.decode_row_tiles, self.shape)

    @property
    def decode_partial_rows(self) -> int:
        """KV chunks of all rows of a split decode plan, one query token each."""
        return max_decode_tiles(self.step.max_rows, 1, self.shape)

    @property
    def max_chunk_tiles(self) -> int:
        """Tiles of the largest FA2 plan for chunks.

        The tile grows with the mean of packed queries, so small tiles come with few of them: a mean (rounded down) of
        at most 16 bounds their sum by 17 a row, one of at most 64 by 65. Rounding up costs each further row one tile.
        """
        rows = self.step.max_rows
        packed = self.step.max_step_tokens * self.shape.group
        largest = tile_q_for(INT32_MAX, self.step.head_dim)
        tiles = [-(-min(packed, 17 * rows) // 16), -(-min(packed, 65 * rows) // 64), -(-packed // largest)]
        return max(max(tiles) + rows - 1, self.shape.split_budget)

    @property
    def chunk_partial_rows(self) -> int:
        """Sum of query tokens x KV chunks over the rows of a split FA2 plan for chunks.

        A row of q tokens has at least q x group / tile tiles, and tiles x chunks is at most `split_budget`.
        """
        return self.shape.split_budget * tile_q_for(INT32_MAX, self.step.head_dim) // self.shape.group

    @property
    def max_works(self) -> int:
        """Entries of FA3's work lists; 0 where FA3 does not run."""
        if not self.sm90:
            return 0
        per_head = max_works_per_head(self.step.max_step_tokens, self.step.max_rows, self.step.head_dim)
        return max(per_head, min(per_head, MAX_WORKS_PER_HEAD) * self.step.heads)


class Range(NamedTuple):
    """Bytes `begin` to `end - 1` of the arena."""

    begin: int
    end: int


@dataclass(frozen=True)
class AttentionLayout:
    """Buffers of the attention plans, in one arena.

    - `whole`, `chunks`, `decode`: FA2's plans, named `whole_*`, `chunk_*` and `decode_*` (see `planner.Fa2Buffers`);
      `fa3`: work lists, named `fa3_*` (see `fa3.Fa3Buffers`).
    - `device`: partial results of split plans (`*_partials` in the lane's dtype, `*_lse` float32), and for XQA a dense
      page table with a row for each decode row, semaphores (zero before the first use) and scratch.
    """

    capacity: AttentionCapacity

    @staticmethod
    def _fa2(prefix: str, tiles: int, rows: int, query_rows: int) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        yield f"{prefix}_request_indices", "int32", (tiles,)
        yield f"{prefix}_qo_tile_indices", "int32", (tiles,)
        yield f"{prefix}_kv_tile_indices", "int32", (tiles,)
        yield f"{prefix}_o_indptr", "int32", (rows + 1,)
        yield f"{prefix}_merge_indptr", "int32", (query_rows + 1,)
        yield f"{prefix}_block_valid_mask", "uint8", (tiles,)
        yield f"{prefix}_kv_chunk_size", "int32", (1,)
        yield f"{prefix}_total_num_rows", "int32", (1,)

    def _fa3(self) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        if self.capacity.sm90:
            yield "fa3_work_indptr", "int32", (self.capacity.sm_count + 1,)
            for name in FA3_LISTS:
                yield f"fa3_{name}", "int32", (self.capacity.max_works,)

    def _device(self) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        capacity, step = self.capacity, self.capacity.step
        for name, rows in (("decode", capacity.decode_partial_rows), ("chunk", capacity.chunk_partial_rows)):
            yield f"{name}_partials", "uint8", (rows, step.heads, step.head_dim * ELEMENT_BYTES)
            yield f"{name}_lse", "float32", (rows, step.heads)
        if capacity.xqa:
            yield "xqa_page_table", "int32", (step.max_rows, step.max_pages_per_row)
            yield "xqa_semaphores", "int32", (step.max_rows * step.kv_heads,)
            yield "xqa_scratch", "uint8", (xqa_scratch_bytes(capacity.shape),)

    def _shapes(self) -> Iterator[tuple[Section, str, DType, tuple[int, ...]]]:
        capacity, step = self.capacity, self.capacity.step
        # No row is split: nothing to merge, nothing to mask.
        whole = self._fa2("whole", step.max_rows * capacity.decode_row_tiles, step.max_rows, 0)
        decode = self._fa2("decode", capacity.max_decode_tiles, step.max_rows, step.max_rows)
        chunks = self._fa2("chunk", capacity.max_chunk_tiles, step.max_rows, step.max_step_tokens)
        sections: dict[Section, Iterator[tuple[str, DType, tuple[int, ...]]]] = {
            "whole": whole,
            "chunks": chunks,
            "decode": decode,
            "fa3": self._fa3(),
            "device": self._device(),
        }
        for section, shapes in sections.items():
            for name, dtype, shape in shapes:
                yield section, name, dtype, shape

    @cached_property
    def _placed(self) -> list[tuple[Section, Buffer]]:
        placed: list[tuple[Section, Buffer]] = []
        offset = 0
        for section, name, dtype, shape in self._shapes():
            placed.append((section, Buffer(name, dtype, shape, offset)))
            offset += aligned(placed[-1][1].nbytes)
        return placed

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """Every buffer by its name, in the order of their places."""
        return {buffer.name: buffer for _, buffer in self._placed}

    def offsets(self, prefix: str) -> dict[str, int]:
        """Offsets of the buffers `prefix_*`, by the rest of their names."""
        start = f"{prefix}_"
        named = {name: buffer.offset for name, buffer in self.buffers.items() if name.startswith(start)}
        return {name.removeprefix(start): offset for name, offset in named.items()}

    @cached_property
    def ranges(self) -> dict[Section, Range]:
        """Where each section lies. A section without buffers is left out."""
        found: dict[Section, Range] = {}
        for section, buffer in self._placed:
            begin = found[section].begin if section in found else buffer.offset
            found[section] = Range(begin, buffer.offset + aligned(buffer.nbytes))
        return found

    @property
    def staged_nbytes(self) -> int:
        """Bytes of each pinned staging buffer."""
        return max(self.ranges[section].end for section in STAGED if section in self.ranges)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.ranges["device"].end


def xqa_scratch_bytes(shape: AttentionShape) -> int:
    """Bound on XQA's scratch (csrc/xqa/mha.cu): it splits rows into at most `sm_count` parts together, each with a
    head group of results and two rows of at most 64 float32 statistics; one part more covers the alignment.
    """
    rows = -(-shape.group // 16) * 16
    return (shape.sm_count + 1) * (2 * 64 * 4 + rows * shape.head_dim * ELEMENT_BYTES)
