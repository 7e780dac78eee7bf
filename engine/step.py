"""What the scheduler hands to the executor for one step, and what comes back. Plain data, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.messages import Logprobs, Sampling
from kv.table import TableUpdate

OPTIONAL_PARAMETERS = frozenset(
    {"repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logprobs", "prompt_logprobs"}
)
"""Fields of `Sampling` that an executor may leave to others: see `Executor.parameters`."""


class RowContext(NamedTuple):
    """What penalties and `min_tokens` need to know of a request beside its `Sampling`."""

    prompt: Sequence[int] = ()
    """The whole prompt, if penalties need it."""
    outputs: Sequence[int] = ()
    """Output tokens that the request had before it was preempted, if penalties need them. They are computed again with
    the prompt's chunks, and yet count as output. Tokens sampled from now on are the executor's to add.
    """
    suppressed: Sequence[int] = ()
    """Tokens of the vocabulary that are not sampled at positions below `suppressed_until`; never the whole of it."""
    suppressed_until: int = 0
    """A position: prompt tokens + min_tokens."""


class RowStart(NamedTuple):
    """A row slot gets a new request in this step: its per-row parameters are to be set before anything else."""

    row: int
    sampling: Sampling
    context: RowContext | None = None
    """None for rows without penalties and without `min_tokens`."""


class Chunk(NamedTuple):
    """Prompt tokens of one row, computed at positions `start` to `start + len(tokens) - 1`."""

    row: int
    start: int
    tokens: Sequence[int]
    samples: bool
    """True if the chunk ends the prompt, so that the step samples the row's next token."""
    targets: Sequence[int] = ()
    """Prompt tokens whose log probabilities are asked for: those at positions `start + 1` and on, each predicted by the
    token of the chunk before it. As many as `tokens`, fewer where the prompt ends, none for most requests.
    """
    top_logprobs: int = 0
    """How many of the likeliest tokens are wanted beside each of `targets`."""


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
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    """By place in `tokens`: one token's, for rows whose `Sampling.logprobs` is not None."""
    prompt_logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    """By place in `StepPlan.chunks`: those of the chunk's `targets`, for chunks that have any."""


class DeviceCounters(NamedTuple):
    """What a lane's device has done since its warm-up. All stay 0 on a CPU."""

    graph_steps: int = 0
    """Decode steps that were one launch."""
    eager_steps: int = 0
    """Decode steps that were launched kernel by kernel."""
    allocations_after_warmup: int = 0
    compilations_after_warmup: int = 0


class Executor(Protocol):
    """Computes steps on one device. Steps are launched and collected in the same order; up to two may be in flight.

    `launch` may return before the step has run; the sampled token of each row stays on the device, where the next step
    finds it.
    """

    @property
    def parameters(self) -> frozenset[str]:
        """Those of `OPTIONAL_PARAMETERS` that this executor honours. Requests that ask for others never reach it: the
        worker answers 400 and names the parameter.
        """
        ...

    def launch(self, plan: StepPlan) -> object:
        """Start `plan`; the returned handle is given to `collect`. Capacity errors are raised before anything is
        written.
        """
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for a launched step and return its tokens."""
        ...
