"""What goes into a scheduler and what comes out of it: its limits, its counters, its effects."""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.config import CoreConfig
from engine.messages import Finished
from engine.request import Request
from engine.step import StepPlan


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one lane. Everything `*_tokens` counts tokens, everything `*_pages` counts pages."""

    page_size: int
    servable_length: int
    max_bucket: int
    max_step_tokens: int
    max_chunk_tokens: int
    max_in_flight: int = 1
    lifetime: bool = False
    """Reserve prompt + max_tokens at admission for every request, and so never preempt."""
    max_preemptions: int = 2
    low_water_pages: int = 0
    """Admission keeps so many pages available for the rows that already run."""
    max_queue: int = 1024
    max_queue_s: float | None = None

    @classmethod
    def of(cls, config: CoreConfig, servable_length: int, usable_pages: int) -> "SchedulerConfig":
        """The scheduler's part of the core's settings. The low-water mark is one page in a hundred."""
        return cls(
            page_size=config.kv_page_size,
            servable_length=servable_length,
            max_bucket=config.max_bucket,
            max_step_tokens=config.max_step_tokens,
            max_chunk_tokens=config.max_chunk_tokens or config.max_step_tokens,
            max_in_flight=config.pipeline_depth + 1,
            lifetime=config.reservation == "lifetime",
            max_preemptions=config.max_preemptions,
            low_water_pages=usable_pages // 100,
            max_queue=config.max_queue,
            max_queue_s=config.max_queue_s,
        )

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
    refused_queue_full: int = 0
    refused_queue_time: int = 0


@dataclass(slots=True)
class Effects:
    """What the owners must be told: `tokens[i]` is the next token of request `keys[i]`; then, who has ended."""

    keys: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class Launched(NamedTuple):
    """A step between its plan and its result, with the requests it serves, in the order of its rows and chunks."""

    plan: StepPlan
    decoding: list[Request]
    chunked: list[Request]
