"""Brings a step to the device: one staged copy of host numbers, then a kernel that derives the rest from them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.attention_plan import StepRows
from engine.plan import ALIGNMENT, Buffer, DType, PlanCapacity
from engine.step import StepPlan

Array = NDArray[Any]

STAGES = 3
"""Staging buffers: one for each of two steps in flight, and one that is being written."""
UPDATE_BYTES = 12
_TORCH = {"uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
_SAMPLING_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed")


def _place(shapes: Iterator[tuple[str, DType, tuple[int, ...]]]) -> tuple[Buffer, ...]:
    placed: list[Buffer] = []
    offset = 0
    for name, dtype, shape in shapes:
        placed.append(Buffer(name, dtype, shape, offset))
        offset += -(-placed[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(placed)


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Buffers of a step's inputs: `staged` come from the host in one copy, `device` are written by kernels only.

    Behind the row slots of requests is the padding slot, number `max_bucket`. Its block table holds page 0 alone, and
    its parameters are those of a greedy row: rows that fill a bucket lie in it.
    """

    capacity: PlanCapacity

    def _staged(self) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        capacity = self.capacity
        slots, rows = (capacity.max_bucket + 1,), (capacity.max_rows,)
        yield "result_turn", "int64", (1,)
        yield "seed", "int64", slots
        yield "temperature", "float32", slots
        yield "top_k", "int32", slots
        yield "top_p", "float32", slots
        yield "min_p", "float32", slots
        yield "sampled_positions", "int64", rows
        yield "sampled_slots", "int64", rows
        yield "sampled_tokens_at", "int32", rows
        yield "row_slots", "int32", rows
        yield "lengths", "int32", rows
        yield "query_indptr", "int32", (capacity.max_rows + 1,)
        yield "chunk_indptr", "int32", (capacity.max_rows + 1,)
        # Last, so that a step copies only what it uses.
        yield "chunk_tokens", "int32", (capacity.max_step_tokens,)

    def _device(self) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        capacity = self.capacity
        slots = capacity.max_bucket + 1
        yield "block_table", "int32", (slots, capacity.max_pages_per_row)
        yield "last_tokens", "int32", (slots,)
        yield "decode_indptr", "int32", (capacity.max_rows + 1,)
        yield "page_indptr", "int32", (capacity.max_rows + 1,)
        yield "page_indices", "int32", (capacity.max_pages,)
        yield "last_page_len", "int32", (capacity.max_rows,)
        yield "token_ids", "int32", (capacity.max_step_tokens,)
        yield "positions", "int32", (capacity.max_step_tokens,)
        yield "slot_mapping", "int64", (capacity.max_step_tokens,)

    def _updates(self) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        # int64 places in the table, and behind the last of them the int32 pages that go there.
        yield "updates", "uint8", (UPDATE_BYTES * self.capacity.max_pages,)

    @property
    def staged(self) -> tuple[Buffer, ...]:
        """Buffers that the host writes, on the host and on the device."""
        return _place(self._staged())

    @property
    def device(self) -> tuple[Buffer, ...]:
        """Buffers that live on the device alone."""
        return _place(self._device())

    @property
    def updates(self) -> tuple[Buffer, ...]:
        """Differences of the block table, copied in steps that have any."""
        return _place(self._updates())

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(_bytes(buffers) for buffers in (self.staged, self.device, self.updates))


