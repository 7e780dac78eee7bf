"""Plans a CUDA lane for a card that need not be here, by the steps in which `engine.cuda.lane` builds one."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import msgspec
import torch

from engine.config import CoreConfig
from engine.cuda.budget import Allowance, Change, PoolSizer, floor_bytes, larger, nearest_changes
from engine.cuda.cards import KNOWN_CARDS, known_card
from engine.cuda.lane import check_card, check_model
from engine.cuda.measured import Estimate, Key, MeasuredTable, Software
from engine.cuda.sizing import Card, LaneDesign, design_lane
from engine.memory import MIB, MemoryPlan
from engine.models.config import ModelConfig
from engine.planning import Outcome, TargetError
from kv.budget import KvBudget
from kv.geometry import PAGE_SIZES

GRANULE = 2 * MIB
"""What the driver maps at once (cuMemGetAllocationGranularity), on every card so far."""
_TOO_MUCH = 1 << 62
_HUNDREDTHS = range(1, 98)
"""Utilizations that advice may ask for: `nearest_changes` goes no higher either."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lane is planned to run."""

    card: Card
    measured: bool
    """The card's memory was asked for or reported, not taken from a list."""
    software: Software
    table: MeasuredTable
    granule: int = GRANULE
    """Bytes that a driver maps at once."""


def place_of(name: str | None, memory: int | None, table: MeasuredTable) -> Place:
    """The card called `name`, else the present one, with `memory` bytes if that is given.

    A size alone is a part of an H200, the card that the table's rows are from. Raises `TargetError` if nothing says
    which card is meant.
    """
    if name is not None:
        card, measured = known_card(name)
    elif torch.cuda.is_available():
        card, measured = Card.present(torch.device("cuda", torch.cuda.current_device())), True
    elif memory is not None:
        card, measured = KNOWN_CARDS["H200"]
    else:
        raise TargetError(
            f"there is no GPU here to plan for: give --card ({', '.join(KNOWN_CARDS)}), --device-memory SIZE for a "
            "part of an H200, or --device cpu"
        )
    if memory is not None:
        card, measured = replace(card, memory=memory), True
    return Place(card, measured, Software.installed() or table.software, table)


Adviser = Callable[[Allowance, int], str]
"""Says what to change for an allowance, if a lane needs so many bytes in all."""


@dataclass(frozen=True)
class _Sizer(PoolSizer):
    """A lane's own sizer, with advice from elsewhere."""

    adviser: Adviser

    def advice(self, needed: int) -> str:
        """See `PoolSizer`."""
        return self.adviser(self.allowance, needed)


class CudaPlanner:
    """Plans lanes of one model in one place."""

    def __init__(self, model: ModelConfig, place: Place) -> None:
        self._model = model
        self._place = place

    def outcome(self, config: CoreConfig) -> Outcome:
        """The lane's parts, and its pool or why it has none. Raises `ValueError` for settings that no card helps."""
        design, rest = self._design(config), self.estimate(config).rest
        allowance = Allowance.of(config, self._place.card.memory, 0)
        changes: list[Change] = []
        hopeless: list[str] = []

        def adviser(allowance: Allowance, needed: int) -> str:
            changes.extend(self._changes(config, allowance, needed))
            if changes:
                return f"settings that work: {len(changes)}"
            hopeless.append(larger(allowance, needed - allowance.own))
            return "no setting makes it fit"

        budget, reason = None, None
        try:
            budget = self._budget(config, adviser)
        except ValueError as error:
            reason = str(error)
        pool = 0 if budget is None else budget.bytes
        parts = MemoryPlan(**asdict(design.sizes), **msgspec.structs.asdict(rest), kv_pool=pool)
        return Outcome(
            parts=parts.parts,
            allowed=allowance.own,
            context_limit=design.capacity.context_limit,
            capacity=None if budget is None else budget.capacity,
            reason=reason,
            changes=changes,
            otherwise=hopeless,
        )

    def key(self, config: CoreConfig) -> Key:
        """What the parts depend on that only a run tells. Raises `ValueError`."""
        dtype = str(check_model(self._model, config.dtype)).removeprefix("torch.")
        return Key.of(config, self._model, dtype, self._place.software, self._place.card.name)

    def estimate(self, config: CoreConfig) -> Estimate:
        """Those parts. Raises `ValueError`."""
        return self._place.table.estimate(self.key(config))

    def tokens(self, config: CoreConfig) -> int:
        """Tokens that the lane's KV cache holds; 0 if it does not start."""
        try:
            return self._budget(config, lambda allowance, needed: "").capacity.tokens
        except ValueError:
            return 0

    def growth(self, config: CoreConfig, tokens: int) -> Change | None:
        """The nearest setting with which the KV cache holds `tokens` tokens; None if there is none."""
        for hundredths in _HUNDREDTHS:
            change: Change = {"gpu_memory_utilization": hundredths / 100}
            if hundredths / 100 > config.gpu_memory_utilization and self._holds(config, change, tokens):
                return change
        return None

    def _holds(self, config: CoreConfig, change: Change, tokens: int) -> bool:
        changed = msgspec.structs.replace(config, **change)
        return (changed.max_chunk_tokens or 0) <= changed.max_step_tokens and self.tokens(changed) >= tokens

    def _design(self, config: CoreConfig) -> LaneDesign:
        check_card(self._place.card.name, *self._place.card.capability)
        return design_lane(config, self._model, check_model(self._model, config.dtype), self._place.card)

    def _budget(self, config: CoreConfig, adviser: Adviser) -> KvBudget:
        design, memory = self._design(config), self._place.card.memory
        taken = design.sizes.total + self.estimate(config).rest.total
        sizer = _Sizer(config, design, self._place.card, 0, adviser)
        budget = sizer.budget(taken, max(0, memory - taken), self._place.granule)
        design.capacity.check_pool(budget.total_pages)
        return budget

    def _changes(self, config: CoreConfig, allowance: Allowance, needed: int) -> Iterator[Change]:
        """The nearest settings of which each starts, if the lane needs `needed` bytes in all."""
        missing, limit = needed - allowance.own, self._design(config).capacity.context_limit
        ways: list[Change] = nearest_changes(config, limit, missing, self._needs, allowance)
        ways += [{"kv_page_size": max(PAGE_SIZES)}, {"cuda_graphs": "off"}]
        for way in ways:
            if self._holds(config, way, 1):
                yield way

    def _needs(self, config: CoreConfig) -> int:
        """Bytes of the lane with the smallest pool; more than there are for settings that contradict each other."""
        try:
            design = self._design(config)
            return design.sizes.total + self.estimate(config).rest.total + floor_bytes(config, design.geometry)
        except ValueError:
            return _TOO_MUCH
