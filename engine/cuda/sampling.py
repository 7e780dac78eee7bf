"""Chooses tokens on the device by the rules of `engine.sampling`: the same launches whatever the rows ask for."""

import torch
from torch import Tensor

from engine.cuda.inputs import StepInputs
from engine.sampling import Buffers


class DeviceSampler:
    """Greedy rows and rows that draw, in the same launches. Triton is loaded with the first object."""

    @staticmethod
    def reserve(buffers: Buffers, rows: int, vocab: int) -> None:
        """Plan the scratch for up to `rows` rows at once."""
        from engine.kernels.sample_space import space_shapes

        for name, (shape, dtype) in space_shapes(rows, vocab).items():
            buffers.reserve(f"sample_{name}", shape, getattr(torch, dtype))

    def __init__(self, buffers: Buffers) -> None:
        from engine.kernels.sample_space import SampleSpace

        self.space = SampleSpace(*(buffers.take(f"sample_{name}") for name in SampleSpace._fields))

    def choose(self, logits: Tensor, inputs: StepInputs, rows: slice, out: Tensor) -> None:
        """Write the tokens of the sampled rows `rows` to `out` (int32 `[rows]`).

        `logits` is float32 `[rows, vocab]`. A row's token depends on its logits, parameters, seed and position alone.
        Neither waits nor allocates, and reads the parameters on the device, so that it may be captured.
        """
        from engine.kernels.sample import SampleColumns, sample

        columns = SampleColumns(*(inputs.staged[name] for name in SampleColumns._fields))
        slots = inputs.sampled_rows("sampled_slots", rows.start, rows.stop)
        positions = inputs.sampled_rows("sampled_positions", rows.start, rows.stop)
        sample(logits, columns, slots, positions, out, self.space)
