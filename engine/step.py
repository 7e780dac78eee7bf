"""What the scheduler hands to the executor for one step, and what comes back. Plain data, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.messages import Sampling
from kv.table import TableUpdate


class RowStart(NamedTuple):
    """A row slot gets a new request in this step: its per-row parameters are to be set before anything else."""

    row: int
    sampling: Sampling


class Chunk(NamedTuple):
    """Prompt tokens of one row, computed at positions `start` to `start + len(tokens) - 1`."""

    row: int
    start: int
    tokens: Sequence[int]
    samples: bool
    """True if the chunk ends the prompt, so that the step samples the row's next token."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass.

    Decode rows come first, then chunks. A decode row computes the token that was last sampled for it, which the
    executor keeps per row slot (the host may not know it yet), at position `decode_lengths[i] - 1`. A row's page list
    in a step is exactly `ceil(length / page_size)` entries of its block table, even if the table holds more.
    """

    number: int
    starts: list[RowStart]
    table: list[TableUpdate]
    decode_rows: list[int]
    decode_lengths: list[int]
    """Tokens of each decode row in the KV cache once the step has run, its own token included."""
    chunks: list[Chunk]

    @property
    def tokens(self) -> int:
        """Tokens run through the model."""
        return len(self.decode_rows) + sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def sampled_rows(self) -> list[int]:
        """Rows that get a token, in the order of `StepResult.tokens`: decode rows, then the chunks that sample."""
        return self.decode_rows + [chunk.row for chunk in self.chunks if chunk.samples]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens, one for each of `StepPlan.sampled_rows`."""

    tokens: Sequence[int] = field(default_factory=tuple)
    padding_tokens: int = 0
    """Tokens that the executor computed beside the plan's, to fill a batch size that it has a program for."""
    failed_rows: frozenset[int] = frozenset()
    """Row slots of the step's plan, sampled or not, whose numbers were not finite: their tokens mean nothing, and what
    the step wrote to their pages must not be shared. The other rows are sound."""


class Executor(Protocol):
    """Computes steps on one device. Steps are launched and collected in the same order; up to two may be in flight.

    `launch` may return before the step has run; the sampled token of each row stays on the device, where the next step
    finds it.
    """

    def launch(self, plan: StepPlan) -> object:
        """Start `plan`; the returned handle is given to `collect`. Capacity errors are raised before anything is
        written.
        """
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for a launched step and return its tokens."""
        ...
