"""The flight recorder: the last steps of a lane, in memory that outlives its process.

The worker makes the memory and reads it when the core is lost, whatever it was lost to: SIGKILL, a crash in a kernel,
a step that never ends. One slot a step, each a line of JSON padded with blanks.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable

import msgspec

from engine.scheduler import Scheduler
from engine.step import StepPlan

SLOTS = 1000
"""Steps that are kept."""
SLOT_BYTES = 512
_MAX_CHUNKS = 6
_MAX_ERROR = 120
_NEVER = -1


class StepRecord(msgspec.Struct):
    """One step. Times are of the core's monotonic clock."""

    step: int
    at_s: float
    """When it was planned."""
    decode_rows: int
    longest: int
    """Tokens in the KV cache of its longest decode row."""
    chunk_rows: int
    chunks: list[tuple[int, int, int]]
    """Row, first position and tokens of the first few chunks."""
    tokens: int
    """Run through the model."""
    waiting: int
    """Requests that were left in the queue."""
    free_pages: int
    cached_pages: int
    referenced_pages: int
    launch_us: int = _NEVER
    """Microseconds that the launch took; -1 in a record of a step that had not resolved."""
    total_us: int = _NEVER
    """Microseconds from the plan until the result was there; -1 while it is not."""
    error: str = ""


def allocate() -> int:
    """A descriptor of memory for one recorder. No file has its name; it is gone with its last descriptor."""
    descriptor = os.memfd_create("pagelane-steps", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SLOTS * SLOT_BYTES)
    return descriptor


class FlightRecorder:
    """Writes the steps of one lane. Costs two short encodings a step and never raises for what a step holds."""

    def __init__(self, descriptor: int, clock: Callable[[], float]) -> None:
        """`descriptor` is of `allocate`; -1 records into memory of this process's own."""
        self._memory = mmap.mmap(descriptor, SLOTS * SLOT_BYTES)
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        self._in_flight: deque[StepRecord] = deque()

    def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """`plan` is about to be launched."""
        pool = scheduler.pool
        record = StepRecord(
            step=plan.number,
            at_s=self._clock(),
            decode_rows=len(plan.decode_rows),
            longest=max(plan.decode_lengths, default=0),
            chunk_rows=len(plan.chunks),
            chunks=[(chunk.row, chunk.start, len(chunk.tokens)) for chunk in plan.chunks[:_MAX_CHUNKS]],
            tokens=plan.tokens,
            waiting=len(scheduler.waiting),
            free_pages=pool.free_pages,
            cached_pages=pool.cached_pages,
            referenced_pages=pool.referenced_pages,
        )
        self._in_flight.append(record)
        self._write(record)

    def launched(self) -> None:
        """The launch of the step planned last has returned or raised."""
        record = self._in_flight[-1]
        record.launch_us = self._since(record)

    def resolved(self, error: str = "") -> None:
        """The oldest step has its result, or has failed with `error`."""
        record = self._in_flight.popleft()
        record.total_us = self._since(record)
        record.error = error[:_MAX_ERROR]
        self._write(record)

    def _since(self, record: StepRecord) -> int:
        return round((self._clock() - record.at_s) * 1e6)

    def _write(self, record: StepRecord) -> None:
        line = self._encoder.encode(record)
        if len(line) >= SLOT_BYTES:  # an error of characters that take many bytes
            record.error = ascii(record.error)[: _MAX_ERROR // 6]
            line = self._encoder.encode(record)
        begin = record.step % SLOTS * SLOT_BYTES
        self._memory[begin : begin + SLOT_BYTES] = line.ljust(SLOT_BYTES - 1) + b"\n"


def read(descriptor: int) -> list[StepRecord]:
    """What a recorder has left, the oldest step first. A slot that was being written is left out."""
    decoder = msgspec.json.Decoder(StepRecord)
    memory = os.pread(descriptor, SLOTS * SLOT_BYTES, 0)
    records = []
    for begin in range(0, len(memory), SLOT_BYTES):
        slot = memory[begin : begin + SLOT_BYTES]
        try:
            records.append(decoder.decode(slot))
        except msgspec.DecodeError:
            continue
    return sorted(records, key=lambda record: record.step)


def as_lines(records: list[StepRecord]) -> bytes:
    """JSON Lines."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(record) + b"\n" for record in records)