def _bytes(buffers: tuple[Buffer, ...]) -> int:
    return -(-(buffers[-1].offset + buffers[-1].nbytes) // ALIGNMENT) * ALIGNMENT


def _tensors(memory: Tensor, buffers: tuple[Buffer, ...]) -> dict[str, Tensor]:
    return {
        buffer.name: memory[buffer.offset : buffer.offset + buffer.nbytes].view(_TORCH[buffer.dtype]).view(buffer.shape)
        for buffer in buffers
    }


class Stage:
    """One pinned copy of a set of buffers. `open` waits until the copy that last read it is over."""

    def __init__(self, buffers: tuple[Buffer, ...], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(_bytes(buffers), dtype=torch.uint8, pin_memory=on_gpu)
        self.arrays: dict[str, Array] = {
            name: tensor.numpy() for name, tensor in _tensors(self._memory, buffers).items()
        }
        self._read = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def open(self) -> dict[str, Array]:
        """The arrays, safe to write."""
        if self._read is not None:
            self._read.synchronize()
        return self.arrays

    def send(self, target: Tensor, nbytes: int) -> None:
        """Queue the copy of the first `nbytes` bytes to `target`."""
        target[:nbytes].copy_(self._memory[:nbytes], non_blocking=True)
        if self._read is not None:
            self._read.record()


def step_rows(plan: StepPlan) -> StepRows:
    """The rows of a plan, as the attention plans want them."""
    counts = np.array([len(chunk.tokens) for chunk in plan.chunks], np.int64)
    starts = np.array([chunk.start for chunk in plan.chunks], np.int64)
    return StepRows(np.array(plan.decode_lengths, np.int64), counts, starts + counts)


class SlotSampling:
    """Sampling parameters by row slot, as the host knows them."""

    def __init__(self, slots: int) -> None:
        self.columns: dict[str, Array] = {
            "seed": np.zeros(slots, np.int64),
            "temperature": np.zeros(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "top_p": np.ones(slots, np.float32),
            "min_p": np.zeros(slots, np.float32),
        }

    def start(self, plan: StepPlan) -> None:
        """Take the parameters of the plan's new rows."""
        for row, sampling, _ in plan.starts:
            for name in _SAMPLING_COLUMNS:
                value = getattr(sampling, name)
                # The column keeps the bits of an unsigned seed as a signed number.
                self.columns[name][row] = value - (1 << 64) if name == "seed" and value >> 63 else value


Head = Callable[..., None]
"""`engine.kernels.step_head.write_step`, or a stand-in with the same arguments."""


class StepInputs:
    """The inputs of a step on the device, at addresses that never change. `write` takes a checked plan."""

    def __init__(self, capacity: PlanCapacity, device: torch.device, head: Head, memory: Tensor | None = None) -> None:
        """`memory` is uint8 `[InputLayout.nbytes]` on `device`, zeroed; by default it is allocated."""
        layout = InputLayout(capacity)
        self._capacity = capacity
        self._head = head
        if memory is None:
            memory = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        staged, device_only = _bytes(layout.updates), _bytes(layout.updates) + _bytes(layout.staged)
        self._updates_memory, self._staged_memory = memory[:staged], memory[staged:device_only]
        self._device_memory = memory[device_only:]
        self.staged = _tensors(self._staged_memory, layout.staged)
        self.device = _tensors(self._device_memory, layout.device)
        torch.arange(capacity.max_rows + 1, out=self.device["decode_indptr"], device=device, dtype=torch.int32)
        self._fixed_bytes = layout.staged[-1].offset
        self._stages = [(Stage(layout.staged, device), Stage(layout.updates, device)) for _ in range(STAGES)]
        self.sampling = SlotSampling(capacity.max_bucket + 1)
        self._turn = 0
        self.rows = self.tokens = self.sampled = 0
        self._count = np.arange(capacity.max_rows + 1, dtype=np.int32)
        self._padding_slot = capacity.max_bucket

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._updates_memory.nbytes + self._staged_memory.nbytes + self._device_memory.nbytes

    def write(self, plan: StepPlan, rows: StepRows, *, turn: int = 0, bucket: int | None = None) -> None:
        """Stage the plan, whose rows are `rows`, and queue its copies and the kernel that derives the rest.

        With `bucket`, the plan's decode rows are filled up to so many with rows of the padding slot, each of length 1;
        it has no chunks, and `derive` is the caller's to launch: a graph holds it. `turn` is for the step's own use:
        `staged["result_turn"]`.
        """
        self._turn = (self._turn + 1) % STAGES
        stage, updates = self._stages[self._turn]
        self.sampling.start(plan)
        self._send_updates(updates, plan)
        arrays = stage.open()
        arrays["result_turn"][0] = turn
        for name, column in self.sampling.columns.items():
            arrays[name][:] = column
        self._stage_decode(arrays, plan, rows, len(plan.decode_rows) if bucket is None else bucket)
        if plan.chunks:
            self._stage_chunks(arrays, plan, rows)
        arrays["lengths"][self.rows :] = 0
        chunk_tokens = self.tokens if plan.chunks else 0
        stage.send(self._staged_memory, self._fixed_bytes + 4 * chunk_tokens)
        if bucket is None and self.rows:
            self.derive(len(plan.decode_rows))

    def _send_updates(self, stage: Stage, plan: StepPlan) -> None:
        if not plan.table:
            return
        # The last entry for a place wins, as on the host; a scatter would leave that to chance.
        width = self._capacity.max_pages_per_row
        pages = {update.row * width + update.index: update.page for update in plan.table}
        middle, end = 8 * len(pages), UPDATE_BYTES * len(pages)
        staged, memory = stage.open()["updates"], self._updates_memory
        staged[:middle].view(np.int64)[:] = list(pages)
        staged[middle:end].view(np.int32)[:] = list(pages.values())
        stage.send(memory, end)
        places, numbers = memory[:middle].view(torch.int64), memory[middle:end].view(torch.int32)
        self.device["block_table"].view(-1).scatter_(0, places, numbers)

    def _stage_decode(self, arrays: dict[str, Array], plan: StepPlan, step: StepRows, rows: int) -> None:
        """Stage `rows` decode rows: the plan's, then padding."""
        decode = len(plan.decode_rows)
        self.rows = self.tokens = self.sampled = rows
        for name in ("row_slots", "sampled_slots"):
            arrays[name][decode:rows] = self._padding_slot
        for name in ("lengths", "sampled_positions"):
            arrays[name][:decode] = step.decode_lengths
            arrays[name][decode:rows] = 1
        arrays["row_slots"][:decode] = plan.decode_rows
        arrays["sampled_slots"][:decode] = arrays["row_slots"][:decode]
        arrays["query_indptr"][: rows + 1] = self._count[: rows + 1]
        arrays["sampled_tokens_at"][:rows] = self._count[:rows]

    def _stage_chunks(self, arrays: dict[str, Array], plan: StepPlan, step: StepRows) -> None:
        """Stage the chunks behind the decode rows."""
        decode, chunks = self.rows, plan.chunks
        rows = decode + len(chunks)
        arrays["row_slots"][decode:rows] = [chunk.row for chunk in chunks]
        arrays["lengths"][decode:rows] = step.chunk_lengths
        arrays["chunk_indptr"][0] = 0
        ends = np.cumsum(step.chunk_tokens, out=arrays["chunk_indptr"][1 : len(chunks) + 1])
        arrays["query_indptr"][decode + 1 : rows + 1] = decode + ends
        end = decode
        for chunk in chunks:
            begin, end = end, end + len(chunk.tokens)
            arrays["chunk_tokens"][begin:end] = chunk.tokens
        which = decode + np.flatnonzero([chunk.samples for chunk in chunks])
        self.rows, self.tokens, self.sampled = rows, end, decode + len(which)
        arrays["sampled_tokens_at"][decode : self.sampled] = arrays["query_indptr"][which + 1] - 1
        arrays["sampled_slots"][decode : self.sampled] = arrays["row_slots"][which]
        arrays["sampled_positions"][decode : self.sampled] = arrays["lengths"][which]

    def derive(self, decode_rows: int) -> None:
        """Launch the kernel at the head of the step that was written last, whose first `decode_rows` rows decode."""
        device, staged = self.device, self.staged
        self._head(
            block_table=device["block_table"],
            last_tokens=device["last_tokens"],
            row_slots=staged["row_slots"],
            lengths=staged["lengths"],
            query_indptr=staged["query_indptr"],
            chunk_tokens=staged["chunk_tokens"],
            page_indptr=device["page_indptr"],
            page_indices=device["page_indices"],
            last_page_len=device["last_page_len"],
            token_ids=device["token_ids"],
            positions=device["positions"],
            slot_mapping=device["slot_mapping"],
            rows=self.rows,
            decode_rows=decode_rows,
            page_size=self._capacity.page_size,
        )

    def by_token(self, name: str) -> Tensor:
        """A per-token buffer (`token_ids`, `positions`, `slot_mapping`), cut to the step."""
        return self.device[name][: self.tokens]

    def sampled_rows(self, name: str, begin: int, end: int) -> Tensor:
        """A staged per-sample buffer, cut to the sampled rows `begin` to `end - 1`."""
        return self.staged[name][begin:end]

    def keep(self, begin: int, end: int, tokens: Tensor) -> None:
        """Remember the tokens (int32) of the sampled rows `begin` to `end - 1`, each in its row slot."""
        self.device["last_tokens"].index_copy_(0, self.sampled_rows("sampled_slots", begin, end), tokens)
