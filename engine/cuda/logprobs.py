"""Log probabilities on the device: of sampled tokens with the step's results, of prompt tokens at once.

The numbers are those of `engine.logprobs`: under the model's own distribution, before penalties and temperature.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cuda.inputs import STAGES, Array, Stage, StepInputs
from engine.cuda.sampling import DeviceSampler
from engine.messages import Logprobs
from engine.plan import Buffer, PlanError
from engine.sampling import Buffers
from engine.step import RowStart, StepPlan

if TYPE_CHECKING:
    from engine.kernels.logprobs import LogprobOutputs

MOST = 20
"""Likeliest tokens that are kept of a row: as many as the worker lets a client ask for."""
_WIDTH = 1 + 2 * MOST


class Sizes(NamedTuple):
    """What the memory for log probabilities is sized by."""

    slots: int
    rows: int
    """Rows of a step."""
    slice_rows: int
    """Rows whose logits are held at once."""
    vocab: int


class DeviceLogprobs:
    """Knows which row slots want log probabilities, and reads them. Triton is loaded with the first object."""

    @staticmethod
    def reserve(buffers: Buffers, sizes: Sizes) -> None:
        """Plan the device memory."""
        buffers.reserve("logprob_columns", (3, sizes.slots), torch.int32)
        buffers.reserve("logprob_prompt_columns", (3, MOST + 1), torch.int32)
        buffers.reserve("logprob_off", (2, max(sizes.slots, MOST + 1)), torch.float32)
        buffers.reserve("logprob_seeds", (max(sizes.slots, MOST + 1),), torch.int64)
        buffers.reserve("logprob_slots", (sizes.slice_rows,), torch.int64)
        buffers.reserve("logprob_unused", (sizes.slice_rows,), torch.int32)
        buffers.reserve("logprob_prompt", (sizes.slice_rows, _WIDTH), torch.float32)
        buffers.reserve("logprob_results", (STAGES + 1, sizes.rows, _WIDTH), torch.float32)
        # A graph writes to one place, and then into the place of the step's turn.
        buffers.reserve("logprob_bucket_results", (1, sizes.rows, _WIDTH), torch.float32)

    def __init__(self, buffers: Buffers, sampler: DeviceSampler, vocab: int) -> None:
        from engine.kernels.logprobs import LogprobColumns, LogprobOutputs, read_logprobs
        from engine.kernels.sample import SampleColumns

        self._read, self._outputs, self._space, self._vocab = read_logprobs, LogprobOutputs, sampler.space, vocab
        self._off, self._seeds = buffers.take("logprob_off"), buffers.take("logprob_seeds")
        self._off[0] = 1.0
        self._memory = buffers.take("logprob_columns")
        prompt = buffers.take("logprob_prompt_columns")

        def columns(memory: Tensor) -> LogprobColumns:
            asks = memory[0].view(torch.float32)
            return LogprobColumns(SampleColumns(asks, memory[1], self._off[0], self._off[1], self._seeds), memory[2])

        self._columns, self._prompt_columns = columns(self._memory), columns(prompt)
        prompt.copy_(torch.tensor([_asking(top, vocab) for top in range(MOST + 1)], dtype=torch.int32).T)
        self._slots, self._unused = buffers.take("logprob_slots"), buffers.take("logprob_unused")
        self._prompt = buffers.take("logprob_prompt")
        self._results = buffers.take("logprob_results")
        self._bucket_results = buffers.take("logprob_bucket_results")
        on_gpu = self._results.device.type == "cuda"
        self._host = torch.zeros(self._results.shape, dtype=torch.float32, pin_memory=on_gpu)
        shape = tuple(self._memory.shape)
        stages = [Stage((Buffer("columns", "int32", shape, 0),), self._memory.device) for _ in range(STAGES)]
        self._stages = cycle(stages)
        self._host_columns: Array = np.zeros(shape, np.int32)
        self._wanted: dict[int, int] = {}
        self._sent = False

    @staticmethod
    def check(plan: StepPlan) -> None:
        """Raise `PlanError` for more of the likeliest tokens than there is room for."""
        asked = [(f"logprobs of row {start.row}", start.sampling.logprobs or 0) for start in plan.starts]
        asked += [(f"top_logprobs of the chunk of row {chunk.row}", chunk.top_logprobs) for chunk in plan.chunks]
        for what, top in asked:
            if top > MOST:
                raise PlanError(what, top, MOST)

    def start(self, starts: Sequence[RowStart]) -> None:
        """Forget what the slots' last requests asked for, and bring to the device what these do."""
        changed = not self._sent
        for start in starts:
            top = start.sampling.logprobs
            if top is None and start.row not in self._wanted:
                continue
            changed = True
            self._wanted.pop(start.row, None)
            self._host_columns[:, start.row] = 0
            if top is not None:
                self._wanted[start.row] = top
                self._host_columns[:, start.row] = _asking(top, self._vocab)
        if changed:
            self._sent = True
            stage = next(self._stages)
            stage.open()["columns"][:] = self._host_columns
            stage.send(self._memory.view(-1).view(torch.uint8), self._host_columns.nbytes)

    def wishes(self, rows: Sequence[int]) -> dict[int, int]:
        """Number of likeliest tokens wanted, by place in `rows` (row slots), of those that want log probabilities."""
        if not self._wanted:
            return {}
        return {place: self._wanted[row] for place, row in enumerate(rows) if row in self._wanted}

    def read(self, logits: Tensor, inputs: StepInputs, rows: slice, tokens: Tensor, turn: int | None) -> None:
        """Queue the reading of the sampled rows `rows`, whose tokens (int32) were drawn, for the step of `turn`.

        Without a turn, which a graph does not know, `place` is to follow. `logits` are the model's own, float32
        `[rows, vocab]`. Overwrites the sampler's scratch.
        """
        slots = inputs.sampled_rows("sampled_slots", rows.start, rows.stop)
        results = self._bucket_results[0] if turn is None else self._results[turn]
        target = self._out(results[rows])
        self._read(logits, self._columns, slots, tokens, target, self._space, self._unused[: len(logits)])

    def place(self, turn: Tensor) -> None:
        """Bring what was read without a turn to the results of `turn` (int64 `[1]`, on the device)."""
        self._results.index_copy_(0, turn, self._bucket_results)

    def fetch(self, turn: int, count: int) -> Tensor:
        """Queue the copy of the first `count` results of `turn` to the host; valid when the stream has come so far."""
        target = self._host[turn, :count]
        target.copy_(self._results[turn, :count], non_blocking=True)
        return target

    def read_now(self, logits: Tensor, targets: Sequence[int], top: int) -> Logprobs:
        """Of `targets` under `logits` (float32 `[rows, vocab]`), and of each row's `top` likeliest. Waits for them."""
        count = len(targets)
        slots, out = self._slots[:count].fill_(top), self._prompt[:count]
        ids = torch.from_numpy(np.asarray(targets, np.int32)).to(logits.device)
        self._read(logits, self._prompt_columns, slots, ids, self._out(out), self._space, self._unused[:count])
        return packed(out.cpu(), min(top, self._vocab))

    def _out(self, results: Tensor) -> "LogprobOutputs":
        """Views of `results` (float32 `[rows, _WIDTH]`)."""
        return self._outputs(results[:, 0], results[:, 1 : 1 + MOST].view(torch.int32), results[:, 1 + MOST :])


def _asking(top: int, vocab: int) -> tuple[int, int, int]:
    """Columns of a row that wants `top` likeliest tokens: see `engine.kernels.logprobs.LogprobColumns`."""
    return int(np.float32(1.0).view(np.int32)), max(1, min(top, vocab - 1)), min(top, vocab)


def packed(results: Tensor, top: int) -> Logprobs:
    """As messages carry them, of `results` on the host (float32 `[rows, _WIDTH]`)."""
    values: Array = results.numpy()
    ids: Array = values[:, 1 : 1 + top].view(np.int32) if top else values[:, :0]
    return Logprobs(
        np.ascontiguousarray(values[:, 0]).tobytes(),
        np.ascontiguousarray(ids).tobytes(),
        np.ascontiguousarray(values[:, 1 + MOST : 1 + MOST + top]).tobytes(),
    )
