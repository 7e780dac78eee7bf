"""Chooses tokens on the device by the rules of `engine.sampling`, without asking the device what the rows want."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.cuda.inputs import Array, StepInputs
from engine.sampling import DRAW_ROWS, TOP_K_CLASSES, Buffers, Sampler


class DeviceSampler:
    """Greedy rows by argmax, the others by `engine.sampling.Sampler`, a few rows at a time."""

    @staticmethod
    def reserve(buffers: Buffers, vocab: int) -> None:
        """Plan the scratch."""
        Sampler.reserve(buffers, vocab)

    def __init__(self, buffers: Buffers) -> None:
        self._sampler = Sampler(buffers)

    def choose(self, logits: Tensor, inputs: StepInputs, rows: slice, slots: Sequence[int], out: Tensor) -> None:
        """Write the tokens of the sampled rows `rows`, which lie in `slots`, to `out` (int32 `[rows]`).

        `logits` is float32 `[rows, vocab]`. A row's token depends on its logits, parameters, seed and position alone.
        """
        out.copy_(logits.argmax(dim=-1))
        columns = inputs.sampling.columns
        temperature = columns["temperature"][list(slots)]
        drawn = np.flatnonzero(temperature > 0)
        if not len(drawn):
            return
        parameters = inputs.sampling_rows(rows.start, rows.stop)
        widths = self._widths(columns["top_k"][list(slots)], logits.shape[1])
        with torch.device(logits.device):
            for width in sorted(set(widths[drawn].tolist())):
                members = drawn[widths[drawn] == width]
                for first in range(0, len(members), DRAW_ROWS):
                    some = torch.tensor(members[first : first + DRAW_ROWS])
                    out[some] = self._sampler.draw(logits[some], parameters.take(some), width).int()

    @staticmethod
    def _widths(top_k: Array, vocab: int) -> Array:
        """Candidates that each row sorts: the smallest class that holds its top_k, or the vocabulary."""
        widths = np.full(len(top_k), vocab, np.int64)
        for size in reversed(TOP_K_CLASSES):
            if size < vocab:
                widths[(top_k > 0) & (top_k <= size)] = size
        return widths
