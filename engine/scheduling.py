"""What goes into a scheduler and what comes out of it: its limits, its counters, its effects."""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.chunking import ChunkLimits, StepCosts, chunk_budgets
from engine.config import CoreConfig
from engine.messages import Finished, Logprobs
from engine.request import Request
from engine.step import StepPlan


class DuplicateKey(ValueError):
    """A request came under the key of one that is still live."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one lane. Everything `*_tokens` counts tokens, everything `*_pages` counts pages."""

    page_size: int
    servable_length: int
    max_bucket: int
    max_step_tokens: int
    max_chunk_tokens: int
    vocab_size: int | None = None
    """Token ids are below this; None lets any pass."""
    max_in_flight: int = 1
    lifetime: bool = False
    """Reserve prompt + max_tokens at admission for every request, and so never preempt."""
    max_preemptions: int = 2
    low_water_pages: int = 0
    """Admission keeps so many pages available for the rows that already run."""
    max_queue: int = 1024
    max_queue_s: float | None = None
    priority_aging_s: float | None = None
    """Seconds in which a waiting request rises by one priority class; None for never."""
    max_bypass: int = 0
    """Times that a request which does not fit may be passed by later ones before it blocks the queue."""
    lookahead: int = 16
    """Waiting requests looked at together; a plan looks no further once one of them does not fit."""
    chunk_budgets: tuple[int, ...] = ()
    """Prompt tokens of a step by its number of active rows (see engine/chunking.py); empty for all that the step holds.
    """

    @classmethod
    def of(
        cls,
        config: CoreConfig,
        servable_length: int,
        usable_pages: int,
        costs: StepCosts | None = None,
        vocab_size: int | None = None,
    ) -> "SchedulerConfig":
        """The scheduler's part of the core's settings. The low-water mark is one page in a hundred.

        `costs` is needed only where `itl_target_ms` is set.
        """
        budgets: tuple[int, ...] = ()
        if config.itl_target_ms is not None and costs is not None:
            limits = ChunkLimits(
                max_step_tokens=config.max_step_tokens,
                page_size=config.kv_page_size,
                min_chunk_tokens=config.min_chunk_tokens,
                itl_target_s=config.itl_target_ms / 1000,
            )
            budgets = chunk_budgets(costs, limits, config.max_bucket)
        return cls(
            page_size=config.kv_page_size,
            servable_length=servable_length,
            max_bucket=config.max_bucket,
            max_step_tokens=config.max_step_tokens,
            max_chunk_tokens=config.max_chunk_tokens or config.max_step_tokens,
            vocab_size=vocab_size,
            max_in_flight=config.pipeline_depth + 1,
            lifetime=config.reservation == "lifetime",
            max_preemptions=config.max_preemptions,
            low_water_pages=usable_pages // 100,
            max_queue=config.max_queue,
            max_queue_s=config.max_queue_s,
            priority_aging_s=config.priority_aging_s,
            max_bypass=config.max_bypass,
            chunk_budgets=budgets,
        )

    def chunk_tokens(self, active_rows: int) -> int:
        """Prompt tokens that a step with so many active rows may compute."""
        if self.chunk_budgets:
            return self.chunk_budgets[active_rows]
        return self.max_step_tokens - active_rows

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_bucket:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}, but a step of {self.max_bucket} active rows (max_bucket) "
                f"needs as many; raise max_step_tokens or lower max_bucket"
            )


@dataclass(slots=True)
class Counters:
    """What the lane has done since its start. Only rises."""

    decode_steps: int = 0
    unified_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    bypasses: int = 0
    padding_tokens: int = 0
    refused_queue_full: int = 0
    refused_queue_time: int = 0


@dataclass(slots=True)
class Effects:
    """What the owners must be told: `tokens[i]` is the next token of request `keys[i]`; then, who has ended."""

    keys: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)
    """By key of a request that has just been admitted: prompt tokens that the prefix cache had, if any."""
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """By key: of its `tokens`, if it asks for them."""
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """By key: of further tokens of its prompt, in order from the second on, if it asks for them."""


class Launched(NamedTuple):
    """A step between its plan and its result, with the requests it serves, in the order of its rows and chunks."""

    plan: StepPlan
    decoding: list[Request]
    chunked: list[Request]
