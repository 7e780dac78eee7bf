"""Plans a CPU lane by what builds one, and finds settings that the host's memory holds."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from engine.config import CoreConfig
from engine.cpu.lane import context_limit, design_lane
from engine.memory import MIB, MemoryShortError
from engine.models.config import ModelConfig
from engine.planning import Outcome
from kv.budget import KvBudgetError, parse_size

Change = dict[str, Any]

_GRID = {"max_step_tokens": 16, "max_bucket": 1}
"""Settings that may be lowered, and what advice rounds them down to."""
_MOST_CACHE_MIB = 1 << 24
"""16 TiB."""


def plan_cpu(config: CoreConfig, model: ModelConfig, available: int) -> Outcome:
    """The lane's parts on a host that offers `available` bytes, and its pool or why it has none.

    Raises `ValueError` for settings that no memory helps.
    """
    limit = context_limit(config, model)
    try:
        design = design_lane(config, model)
    except KvBudgetError as error:
        return Outcome({}, available, limit, None, str(error), list(_changes(config, model, available)))
    try:
        design.memory.check_host(available)
    except MemoryShortError as error:
        changes = list(_changes(config, model, available))
        return Outcome(design.memory.parts, available, limit, None, str(error), changes)
    return Outcome(design.memory.parts, available, limit, design.budget.capacity, None, [])


def _changes(config: CoreConfig, model: ModelConfig, available: int) -> Iterator[Change]:
    """Settings of which each makes the lane start, as near to what they are as may be."""

    def starts(change: Change) -> bool:
        try:
            design_lane(msgspec.structs.replace(config, **change), model).memory.check_host(available)
        except ValueError:
            return False
        return True

    cache = _cache(config, model, available)
    if cache is not None and starts(cache):
        yield cache
    for name, step in _GRID.items():
        lowest = config.max_bucket if name == "max_step_tokens" else 1
        count = _largest(-(-lowest // step), (getattr(config, name) - 1) // step, lambda n: starts({name: n * step}))  # noqa: B023
        if count is not None:
            yield {name: count * step}
    if config.dtype in ("auto", "float32") and starts({"dtype": "bfloat16"}):
        yield {"dtype": "bfloat16"}


def _cache(config: CoreConfig, model: ModelConfig, available: int) -> Change | None:
    """The nearest size of the KV cache in whole MiB that holds a page and is there; None if there is none."""

    def holds(mib: int) -> bool:
        try:
            design_lane(msgspec.structs.replace(config, kv_cache_memory=f"{mib}MiB"), model)
        except KvBudgetError:
            return False
        return True

    def fits(mib: int) -> bool:
        try:
            changed = msgspec.structs.replace(config, kv_cache_memory=f"{mib}MiB")
            design_lane(changed, model).memory.check_host(available)
        except KvBudgetError:
            return True  # too small, so not too large
        except MemoryShortError:
            return False
        return True

    now = parse_size(config.kv_cache_memory) // MIB
    if not holds(now):
        short = _largest(0, _MOST_CACHE_MIB, lambda mib: not holds(max(1, mib)))
        return None if short is None else {"kv_cache_memory": f"{short + 1}MiB"}
    lower = _largest(1, now - 1, fits)
    return None if lower is None else {"kv_cache_memory": f"{lower}MiB"}


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that fits, if whatever is below one that fits does too; None for none."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
