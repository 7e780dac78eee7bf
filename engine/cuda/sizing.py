"""What settings, model and card determine of a CUDA lane's memory, byte for byte, before anything is allocated.

The numbers come from the objects that allocation uses: capacities, layouts and arenas. Nothing here needs a GPU or
FlashInfer; what only a run tells (CUDA's context, captured graphs, rounding) is in `engine.cuda.measured`.
"""

from dataclasses import dataclass

import torch

from engine.config import CoreConfig
from engine.cuda.arena import DeviceArena
from engine.cuda.decoder import CudaDecoder
from engine.cuda.executor import reserve_logits
from engine.cuda.inputs import InputLayout
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.models.config import ModelConfig
from engine.models.placed import reserve_weights
from engine.plan import PlanCapacity
from kv.geometry import KvGeometry


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as far as sizes depend on it."""

    name: str
    """As the driver gives it."""
    sm_count: int
    capability: tuple[int, int]
    """Compute capability, such as (9, 0)."""
    memory: int
    """Bytes in all, as the driver reports them to a process: less than what the card is sold with."""

    @property
    def sm90(self) -> bool:
        """The card runs FA3."""
        return self.capability[0] == 9

    @classmethod
    def present(cls, device: torch.device) -> "Card":
        """The GPU `device`."""
        found = torch.cuda.get_device_properties(device)
        return cls(found.name, found.multi_processor_count, (found.major, found.minor), found.total_memory)


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """Bytes that a lane takes beside its KV pool, as far as they are determined; names as in `MemoryPlan`."""

    weights: int
    """All weights in their arena, a tied head once."""
    rope_table: int
    plan_arena: int
    """Inputs of a step and attention plans, partial results of split plans with them."""
    activations: int
    """One arena: activations, logits of a slice of rows, sampler scratch, what the sampler knows of each row, and the
    results of steps.
    """

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True)
class LaneDesign:
    """A CUDA lane before it takes memory."""

    model: ModelConfig
    dtype: torch.dtype
    capacity: PlanCapacity
    geometry: KvGeometry
    plans: AttentionCapacity
    weights: DeviceArena
    """Planned, not allocated."""
    arena: DeviceArena
    """Activations, logits, sampler and results; planned, not allocated."""

    @property
    def sizes(self) -> LaneSizes:
        """Bytes of every determined part."""
        return LaneSizes(
            weights=self.weights.nbytes,
            # See `rope_rows`: float32 `[positions, head_dim]`.
            rope_table=self.capacity.max_context * self.model.head_dim * 4,
            plan_arena=InputLayout(self.capacity).nbytes + AttentionLayout(self.plans).nbytes,
            activations=self.arena.nbytes,
        )


def design_lane(
    config: CoreConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    card: Card,
    *,
    device: torch.device | None = None,
    xqa: bool = False,
) -> LaneDesign:
    """The lane that `config` asks for, computing in `dtype` on `card`; its arenas belong to `device` (meta if None).

    `xqa`: decode rows may run on XQA. Raises `PlanError` for a number that a kernel's int32 does not hold, or another
    `ValueError` for settings that contradict the model.
    """
    name = str(dtype).removeprefix("torch.")
    geometry = KvGeometry(config.kv_page_size, model.layers, model.kv_heads, model.head_dim, name)
    capacity = PlanCapacity(
        config.max_bucket,
        config.max_step_tokens,
        model.context_for(config.context_limit),
        geometry.page_size,
        model.heads,
        model.kv_heads,
        model.head_dim,
    )
    place = torch.device("meta") if device is None else device
    weights, arena = DeviceArena(place), DeviceArena(place)
    reserve_weights(weights, model, dtype)
    CudaDecoder.reserve(arena, model, capacity.max_step_tokens, dtype)
    reserve_logits(arena, capacity, model.vocab_size, model.hidden_size, dtype)
    plans = AttentionCapacity(capacity, card.sm_count, sm90=card.sm90, xqa=xqa)
    return LaneDesign(model, dtype, capacity, geometry, plans, weights, arena)


def lane_sizes(config: CoreConfig, model: ModelConfig, dtype: torch.dtype, card: Card) -> LaneSizes:
    """Bytes of everything that settings, model and card determine. Raises as `design_lane` does."""
    return design_lane(config, model, dtype, card).sizes
