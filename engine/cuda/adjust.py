"""Penalties and suppressed tokens on the device, by row slot. Steps without such rows look up a dict."""

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from engine.cuda.inputs import STAGES, Array, Stage, StepInputs
from engine.plan import Buffer
from engine.sampling import Buffers
from engine.step import RowContext, RowStart, StepPlan

_FLOATS = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_ALWAYS = 1 << 62
_MARKS = 16384
"""Tokens whose marks go to the device in one copy."""


class LogitsAdjuster:
    """Changes the logits of rows with penalties or `min_tokens`. Triton is loaded with the first object."""

    @staticmethod
    def reserve(buffers: Buffers, slots: int, vocab: int) -> None:
        """Plan the device memory: two bytes a token of the vocabulary for each of `slots` row slots, and some."""
        buffers.reserve("adjust_marks", (slots, vocab), torch.int16)
        buffers.reserve("adjust_columns", (4, slots), torch.int32)
        buffers.reserve("adjust_staged", (2, _MARKS), torch.int32)

    def __init__(self, buffers: Buffers) -> None:
        from engine.kernels import penalize

        self._kernels = penalize
        self._marks = buffers.take("adjust_marks")
        self._staged = buffers.take("adjust_staged")
        self._device_columns = buffers.take("adjust_columns")
        floats = self._device_columns.view(torch.float32)
        self._columns = penalize.PenaltyColumns(floats[0], floats[1], floats[2], self._device_columns[3])
        slots, device = self._marks.shape[0], self._marks.device
        self._host_columns: Array = np.zeros((4, slots), np.int32)
        self._host_columns[0].view(np.float32)[:] = 1.0
        self._column_stages = _stages("columns", (4, slots), device)
        self._mark_stages = _stages("marks", (2, _MARKS), device)
        # The position before which a row's tokens are chosen from changed logits.
        self._until: dict[int, int] = {}
        self._sent = False

    def start(self, starts: Sequence[RowStart]) -> None:
        """Forget what the slots' last requests asked for, and bring to the device what these do."""
        changed = not self._sent
        for row, sampling, context in starts:
            if context is None and row not in self._until:
                continue
            changed = True
            self._until.pop(row, None)
            numbers = [1.0, 0.0, 0.0] if context is None else [getattr(sampling, name) for name in _FLOATS]
            self._host_columns[:3, row] = np.array(numbers, np.float32).view(np.int32)
            self._host_columns[3, row] = 0 if context is None else context.suppressed_until
            if context is not None:
                self._until[row] = _ALWAYS if sampling.penalizes else context.suppressed_until
                self._mark(row, context)
        if changed:
            self._sent = True
            stage = next(self._column_stages)
            stage.open()["columns"][:] = self._host_columns
            stage.send(self._device_columns.view(-1).view(torch.uint8), self._host_columns.nbytes)

    def _mark(self, row: int, context: RowContext) -> None:
        kernels = self._kernels
        self._marks[row].zero_()
        outputs, counts = np.unique(np.asarray(context.outputs, np.int32), return_counts=True)
        # Each kind by itself: a kernel that met one token twice, with other bits, might lose some.
        for tokens, bits in (
            (context.prompt, kernels.PROMPT),
            (context.suppressed, kernels.SUPPRESSED),
            (outputs, np.minimum(counts, kernels.MOST)),
        ):
            for begin in range(0, len(tokens), _MARKS):
                part = tokens[begin : begin + _MARKS]
                count, stage = len(part), next(self._mark_stages)
                arrays = stage.open()["marks"]
                arrays[0, :count] = part
                arrays[1, :count] = bits if isinstance(bits, int) else bits[begin : begin + count]
                stage.send(self._staged.view(-1).view(torch.uint8), self._staged.nbytes)
                kernels.mark(self._marks[row], self._staged[0], self._staged[1], count)

    def adjusts(self, plan: StepPlan) -> bool:
        """True if the step samples a row whose logits are to be changed."""
        if not self._until:
            return False
        decoding = zip(plan.decode_rows, plan.decode_lengths, strict=True)
        sampling = [
            *decoding,
            *((chunk.row, chunk.start + len(chunk.tokens)) for chunk in plan.chunks if chunk.samples),
        ]
        return any(position < self._until.get(row, 0) for row, position in sampling)

    def adjust(self, logits: Tensor, inputs: StepInputs, rows: slice) -> None:
        """Change the logits (float32 `[rows, vocab]`) of the sampled rows `rows` in place."""
        slots = inputs.sampled_rows("sampled_slots", rows.start, rows.stop)
        positions = inputs.sampled_rows("sampled_positions", rows.start, rows.stop)
        self._kernels.penalize(logits, self._marks, self._columns, slots, positions)

    def keep(self, inputs: StepInputs, rows: slice, tokens: Tensor) -> None:
        """Count the `tokens` (int32 `[rows]`) of the sampled rows `rows` as output."""
        slots = inputs.sampled_rows("sampled_slots", rows.start, rows.stop)
        self._kernels.count(self._marks, self._columns, slots, tokens)


def _stages(name: str, shape: tuple[int, ...], device: torch.device) -> Iterator[Stage]:
    """Staging buffers in turn, for ever."""
    return cycle([Stage((Buffer(name, "int32", shape, 0),), device) for _ in range(STAGES)])
