"""Builds the computing half of a CPU lane: reads the model, plans every byte, takes it, finds the fastest products."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import CoreConfig
from engine.cpu.arena import TORCH_DTYPES, Arena, PlanArena
from engine.cpu.attention import PagedAttention
from engine.cpu.executor import CpuExecutor, ExecutorParts, reserve_logits
from engine.cpu.linear import Gemm, reserve_scratch
from engine.memory import MemoryPlan, MemoryReport, host_memory
from engine.models.config import ModelConfig, load_model_config
from engine.models.decoder import Decoder, DecoderWeights
from engine.models.progress import Progress
from engine.models.weights import dummy_weights, load_weights, weight_bytes
from engine.plan import PlanCapacity, PlanLayout
from kv.budget import KvBudget, KvCapacity, parse_size, servable_length
from kv.geometry import KvGeometry


@dataclass(frozen=True, slots=True)
class CpuLane:
    """An executor that is ready to run, and the facts that the scheduler and the worker need."""

    executor: CpuExecutor
    model_config: ModelConfig
    geometry: KvGeometry
    capacity: KvCapacity
    servable_length: int
    report: MemoryReport
    seconds: dict[str, float]
    """Start-up phases: load, tune."""


@dataclass(frozen=True, slots=True)
class LaneDesign:
    """A lane before it takes memory."""

    model: ModelConfig
    dtype: torch.dtype
    budget: KvBudget
    capacity: PlanCapacity
    layout: PlanLayout
    activations: Arena
    logits: Arena

    @property
    def memory(self) -> MemoryPlan:
        """Bytes by part."""
        return MemoryPlan(
            weights=weight_bytes(self.model, self.dtype),
            rope_table=2 * self.capacity.max_context * self.model.head_dim * self.dtype.itemsize,
            plan_arena=self.layout.nbytes,
            activations=self.activations.nbytes,
            logits=self.logits.nbytes,
            kv_pool=self.budget.bytes,
        )


def create_cpu_lane(
    config: CoreConfig,
    model_dir: Path,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CpuLane:
    """Build the lane that `config` asks for, with the model in `model_dir`.

    Raises `ModelError`, `KvBudgetError`, `PlanError`, `MemoryShortError` or another `ValueError` with one line for the
    operator. Sets the process's torch thread count.
    """
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    design = design_lane(config, load_model_config(model_dir))
    available = host_memory()
    if available is not None:
        design.memory.check_host(available)
    began = clock()
    weights = _load(config, model_dir, design, progress)
    loaded = clock()
    parts = _allocate(design, weights)
    parts.gemm.tune(weights.matrices(), design.capacity.max_rows)
    return CpuLane(
        executor=CpuExecutor(parts),
        model_config=design.model,
        geometry=design.budget.geometry,
        capacity=design.budget.capacity,
        servable_length=design.capacity.context_limit,
        report=MemoryReport(design.memory, _measure(parts)),
        seconds={"load": loaded - began, "tune": clock() - loaded},
    )


def design_lane(config: CoreConfig, model: ModelConfig) -> LaneDesign:
    """The lane that `config` asks for. Raises `KvBudgetError`, `PlanError` or another `ValueError`."""
    name = "float32" if config.dtype == "auto" else config.dtype
    dtype = TORCH_DTYPES[name]
    geometry = KvGeometry(config.kv_page_size, model.layers, model.kv_heads, model.head_dim, name)
    budget = KvBudget(geometry, parse_size(config.kv_cache_memory))
    # No sequence outgrows the servable length, so nothing is sized by a context that the pool cannot hold.
    capacity = PlanCapacity(
        max_bucket=config.max_bucket,
        max_step_tokens=config.max_step_tokens,
        context_limit=servable_length(model.context_for(config.context_limit), budget.capacity),
        page_size=geometry.page_size,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
    )
    capacity.check_pool(budget.total_pages)
    activations, logits = Arena(), Arena()
    Decoder.reserve(activations, model, capacity.max_step_tokens, dtype)
    PagedAttention.reserve(activations, capacity, dtype)
    inputs, outputs = _widest(model)
    reserve_scratch(activations, capacity.max_step_tokens, inputs, outputs, dtype)
    reserve_logits(logits, capacity, model.vocab_size, model.hidden_size, dtype)
    return LaneDesign(model, dtype, budget, capacity, PlanLayout(capacity), activations, logits)


def _widest(model: ModelConfig) -> tuple[int, int]:
    """Largest input and output dimension of a matrix product."""
    queries = model.heads * model.head_dim
    qkv = queries + 2 * model.kv_heads * model.head_dim
    inputs = max(model.hidden_size, model.intermediate_size, queries)
    return inputs, max(model.vocab_size, qkv, 2 * model.intermediate_size, model.hidden_size)


def _load(config: CoreConfig, model_dir: Path, design: LaneDesign, progress: Progress | None) -> DecoderWeights:
    device = torch.device("cpu")
    if config.load_format == "dummy":
        weights = dummy_weights(design.model, design.dtype, device)
    else:
        weights = load_weights(model_dir, design.model, design.dtype, device, progress)
    return DecoderWeights.fuse(design.model, weights)


def _allocate(design: LaneDesign, weights: DecoderWeights) -> ExecutorParts:
    design.activations.allocate()
    design.logits.allocate()
    gemm = Gemm(design.activations)
    shape = (design.budget.total_pages, *design.budget.geometry.page_shape)
    return ExecutorParts(
        capacity=design.capacity,
        # Zeros, for the sake of the padding page: see engine.cpu.attention.
        kv=torch.zeros(shape, dtype=design.dtype),
        plan_arena=PlanArena(design.layout),
        activations=design.activations,
        logits=design.logits,
        decoder=Decoder(design.model, weights, design.activations, gemm, design.capacity.max_context),
        gemm=gemm,
    )


def _measure(parts: ExecutorParts) -> MemoryPlan:
    decoder = parts.decoder
    return MemoryPlan(
        weights=decoder.weights.nbytes,
        rope_table=decoder.cos.nbytes + decoder.sin.nbytes,
        plan_arena=parts.plan_arena.memory.nbytes,
        activations=parts.activations.memory.nbytes,
        logits=parts.logits.memory.nbytes,
        kv_pool=parts.kv.nbytes,
    )
