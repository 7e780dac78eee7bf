"""Penalties, `min_tokens` and wishes for log probabilities, by row slot. Rows that ask for none cost a dict look-up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.cpu.arena import PlanArena
from engine.messages import Sampling
from engine.penalties import Array, penalize
from engine.step import RowStart


@dataclass(slots=True)
class _Adjusted:
    """A row slot whose logits are changed."""

    sampling: Sampling
    prompt_tokens: int
    tokens: int
    """How many of the slot's `history` are valid: the prompt's, then the output's."""
    suppressed: Array
    suppressed_until: int


class Undo(NamedTuple):
    """Logits as they were before they were changed."""

    row: int
    """Row of the slice."""
    tokens: Array
    """Those whose logits were changed."""
    values: Array
    """float32, one per token."""


class LogitsAdjuster:
    """Changes the logits of rows with penalties or `min_tokens`, and knows who wants log probabilities."""

    def __init__(self, arena: PlanArena) -> None:
        self._history: Array = arena.array("history")
        self._rows: dict[int, _Adjusted] = {}
        self._logprobs: dict[int, int] = {}

    def start(self, start: RowStart) -> None:
        """Forget what the slot's last request asked for, and remember what this one does."""
        self._rows.pop(start.row, None)
        self._logprobs.pop(start.row, None)
        sampling, context = start.sampling, start.context
        if sampling.logprobs is not None:
            self._logprobs[start.row] = sampling.logprobs
        if context is None:
            return
        prompt, known = len(context.prompt), len(context.prompt) + len(context.outputs)
        self._history[start.row, :prompt] = context.prompt
        self._history[start.row, prompt:known] = context.outputs
        suppressed = np.asarray(context.suppressed, dtype=np.int64)
        self._rows[start.row] = _Adjusted(sampling, prompt, known, suppressed, context.suppressed_until)

    def adjust(self, logits: Tensor, slots: Sequence[int], positions: Tensor) -> list[Undo]:
        """Change `logits` (float32 `[rows, vocab]`) of a slice of rows in place; the sampled token of row i will stand
        at `positions[i]` (int64) of the request in slot `slots[i]`.
        """
        undo: list[Undo] = []
        if not self._rows:
            return undo
        for row, (slot, position) in enumerate(zip(slots, positions.tolist(), strict=True)):
            asked = self._rows.get(slot)
            suppresses = asked is not None and position < asked.suppressed_until
            if asked is None or not (suppresses or asked.sampling.penalizes):
                continue
            values: Array = logits[row].numpy()
            history = self._history[slot, : asked.tokens]
            if slot in self._logprobs:
                touched = np.unique(np.concatenate((history, asked.suppressed)))
                undo.append(Undo(row, touched, values[touched]))
            if asked.sampling.penalizes:
                penalize(values, history[: asked.prompt_tokens], history[asked.prompt_tokens :], asked.sampling)
            if suppresses:
                values[asked.suppressed] = -np.inf
        return undo

    @staticmethod
    def restore(logits: Tensor, undo: Sequence[Undo]) -> None:
        """Put the logits of a slice back, as far as log probabilities will be read from them."""
        for row, tokens, values in undo:
            logits[row].numpy()[tokens] = values

    def keep(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Count sampled tokens as output. One that nothing can be sampled behind is left out."""
        if not self._rows:
            return
        for slot, token in zip(slots, tokens, strict=True):
            asked = self._rows.get(slot)
            if asked is not None and asked.sampling.penalizes and asked.tokens < self._history.shape[1]:
                self._history[slot, asked.tokens] = token
                asked.tokens += 1

    def wishes(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """(Row, number of likeliest tokens) of the rows of a slice whose log probabilities are asked for."""
        if not self._logprobs:
            return []
        return [(row, self._logprobs[slot]) for row, slot in enumerate(slots) if slot in self._logprobs]
