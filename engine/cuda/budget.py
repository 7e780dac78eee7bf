"""How much of a card the KV pool of a lane gets, and what to change where that is too little."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from engine.config import CoreConfig
from engine.cuda.sizing import Card, LaneDesign, lane_sizes
from engine.memory import MIB
from engine.plan import INT32_MAX
from engine.search import largest_fitting
from kv.budget import KvBudget, KvBudgetError, parse_size
from kv.geometry import PAGE_SIZES, KvGeometry

_HIGHEST_UTILIZATION = 0.97
"""Most that advice asks for: what a driver keeps for itself varies."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a lane may take of a card, in bytes."""

    total: int
    """Of the card, or of the smaller one that the lane takes it for."""
    utilization: float
    others: int
    """What other processes have of `total`; 0 with a `gpu_memory_limit`, which is the lane's own."""
    limited: bool
    """`total` is a `gpu_memory_limit`."""

    @classmethod
    def of(cls, config: CoreConfig, total: int, others: int) -> "Allowance":
        """Of a card of `total` bytes of which other processes have `others`. Raises `KvBudgetError`."""
        if config.gpu_memory_limit is None:
            return cls(total, config.gpu_memory_utilization, others, limited=False)
        limit = parse_size(config.gpu_memory_limit)
        if limit > total - others:
            raise KvBudgetError(
                f"gpu_memory_limit is {config.gpu_memory_limit} ({limit / MIB:.0f} MiB), but the card has "
                f"{total / MIB:.0f} MiB, {others / MIB:.0f} of them in other processes: lower it, or leave it out"
            )
        return cls(limit, config.gpu_memory_utilization, 0, limited=True)

    @property
    def own(self) -> int:
        """Bytes that the lane may take."""
        return max(0, int(self.utilization * self.total) - self.others)

    def utilization_for(self, own: int) -> float | None:
        """The lowest utilization in hundredths that allows `own` bytes; None if that is too near the whole card."""
        needed = -(-100 * (own + self.others) // self.total) / 100
        return needed if needed <= _HIGHEST_UTILIZATION else None

    def __str__(self) -> str:
        others = f" less {self.others / MIB:.0f} of other processes" if self.others else ""
        name = "gpu_memory_limit" if self.limited else "the card"
        return (
            f"{self.own / MIB:.0f} MiB (gpu_memory_utilization {self.utilization:g} of {name}'s "
            f"{self.total / MIB:.0f} MiB{others})"
        )


def floor_tokens(config: CoreConfig) -> int:
    """Tokens that a pool must hold: those of a full step, and one more of every row."""
    return config.max_step_tokens + config.max_bucket


def floor_bytes(config: CoreConfig, geometry: KvGeometry) -> int:
    """Bytes of the smallest pool that is taken: the floor in whole pages and a padding page, both of the largest size
    that there is, so that a card which suffices for one page size suffices for every other.
    """
    largest = max(PAGE_SIZES)
    return (-(-floor_tokens(config) // largest) + 1) * largest * geometry.token_bytes


@dataclass(frozen=True)
class PoolSizer:
    """Sizes the KV pool of one lane on one card."""

    config: CoreConfig
    design: LaneDesign
    card: Card
    others: int
    """What other processes have of the card, in bytes."""

    @cached_property
    def allowance(self) -> Allowance:
        """What the lane may take. Raises `KvBudgetError`."""
        return Allowance.of(self.config, self.card.memory, self.others)

    def budget(self, taken: int, free: int, granule: int = 1, *, coming: int = 0) -> KvBudget:
        """The pool beside `taken` bytes of this process, of `free` bytes of the card, in multiples of `granule`.

        The pool's own memory counts as free. Raises `KvBudgetError` if that is below the floor; `coming` bytes that are
        expected to be taken besides are no reason for that, but count in the advice.
        """
        geometry, needed = self.design.geometry, floor_bytes(self.config, self.design.geometry)
        room = max(0, min(self.allowance.own - taken, free) // granule * granule)
        if room < needed:
            raise KvBudgetError(
                f"the KV pool would get {room / MIB:.0f} MiB, but needs {needed / MIB:.0f} for max_step_tokens + "
                f"max_bucket, {floor_tokens(self.config)} tokens: the lane may take {self.allowance}, and weights, "
                f"buffers, graphs and the driver have {taken / MIB:.0f} MiB; "
                + self._way_out(taken, free, needed + coming + granule - 1)
            )
        return KvBudget(geometry, min(room, most_pages(geometry, room) * geometry.page_bytes))

    def _way_out(self, taken: int, free: int, needed: int) -> str:
        if taken + free < self.allowance.own:
            return f"only {free / MIB:.0f} MiB of the card are free: wait for the other processes, or use another card"
        return self.advice(taken + needed)

    def advice(self, needed: int) -> str:
        """What to change if the lane needs `needed` bytes in all, its smallest pool included.

        What settings do not determine, graphs above all, is taken to stay as it is.
        """

        def taken_by(changed: CoreConfig) -> int:
            sizes = lane_sizes(changed, self.design.model, self.design.dtype, self.card)
            return sizes.total + floor_bytes(changed, self.design.geometry)

        missing = needed - self.allowance.own
        return nearest_settings(self.config, self.design.capacity.context_limit, missing, taken_by, self.allowance)


def most_pages(geometry: KvGeometry, nbytes: int) -> int:
    """Pages that `nbytes` hold, as far as the slots of all of them can be counted in 32 bits."""
    return min(nbytes // geometry.page_bytes, INT32_MAX // geometry.page_size)


_GRID = {"max_step_tokens": 64, "max_bucket": 8, "context_limit": 256}
"""Settings that may be lowered, the one first that costs least, and what advice rounds their values down to."""


def larger(allowance: Allowance, missing: int) -> str:
    """What to take where no setting helps and `missing` bytes are missing."""
    where = "a gpu_memory_limit" if allowance.limited else "a card"
    return f"take a smaller model, or {where} that is {missing / allowance.utilization / MIB:.0f} MiB larger"


Change = dict[str, int | float | str]
"""Settings by name, and the values to give them."""


def nearest_settings(
    config: CoreConfig, context_limit: int, missing: int, taken_by: Callable[[CoreConfig], int], allowance: Allowance
) -> str:
    """What to change so that `missing` bytes fewer are needed, in words: see `nearest_changes`."""
    ways = nearest_changes(config, context_limit, missing, taken_by, allowance)
    if not ways:
        return f"no setting makes it fit: {larger(allowance, missing)}"
    return f"what works: {', or '.join(in_words(way) for way in ways)}"


def nearest_changes(
    config: CoreConfig, context_limit: int, missing: int, taken_by: Callable[[CoreConfig], int], allowance: Allowance
) -> list[Change]:
    """What to change so that `missing` bytes fewer are needed: each setting that is enough by itself, as near to what
    it is as that may be; or all of them halved until it is enough, at last with most of the card. Empty if nothing is.

    `taken_by` says how many bytes a lane of other settings takes, its smallest pool included and what settings do not
    determine left out; `context_limit` is the lane's, in tokens.
    """
    given = msgspec.structs.replace(config, context_limit=context_limit)
    target = taken_by(given) - missing
    ways: list[Change] = []
    raised = allowance.utilization_for(allowance.own + missing)
    if raised is not None:
        ways.append({"gpu_memory_utilization": raised})
    alone = (_lowered(given, name, lambda changed: taken_by(changed) <= target) for name in _GRID)
    ways += [way for way in alone if way is not None]
    for share in () if ways else (allowance.utilization, _HIGHEST_UTILIZATION):
        extra = max(0, int(share * allowance.total) - allowance.others - allowance.own)
        smaller = next((halved for halved in _halved(given) if taken_by(halved) <= target + extra), None)
        if smaller is not None:
            return [_all_of(config, smaller) | ({"gpu_memory_utilization": share} if extra else {})]
    return ways


def _all_of(config: CoreConfig, smaller: CoreConfig) -> Change:
    """What makes `config` as small as `smaller`."""
    change: Change = {name: getattr(smaller, name) for name in _GRID}
    if (config.max_chunk_tokens or 0) > smaller.max_step_tokens:
        change["max_chunk_tokens"] = smaller.max_step_tokens
    return change


def in_words(change: Change) -> str:
    """A change for a message."""
    return " with ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in change.items()
    )


def _lowered(config: CoreConfig, name: str, fits: Callable[[CoreConfig], bool]) -> Change | None:
    """The largest value below that of setting `name` with which it fits; None if there is none."""
    step = _GRID[name]

    def fits_at(count: int) -> bool:
        return fits(msgspec.structs.replace(config, **{name: count * step}))

    count = largest_fitting(-(-_lowest(config, name) // step), (getattr(config, name) - 1) // step, fits_at)
    return None if count is None else {name: count * step}


def _lowest(config: CoreConfig, name: str) -> int:
    return max(config.max_bucket, config.max_chunk_tokens or 0) if name == "max_step_tokens" else _GRID[name]


def _halved(config: CoreConfig) -> Iterator[CoreConfig]:
    """All settings halved together, again and again."""
    while min(getattr(config, name) for name in _GRID) > 1:
        lower = {name: getattr(config, name) // 2 for name in _GRID}
        config = msgspec.structs.replace(config, **lower, max_chunk_tokens=None)
        yield config
