"""Matrix products of the CPU lane in the form that is fastest for their shape, found by measuring at warm-up.

A weight is stored once, as `[out, in]`. For few rows the forms differ by up to three times on one machine, and which
one wins depends on the shape, the type and the CPU; they agree up to rounding.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cpu.arena import Arena

TUNED_ROWS = (1, 2, 4, 8, 16, 32)
"""Row counts that are measured; a count between two takes the choice of the larger. Above the last, all are alike."""

_ROUNDS = 3
_SWEEP_BYTES = 48 << 20
"""Weights of a shape that are swept in one measurement: more than a core's share of the last-level cache, since a step
finds its weights in memory."""
_PRODUCT = "gemm_transposed"
_PADDED = "gemm_padded"


class Form(NamedTuple):
    """One way to compute `inputs @ weight.T`."""

    transposed: bool
    """Compute `weight @ inputs.T` and transpose the small result: MKL's better-blocked side for few rows."""
    least_rows: int
    """Pad with zero rows to this many: MKL's float32 product with two columns takes a third of the time of its
    matrix-vector product (216 against 612 us for 3072 x 576 on an EPYC with 2 threads)."""
    onednn: bool
    """Leave oneDNN on; its packing costs more than it saves for one or two rows in bfloat16."""


PLAIN = Form(transposed=False, least_rows=1, onednn=True)
_FLOAT32_FORMS = (PLAIN, Form(True, 1, True), Form(True, 2, True))
_HALF_FORMS = (PLAIN, Form(True, 1, True), Form(False, 1, False), Form(True, 1, False))


def tuned_for(rows: int) -> int | None:
    """The measured row count whose choice `rows` rows take, None above the last."""
    return next((tuned for tuned in TUNED_ROWS if tuned >= rows), None)


def reserve_scratch(arena: Arena, rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Plan the scratch for at most `rows` rows, with `inputs` and `outputs` the widest dimensions of a weight.

    It holds what `tune` measures for them too: up to the next of `TUNED_ROWS`, and two rows where one is padded.
    """
    arena.reserve(_PRODUCT, (max(2, tuned_for(rows) or TUNED_ROWS[-1]) * outputs,), dtype)
    arena.reserve(_PADDED, (2 * inputs,), dtype)


class Gemm:
    """Computes `inputs @ weight.T`. Call `tune` once; before that every shape takes the plain form."""

    def __init__(self, arena: Arena, clock: Callable[[], float] = time.perf_counter) -> None:
        self._product_scratch = arena.take(_PRODUCT)
        self._padded_scratch = arena.take(_PADDED)
        self._clock = clock
        self._forms: dict[tuple[int, ...], Form] = {}

    def __call__(self, inputs: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Write `inputs [rows, in] @ weight [out, in].T` to `out [rows, out]` and return it."""
        return self.run(self.form_for(weight, inputs.shape[0]), inputs, weight, out)

    def form_for(self, weight: Tensor, rows: int) -> Form:
        """The form chosen for `rows` rows and a weight of this shape."""
        tuned = tuned_for(rows)
        return PLAIN if tuned is None else self._forms.get((*weight.shape, tuned), PLAIN)

    def tune(self, weights: Iterable[Tensor], max_rows: int) -> None:
        """Measure the forms on every shape among `weights` for all row counts up to `max_rows` and keep the fastest."""
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        for weight in weights:
            by_shape.setdefault((weight.shape[0], weight.shape[1]), []).append(weight)
        largest = tuned_for(max_rows) or TUNED_ROWS[-1]
        counts = [rows for rows in TUNED_ROWS if rows <= largest]
        for (height, width), alike in by_shape.items():
            swept = _sweep(alike)
            for rows in counts:
                self._forms[height, width, rows] = self._fastest(swept, rows)

    def _fastest(self, weights: Sequence[Tensor], rows: int) -> Form:
        height, width = weights[0].shape
        inputs = torch.ones((rows, width), dtype=weights[0].dtype)
        out = torch.empty((rows, height), dtype=weights[0].dtype)
        forms = self.forms(weights[0].dtype, rows)
        seconds = dict.fromkeys(forms, float("inf"))
        for _ in range(_ROUNDS):
            for form in forms:
                begin = self._clock()
                for weight in weights:
                    self.run(form, inputs, weight, out)
                seconds[form] = min(seconds[form], self._clock() - begin)
        return min(forms, key=seconds.__getitem__)

    @staticmethod
    def forms(dtype: torch.dtype, rows: int) -> list[Form]:
        """The forms that are worth measuring for `rows` rows of `dtype`, the plain one first."""
        known = _FLOAT32_FORMS if dtype == torch.float32 else _HALF_FORMS
        return [form for form in known if form.least_rows == 1 or form.least_rows > rows]

    def run(self, form: Form, inputs: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """The product in the given form; a transposed one takes at most `TUNED_ROWS[-1]` rows."""
        if form.onednn:
            return self._product(form, inputs, weight, out)
        # The context manager `flags` also resets TF32 and costs as much as a small product.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            return self._product(form, inputs, weight, out)
        finally:
            torch.backends.mkldnn.enabled = True  # type: ignore[assignment]

    def _product(self, form: Form, inputs: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        if not form.transposed:
            return torch.mm(inputs, weight.t(), out=out)
        rows = inputs.shape[0]
        padded = max(rows, form.least_rows)
        if padded > rows:
            inputs = self._pad(inputs, padded)
        product = self._product_scratch[: padded * weight.shape[0]].view(weight.shape[0], padded)
        torch.mm(weight, inputs.t(), out=product)
        return out.copy_(product.t()[:rows])

    def _pad(self, inputs: Tensor, rows: int) -> Tensor:
        padded = self._padded_scratch[: rows * inputs.shape[1]].view(rows, inputs.shape[1])
        padded[: inputs.shape[0]] = inputs
        padded[inputs.shape[0] :] = 0
        return padded


def _sweep(weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights of one shape up to `_SWEEP_BYTES`; a single larger one is cut to its first rows."""
    count = max(1, _SWEEP_BYTES // weights[0].nbytes)
    rows = max(1, _SWEEP_BYTES // (weights[0].shape[1] * weights[0].dtype.itemsize))
    return [weight[:rows] for weight in weights[:count]]
