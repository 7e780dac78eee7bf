"""From the logits of a step's sampled rows to their tokens and log probabilities, all of it on the device."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

from torch import Tensor

from engine.cuda.adjust import LogitsAdjuster
from engine.cuda.arena import DeviceArena
from engine.cuda.inputs import StepInputs
from engine.cuda.logprobs import MOST, DeviceLogprobs, Sizes, packed
from engine.cuda.sampling import DeviceSampler
from engine.messages import Logprobs
from engine.plan import PlanCapacity
from engine.step import RowStart, StepPlan


class Asked(NamedTuple):
    """What a step's sampled rows ask for beside a token."""

    adjusts: bool
    """Penalties, or tokens to suppress."""
    wishes: Mapping[int, int]
    """By place of a row in the step's sampled rows: of how many of the likeliest tokens it wants log probabilities."""

    @classmethod
    def anything(cls, rows: int) -> Self:
        """Whatever a step of so many rows may ask for: all is launched, and each row's columns say what it gets."""
        return cls(True, dict.fromkeys(range(rows), MOST))


NOTHING = Asked(False, {})


class TokenChooser:
    """Adjusts, draws and reads. What no row of a step asks for is not launched."""

    @staticmethod
    def reserve(arena: DeviceArena, capacity: PlanCapacity, rows: int, vocab: int) -> None:
        """Plan the device memory for slices of `rows` rows. Behind the row slots lies the padding rows' slot."""
        slots = capacity.max_bucket + 1
        LogitsAdjuster.reserve(arena, slots, vocab)
        DeviceLogprobs.reserve(arena, Sizes(slots, capacity.max_rows, rows, vocab))
        DeviceSampler.reserve(arena.during("choose"), rows, vocab)

    def __init__(self, arena: DeviceArena, inputs: StepInputs, vocab: int) -> None:
        self._inputs = inputs
        self._sampler = DeviceSampler(arena)
        self._adjuster = LogitsAdjuster(arena)
        self.logprobs = DeviceLogprobs(arena, self._sampler, vocab)

    def start(self, starts: Sequence[RowStart]) -> None:
        """Bring to the device what new rows ask for."""
        self._adjuster.start(starts)
        self.logprobs.start(starts)

    def asked(self, plan: StepPlan) -> Asked:
        """What the sampled rows of a started plan ask for."""
        return Asked(self._adjuster.adjusts(plan), self.logprobs.wishes(plan.sampled_rows))

    def choose(
        self, logits: Tensor, rows: slice, tokens: Tensor, asked: Asked, *, turn: int | None, again: Callable[[], None]
    ) -> None:
        """Write the tokens of the sampled rows `rows` to `tokens` (int32 `[rows]`), and remember them on the device.

        `logits`, float32 `[rows, vocab]`, may be changed; `again` computes them anew for log probabilities, which are
        the model's own and go to the results of `turn`, or if that is None to where `DeviceLogprobs.place` takes them
        from. Only `asked` decides what is launched, so that a step may be captured.
        """
        if asked.adjusts:
            self._adjuster.adjust(logits, self._inputs, rows)
        self._sampler.choose(logits, self._inputs, rows, tokens)
        self._inputs.keep(rows.start, rows.stop, tokens)
        if asked.adjusts:
            self._adjuster.keep(self._inputs, rows, tokens)
        if any(rows.start <= place < rows.stop for place in asked.wishes):
            if asked.adjusts:
                again()
            self.logprobs.read(logits, self._inputs, rows, tokens, turn)


def collected(results: Tensor, wishes: Mapping[int, int]) -> dict[int, Logprobs]:
    """Log probabilities by place, of a step's `results` on the host."""
    return {place: packed(results[place : place + 1], top) for place, top in wishes.items()}
