"""Plans a lane without building it: what it takes, how many tokens its KV cache holds, whether it starts, what helps.

Reads the model's config.json alone. What settings determine is computed by what allocates it; what only a run on a GPU
tells comes from `engine.cuda.measured`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.config import CoreConfig
from engine.memory import host_memory
from engine.models.config import ModelConfig, load_model_config
from engine.models.resolve import resolve_model
from kv.budget import KvCapacity, servable_length

STREAM_LENGTHS = (1024, 4096)
"""Tokens of the streams that a plan counts, beside the longest there may be."""
SHORT_STREAM = 1024
"""A pool that does not hold so many tokens for each row is worth a word."""


class Streams(msgspec.Struct, frozen=True):
    """How many requests of one length run at once."""

    tokens: int
    """Prompt and output together."""
    streams: int


class LanePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be expected of a lane. Sizes are bytes."""

    starts: bool
    reason: str | None
    """Why it does not start."""
    device: str
    """cuda or cpu."""
    card: str | None
    device_memory: int
    """Bytes of the card, or of the host's memory, that the lane is planned for."""
    device_memory_known: bool
    """It was asked for or reported, not taken from a list of cards."""
    allowed: int
    """Bytes that the lane may take."""
    kv_page_size: int
    kv_pages: int
    """Usable pages; 0 if it does not start."""
    kv_tokens: int
    context_limit: int
    servable_length: int
    """Longest request in tokens."""
    max_bucket: int
    streams: list[Streams]
    parts: dict[str, int]
    upper_bound: bool
    """graphs, workspaces and context are upper bounds: no lane of this kind was measured. The KV cache gets more."""
    source: str | None
    """Where they are from."""
    key: dict[str, Any] | None
    """What they depend on."""
    advice: list[str]
    changes: list[dict[str, Any]]
    """Settings by name; each of the changes makes a lane start that does not."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A lane's parts, and its pool or the reason why it has none."""

    parts: dict[str, int]
    allowed: int
    context_limit: int
    capacity: KvCapacity | None
    reason: str | None
    changes: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """What a lane is planned for, as far as the command line says."""

    card: str | None = None
    """Name of a known card; None is the one that is here."""
    memory: int | None = None
    """Bytes of the card, or of a CPU lane's host; None is what it has."""


def plan_lane(config: CoreConfig, model: ModelConfig, target: Target) -> LanePlan:
    """What is to be expected of the lane that `config` asks for.

    Raises `ValueError` for a target that says too little and for settings that no memory helps.
    """
    if on_cuda(config, target):
        return _plan_cuda(config, model, target)
    return _plan_cpu(config, model, target)


def on_cuda(config: CoreConfig, target: Target) -> bool:
    """Whether the lane runs on a GPU: `auto` does if a card is named or there is one. Raises `ValueError`."""
    if config.device == "cpu":
        if target.card is not None:
            raise ValueError("--card is given, but device is cpu: leave one of them out")
        return False
    if config.device == "cuda" or target.card is not None:
        return True
    import torch

    return torch.cuda.is_available() or target.memory is not None


def _plan_cuda(config: CoreConfig, model: ModelConfig, target: Target) -> LanePlan:
    from engine.cuda.measured import MeasuredTable
    from engine.cuda.planning import CudaPlanner, place_of

    place = place_of(target.card, target.memory, MeasuredTable.read())
    planner = CudaPlanner(model, place)
    outcome, estimate = planner.outcome(config), planner.estimate(config)
    seen = Seen(
        device="cuda",
        card=place.card.name,
        memory=place.card.memory,
        measured=place.measured,
        upper_bound=not estimate.known,
        source=estimate.source,
        key=msgspec.to_builtins(planner.key(config)),
    )
    return described(config, outcome, seen)


def _plan_cpu(config: CoreConfig, model: ModelConfig, target: Target) -> LanePlan:
    from engine.cpu.planning import plan_cpu

    memory = target.memory or host_memory()
    if memory is None:
        raise ValueError("how much memory this host has cannot be read here: give --device-memory SIZE")
    return described(config, plan_cpu(config, model, memory), Seen(device="cpu", memory=memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of the place of a lane; see `LanePlan`."""

    device: str
    memory: int
    card: str | None = None
    measured: bool = True
    upper_bound: bool = False
    source: str | None = None
    key: dict[str, Any] | None = None


def described(config: CoreConfig, outcome: Outcome, seen: Seen) -> LanePlan:
    """The plan with all that follows from the outcome."""
    capacity = outcome.capacity or KvCapacity(0, config.kv_page_size)
    lengths = sorted({*(length for length in STREAM_LENGTHS if length < outcome.context_limit), outcome.context_limit})
    advice = [*_advice(outcome.changes), *(_remarks(config, outcome, capacity) if outcome.capacity else ())]
    return LanePlan(
        starts=outcome.capacity is not None,
        reason=outcome.reason,
        device=seen.device,
        card=seen.card,
        device_memory=seen.memory,
        device_memory_known=seen.measured,
        allowed=outcome.allowed,
        kv_page_size=config.kv_page_size,
        kv_pages=capacity.usable_pages,
        kv_tokens=capacity.tokens,
        context_limit=outcome.context_limit,
        servable_length=servable_length(outcome.context_limit, capacity),
        max_bucket=config.max_bucket,
        streams=[Streams(length, _streams(config, capacity, length)) for length in lengths],
        parts=outcome.parts,
        upper_bound=seen.upper_bound,
        source=seen.source,
        key=seen.key,
        advice=advice,
        changes=[dict(change) for change in outcome.changes],
    )


def _streams(config: CoreConfig, capacity: KvCapacity, length: int) -> int:
    """Requests of `length` tokens that run at once."""
    return min(config.max_bucket, capacity.usable_pages // -(-length // capacity.page_size))


def _advice(changes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for change in changes:
        yield "set " + " and ".join(f"{name} to {value}" for name, value in change.items())


def _remarks(config: CoreConfig, outcome: Outcome, capacity: KvCapacity) -> Iterator[str]:
    """What to know of a lane that starts with little room."""
    if capacity.tokens < outcome.context_limit:
        yield (
            f"the KV cache holds {capacity.tokens} tokens, less than one request of context_limit, "
            f"{outcome.context_limit}: requests are limited to {capacity.tokens} tokens; lower context_limit to that, "
            "or give the lane more memory"
        )
    short = min(SHORT_STREAM, outcome.context_limit)
    fitting = capacity.usable_pages // -(-short // capacity.page_size)
    if fitting < config.max_bucket:
        yield (
            f"the KV cache holds {fitting} requests of {short} tokens at once, but max_bucket is {config.max_bucket}: "
            f"lower max_bucket to {max(1, fitting)}, or give the lane more memory"
        )


def model_config_of(config: CoreConfig) -> ModelConfig:
    """The shape of the model that the settings name. Of a folder, config.json is enough. Raises `ModelError`."""
    if (folder := _folder(config.model)) is not None:
        return load_model_config(folder)
    return load_model_config(resolve_model(config.model, "dummy", revision=config.revision))


def _folder(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # `resolve_model` says what is wrong with the name
        return None
