"""Penalties and suppressed tokens: what a row's logits undergo before a token is chosen, as `engine.penalties` has it.

A row slot's marks say of each token of the vocabulary whether it stands in the prompt, whether it is suppressed, and
how often it stands in the output; one more of a token that stands there 16,383 times changes nothing.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

PROMPT, SUPPRESSED, MOST = -(1 << 15), 1 << 14, (1 << 14) - 1
"""Bits of a mark (int16), and the largest count in the others."""
_SUPPRESSED, _MOST = tl.constexpr(SUPPRESSED), tl.constexpr(MOST)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_TILE = 4096
_MARKS = 1024


class PenaltyColumns(NamedTuple):
    """By row slot, on the device; see `engine.messages.Sampling` and `engine.step.RowContext`."""

    repetition: Tensor
    """float32; 1 is off."""
    presence: Tensor
    """float32; 0 is off."""
    frequency: Tensor
    """float32; 0 is off."""
    suppressed_until: Tensor
    """int32: a position."""


@triton.jit
def _penalize(
    logits,
    marks,
    repetitions,
    presences,
    frequencies,
    suppressed_until,
    slots,
    positions,
    vocab,
    row_stride,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    repetition, presence = tl.load(repetitions + slot), tl.load(presences + slot)
    frequency = tl.load(frequencies + slot)
    suppresses = tl.load(positions + row) < tl.load(suppressed_until + slot)
    if suppresses | (repetition != 1) | (presence != 0) | (frequency != 0):
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = token < vocab
        mark = tl.load(marks + slot * vocab + token, mask=inside, other=0).to(tl.int32)
        value = tl.load(logits + row * row_stride + token, mask=inside, other=0.0)
        count = mark & _MOST
        repeated = tl.where(value > 0, value / repetition, value * repetition)
        repeated = tl.minimum(tl.maximum(repeated, -_LARGEST), _LARGEST)
        changed = tl.where((mark < 0) | (count > 0), repeated, value)
        changed = tl.where(count > 0, changed - frequency * count.to(tl.float32) - presence, changed)
        changed = tl.where((mark & tl.where(suppresses, _SUPPRESSED, 0)) != 0, float("-inf"), changed)
        tl.store(logits + row * row_stride + token, changed, mask=inside & (mark != 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "tokens"])
def _count(marks, repetitions, presences, frequencies, slots, tokens, vocab):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    repetition, presence = tl.load(repetitions + slot), tl.load(presences + slot)
    if (repetition != 1) | (presence != 0) | (tl.load(frequencies + slot) != 0):
        place = marks + slot * vocab + tl.load(tokens + row)
        mark = tl.load(place).to(tl.int32)
        if (mark & _MOST) < _MOST:
            tl.store(place, (mark + 1).to(tl.int16))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["marks"])
def _mark(marks, ids, bits, count, MARKS: tl.constexpr):
    place = tl.program_id(0) * MARKS + tl.arange(0, MARKS)
    inside = place < count
    token = tl.load(ids + place, mask=inside, other=0)
    mark = tl.load(marks + token, mask=inside, other=0).to(tl.int32) | tl.load(bits + place, mask=inside, other=0)
    tl.store(marks + token, mark.to(tl.int16), mask=inside)


def penalize(logits: Tensor, marks: Tensor, columns: PenaltyColumns, slots: Tensor, positions: Tensor) -> None:
    """Change `logits` (float32 `[rows, vocab]`, rows contiguous) in place, where their rows ask for it.

    `marks` is int16 `[slots, vocab]`; `slots` and `positions`, int64 `[rows]`, name each row's place in `columns` and
    `marks` and the position that its token will have.
    """
    rows, vocab = logits.shape
    grid = (rows, triton.cdiv(vocab, _TILE))
    _penalize[grid](logits, marks, *columns, slots, positions, vocab, logits.stride(0), TILE=_TILE, num_warps=8)


def count(marks: Tensor, columns: PenaltyColumns, slots: Tensor, tokens: Tensor) -> None:
    """Count `tokens` (int32 `[rows]`) as output of the rows in `slots` (int64 `[rows]`, each once) with penalties."""
    own = (columns.repetition, columns.presence, columns.frequency)
    _count[(len(slots),)](marks, *own, slots, tokens, marks.shape[1], num_warps=1)


def mark(marks: Tensor, ids: Tensor, bits: Tensor, count: int) -> None:
    """Set `bits` (int32 `[>= count]`) in the `marks` (int16 `[vocab]`) of the first `count` of `ids` (int32).

    The same token may stand there twice, with the same bits.
    """
    if count:
        _mark[(triton.cdiv(count, _MARKS),)](marks, ids, bits, count, MARKS=_MARKS)
