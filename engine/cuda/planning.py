"""Plans a CUDA lane for a card that need not be here, by the steps in which `engine.cuda.lane` builds one."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import msgspec
import torch

from engine.config import CoreConfig
from engine.cuda.budget import Allowance, Change, PoolSizer, floor_bytes, in_words, nearest_changes
from engine.cuda.cards import KNOWN_CARDS, known_card
from engine.cuda.lane import check_card, check_model
from engine.cuda.measured import Estimate, Key, MeasuredTable, Software
from engine.cuda.sizing import Card, LaneDesign, design_lane
from engine.memory import MIB, MemoryPlan
from engine.models.config import ModelConfig
from engine.plan import PlanError
from engine.planning import Outcome
from kv.budget import KvBudget, KvBudgetError

GRANULE = 2 * MIB
"""What the driver maps at once (cuMemGetAllocationGranularity), on every card so far."""
_TOO_MUCH = 1 << 62


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lane is planned to run."""

    card: Card
    measured: bool
    """The card's memory was asked for or reported, not taken from a list."""
    software: Software
    table: MeasuredTable


def place_of(name: str | None, memory: int | None, table: MeasuredTable) -> Place:
    """The card called `name`, else the present one, with `memory` bytes if that is given.

    A size alone is a part of an H200: the card that most rows of the table are from. Raises `ValueError` if nothing
    says which card is meant.
    """
    if name is not None:
        card, measured = known_card(name)
    elif torch.cuda.is_available():
        card, measured = Card.present(torch.device("cuda", torch.cuda.current_device())), True
    elif memory is not None:
        card, measured = KNOWN_CARDS["H200"]
    else:
        raise ValueError(
            f"there is no GPU here to plan for: give --card ({', '.join(KNOWN_CARDS)}), --device-memory SIZE for a "
            "part of an H200, or --device cpu"
        )
    if memory is not None:
        card, measured = replace(card, memory=memory), True
    return Place(card, measured, _installed() or table.software, table)


def _installed() -> Software | None:
    """The versions here; None if they are not those of a machine with GPUs."""
    if torch.version.cuda is None:
        return None
    try:
        return Software(torch=torch.__version__.partition("+")[0], flashinfer=version("flashinfer-python"))
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class _Sizer(PoolSizer):
    """A lane's own sizer, with advice from elsewhere."""

    adviser: Callable[[Allowance, int], str]

    def advice(self, needed: int) -> str:
        """See `PoolSizer`."""
        return self.adviser(self.allowance, needed)


class CudaPlanner:
    """Plans lanes of one model in one place."""

    def __init__(self, model: ModelConfig, place: Place) -> None:
        """Raises `ValueError` for a card that is too old."""
        check_card(place.card.name, *place.card.capability)
        self._model = model
        self._place = place

    def outcome(self, config: CoreConfig) -> Outcome:
        """The lane's parts, and its pool or why it has none. Raises `ValueError` for settings that no card helps."""
        design, rest = self._design(config), self.estimate(config).rest
        changes: list[Change] = []

        def adviser(allowance: Allowance, needed: int) -> str:
            changes.extend(self._changes(config, allowance, needed))
            if changes:
                return f"what works: {', or '.join(in_words(change) for change in changes)}"
            where = "gpu_memory_limit" if allowance.limited else "the card"
            missing = needed - allowance.own
            return f"no setting makes it fit: take a smaller model, or {where} {missing / MIB:.0f} MiB larger"

        budget, reason, own = None, None, 0
        try:
            own = Allowance.of(config, self._place.card.memory, 0).own
            budget = self._budget(config, adviser)
        except (KvBudgetError, PlanError) as error:
            reason = str(error)
        pool = 0 if budget is None else budget.bytes
        parts = MemoryPlan(**asdict(design.sizes), **msgspec.structs.asdict(rest), kv_pool=pool)
        return Outcome(
            parts=parts.parts,
            allowed=own,
            context_limit=design.capacity.context_limit,
            capacity=None if budget is None else budget.capacity,
            reason=reason,
            changes=changes,
        )

    def key(self, config: CoreConfig) -> Key:
        """What the parts depend on that only a run tells. Raises `ValueError`."""
        dtype = str(check_model(self._model, config.dtype)).removeprefix("torch.")
        return Key.of(config, self._model, dtype, self._place.software, self._place.card.name)

    def estimate(self, config: CoreConfig) -> Estimate:
        """Those parts. Raises `ValueError`."""
        return self._place.table.estimate(self.key(config))

    def starts(self, config: CoreConfig) -> bool:
        """Whether a lane of these settings starts."""
        try:
            self._budget(config, lambda allowance, needed: "")
        except ValueError:
            return False
        return True

    def _design(self, config: CoreConfig) -> LaneDesign:
        return design_lane(config, self._model, check_model(self._model, config.dtype), self._place.card)

    def _budget(self, config: CoreConfig, adviser: Callable[[Allowance, int], str]) -> KvBudget:
        design, memory = self._design(config), self._place.card.memory
        taken = design.sizes.total + self.estimate(config).rest.total
        sizer = _Sizer(config, design, self._place.card, 0, adviser)
        budget = sizer.budget(taken, max(0, memory - taken), GRANULE)
        design.capacity.check_pool(budget.total_pages)
        return budget

    def _changes(self, config: CoreConfig, allowance: Allowance, needed: int) -> list[Change]:
        """The nearest settings of which each starts, if the lane needs `needed` bytes in all."""
        # Memory is mapped in whole granules, of which one more may be needed.
        missing, limit = needed + GRANULE - allowance.own, self._design(config).capacity.context_limit
        ways = nearest_changes(config, limit, missing, self._needs, allowance)
        ways += [{"kv_page_size": 64}, {"cuda_graphs": "off"}]
        return [way for way in ways if self.starts(msgspec.structs.replace(config, **way))]

    def _needs(self, config: CoreConfig) -> int:
        """Bytes of the lane with the smallest pool; more than there are for settings that contradict each other."""
        try:
            design = self._design(config)
            return design.sizes.total + self.estimate(config).rest.total + floor_bytes(config, design.geometry)
        except ValueError:
            return _TOO_MUCH
