"""Plans a lane without building it: what it takes, how many tokens its KV cache holds, whether it starts, what helps.

Reads the model's config.json alone. What settings determine is computed by what allocates it; what only a run on a GPU
tells comes from `engine.cuda.measured`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from engine.config import CoreConfig
from engine.memory import host_memory
from engine.models.config import ModelConfig, load_model_config
from engine.models.resolve import Say, resolve_model
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


class TargetError(ValueError):
    """Nothing says what to plan for; one line with the flags that do."""


Change = Mapping[str, Any]
"""Settings by name, and the values to give them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A lane's parts, and its pool or the reason why it has none."""

    parts: dict[str, int]
    allowed: int
    context_limit: int
    capacity: KvCapacity | None
    reason: str | None
    changes: Sequence[Change]
    """Of which each makes it start."""
    otherwise: Sequence[str] = ()
    """What to do where no setting helps."""


class Planner(Protocol):
    """Plans lanes of one model in one place."""

    def outcome(self, config: CoreConfig) -> Outcome:
        """Raises `ValueError` for settings that no memory helps."""
        ...

    def growth(self, config: CoreConfig, tokens: int) -> Change | None:
        """The nearest setting with which the KV cache holds `tokens` tokens; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """What a lane is planned for, as far as the command line says."""

    card: str | None = None
    """Name of a known card; None is the one that is here."""
    memory: int | None = None
    """Bytes of the card, or of a CPU lane's host; None is what it has."""


def plan_lane(config: CoreConfig, model: ModelConfig, target: Target, table: Path | None = None) -> LanePlan:
    """What is to be expected of the lane that `config` asks for. Raises `TargetError`.

    `table` is a file of measured lanes to use for the project's own.
    """
    if on_cuda(config, target):
        return _plan_cuda(config, model, target, table)
    from engine.cpu.planning import CpuPlanner

    memory = target.memory or host_memory()
    if memory is None:
        raise TargetError("how much memory this host has cannot be read here: give --device-memory SIZE")
    return described(config, CpuPlanner(model, memory), Seen(device="cpu", memory=memory))


def on_cuda(config: CoreConfig, target: Target) -> bool:
    """Whether the lane runs on a GPU: `auto` does if a card or its memory is named or there is one.

    Raises `TargetError`.
    """
    if config.device == "cpu":
        if target.card is not None:
            raise TargetError("--card is given, but device is cpu: leave one of them out")
        return False
    if config.device == "cuda" or target.card is not None or target.memory is not None:
        return True
    import torch

    return torch.cuda.is_available()


def _plan_cuda(config: CoreConfig, model: ModelConfig, target: Target, path: Path | None) -> LanePlan:
    from engine.cuda.measured import TABLE, MeasuredTable
    from engine.cuda.planning import CudaPlanner, place_of

    place = place_of(target.card, target.memory, MeasuredTable.read(path or TABLE))
    planner = CudaPlanner(model, place)
    seen = Seen(device="cuda", card=place.card.name, memory=place.card.memory, measured=place.measured)
    with suppress(ValueError):  # which the outcome will name
        estimate, key = planner.estimate(config), msgspec.to_builtins(planner.key(config))
        seen = replace(seen, upper_bound=not estimate.known, source=estimate.source, key=key)
    return described(config, planner, seen)


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


def described(config: CoreConfig, planner: Planner, seen: Seen) -> LanePlan:
    """The outcome with all that follows from it."""
    try:
        outcome = planner.outcome(config)
    except ValueError as error:
        outcome = Outcome({}, 0, config.context_limit or 0, None, str(error), [])
    capacity = outcome.capacity or KvCapacity(0, config.kv_page_size)
    limit = outcome.context_limit
    lengths = sorted({min(length, limit) for length in (*STREAM_LENGTHS, limit)} - {0})
    if outcome.capacity is not None:
        advice = list(_remarks(config, planner, limit, capacity))
    else:
        advice = [f"set {_in_words(change)}" for change in outcome.changes]
        advice = advice or list(outcome.otherwise) or [str(outcome.reason)]
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
        context_limit=limit,
        servable_length=servable_length(limit, capacity),
        max_bucket=config.max_bucket,
        streams=[Streams(length, min(config.max_bucket, _fitting(capacity, length))) for length in lengths],
        parts=outcome.parts,
        upper_bound=seen.upper_bound,
        source=seen.source,
        key=seen.key,
        advice=advice,
        changes=[dict(change) for change in outcome.changes],
    )


def _fitting(capacity: KvCapacity, length: int) -> int:
    """Requests of `length` tokens that the pool holds at once."""
    return capacity.usable_pages // -(-length // capacity.page_size)


def _in_words(change: Change) -> str:
    return ", ".join(f"{name} to {value}" for name, value in change.items())


def _remarks(config: CoreConfig, planner: Planner, limit: int, capacity: KvCapacity) -> Iterator[str]:
    """What to know of a lane that starts with little room."""
    if capacity.tokens < limit:
        raised = planner.growth(config, limit)
        yield (
            f"the KV cache holds {capacity.tokens} tokens, less than one request of context_limit {limit}: requests "
            f"are limited to {capacity.tokens} tokens; set context_limit to that"
            + (f", or {_in_words(raised)} for the whole length" if raised else "")
        )
    length = min(SHORT_STREAM, limit)
    if (fitting := _fitting(capacity, length)) < config.max_bucket:
        raised = planner.growth(config, config.max_bucket * -(-length // capacity.page_size) * capacity.page_size)
        yield (
            f"the KV cache holds {fitting} requests of {length} tokens at once, but max_bucket is {config.max_bucket}: "
            f"set max_bucket to {max(1, fitting)}" + (f", or {_in_words(raised)} for all of them" if raised else "")
        )


def model_config_of(config: CoreConfig, say: Say = lambda line: None) -> ModelConfig:
    """The shape of the model that the settings name. Of a folder, config.json is enough. Raises `ModelError`."""
    if (folder := _folder(config.model)) is not None:
        return load_model_config(folder)
    return load_model_config(resolve_model(config.model, "dummy", revision=config.revision, say=say))


def _folder(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # `resolve_model` says what is wrong with the name
        return None
