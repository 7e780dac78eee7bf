"""Plans a CPU lane by what builds one, and finds settings that the host's memory holds."""

from collections.abc import Iterator

import msgspec

from engine.config import CoreConfig
from engine.cpu.lane import LaneDesign, design_lane
from engine.memory import MIB, MemoryShortError
from engine.models.config import ModelConfig
from engine.planning import Change, Outcome
from engine.search import largest_fitting
from kv.budget import KvBudgetError, parse_size

_GRID = {"max_step_tokens": 16, "max_bucket": 1}
"""Settings that may be lowered, and what advice rounds them down to."""
_MOST_CACHE_MIB = 1 << 24
"""16 TiB."""


class CpuPlanner:
    """Plans lanes of one model on one host."""

    def __init__(self, model: ModelConfig, available: int) -> None:
        """`available`: bytes that the host offers."""
        self._model = model
        self._available = available

    def outcome(self, config: CoreConfig) -> Outcome:
        """The lane's parts, and its pool or why it has none. Raises `ValueError` for settings that no memory helps."""
        limit, parts = self._model.context_for(config.context_limit), {}
        try:
            design = self._design(config)
            parts = design.memory.parts
            design.memory.check_host(self._available)
        except KvBudgetError as error:
            changes = list(self._changes(config, self.growth(config, 1)))
            return Outcome(parts, self._available, limit, None, str(error), changes)
        except MemoryShortError as error:
            changes = list(self._changes(config, self._smaller(config)))
            return Outcome(parts, self._available, limit, None, str(error), changes)
        return Outcome(parts, self._available, limit, design.budget.capacity, None, [])

    def growth(self, config: CoreConfig, tokens: int) -> Change | None:
        """The smallest size of the KV cache, in whole MiB, that holds `tokens` tokens; None if the host lacks it."""
        short = largest_fitting(0, _MOST_CACHE_MIB, lambda mib: self._tokens(config, mib) < tokens)
        change = _cache(_MOST_CACHE_MIB if short is None else short + 1)
        return change if self._starts(config, change) else None

    def _design(self, config: CoreConfig, change: Change | None = None) -> LaneDesign:
        return design_lane(msgspec.structs.replace(config, **(change or {})), self._model)

    def _starts(self, config: CoreConfig, change: Change) -> bool:
        try:
            self._design(config, change).memory.check_host(self._available)
        except ValueError:
            return False
        return True

    def _tokens(self, config: CoreConfig, mib: int) -> int:
        """What a cache of so many MiB holds."""
        try:
            return self._design(config, _cache(max(1, mib))).budget.capacity.tokens
        except KvBudgetError:
            return 0

    def _changes(self, config: CoreConfig, cache: Change | None) -> Iterator[Change]:
        """Settings of which each makes the lane start, as near to what they are as may be; `cache` may be one."""
        wishes = [cache]
        wishes += [self._lowered(config, name) for name in _GRID]
        wishes += [{"dtype": "bfloat16"}] if config.dtype in ("auto", "float32") else []
        for change in wishes:
            if change is not None and self._starts(config, change):
                yield change

    def _smaller(self, config: CoreConfig) -> Change | None:
        """The largest KV cache in whole MiB, below the one asked for, that the host holds with all the rest."""
        least = self.growth(config, 1)
        if least is None:
            return None
        low, high = parse_size(least["kv_cache_memory"]) // MIB, (parse_size(config.kv_cache_memory) - 1) // MIB
        mib = largest_fitting(low, high, lambda mib: self._starts(config, _cache(mib)))
        return None if mib is None else _cache(mib)

    def _lowered(self, config: CoreConfig, name: str) -> Change | None:
        """The largest value below that of setting `name` with which the lane starts."""
        step = _GRID[name]
        lowest = max(config.max_bucket, config.max_chunk_tokens or 1) if name == "max_step_tokens" else 1
        high = (getattr(config, name) - 1) // step
        count = largest_fitting(-(-lowest // step), high, lambda count: self._starts(config, {name: count * step}))
        return None if count is None else {name: count * step}


def _cache(mib: int) -> Change:
    return {"kv_cache_memory": f"{mib}MiB"}
