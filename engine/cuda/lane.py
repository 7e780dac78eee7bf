"""Builds the computing half of a CUDA lane: what its settings determine, weights, buffers, graphs, then the KV pool."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import CoreConfig
from engine.cuda.arena import DeviceArena
from engine.cuda.attention import FlashInferAttention, load_modules
from engine.cuda.budget import PoolSizer
from engine.cuda.counters import CudaCounters
from engine.cuda.decoder import CudaDecoder, DecoderParts, FusedOps, rope_rows
from engine.cuda.executor import CudaExecutor, ExecutorParts
from engine.cuda.flashinfer_raw import ModuleNeeds, installed_version, signatures
from engine.cuda.gpu import CudaGpu, Gpu
from engine.cuda.graphs import DecodeGraphs
from engine.cuda.inputs import InputLayout, StepInputs
from engine.cuda.kv_memory import KvMemory
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.cuda.measured import known_rest
from engine.cuda.policy import has_xqa
from engine.cuda.provision import provide
from engine.cuda.self_check import check_planner
from engine.cuda.sizing import LaneDesign, design_lane
from engine.ladder import Ladder
from engine.memory import MIB, MemoryPlan, MemoryReport
from engine.models.config import ModelConfig, load_model_config
from engine.models.decoder import DecoderWeights
from engine.models.placed import take_weights
from engine.models.progress import Progress
from engine.models.weights import fill_dummy, fill_weights
from engine.plan import PlanCapacity
from engine.step import DeviceCounters
from kv.budget import KvBudgetError, KvCapacity, servable_length
from kv.geometry import KvGeometry

log = logging.getLogger(__name__)

OLDEST_CARD = (8, 0)
"""Compute capability."""
HEAD_DIMS = (64, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class CudaLane:
    """An executor that is ready to run, and the facts that the scheduler and the worker need."""

    executor: CudaExecutor
    model_config: ModelConfig
    geometry: KvGeometry
    capacity: KvCapacity
    context_limit: int
    servable_length: int
    report: MemoryReport
    seconds: dict[str, float]
    """Start-up phases: load, and pool, which is the largest steps, the graphs and the mapping."""
    card_bytes: int
    memory: KvMemory
    """Of the pool. Who builds several lanes in one process closes it before the next."""

    def counting(self, clock: Callable[[], float]) -> Callable[[], DeviceCounters]:
        """What the card does from now on, as `Lane` asks for it."""
        return CudaCounters(self.executor, clock)

    def load_line(self, fingerprint: str) -> str:
        """One line about the KV cache; X % of the card's memory, usable pages and padding page together."""
        pool = self.report.measured.kv_pool
        return (
            f"KV cache (profiled): {self.capacity.usable_pages} pages of {self.capacity.page_size} tokens, "
            f"{self.capacity.tokens} tokens, {pool / MIB:.1f} MiB, {100 * pool / self.card_bytes:.1f} % of the card, "
            f"fingerprint {fingerprint}"
        )


def check_model(model: ModelConfig, dtype: str) -> torch.dtype:
    """The type to compute in, or `ValueError` for a model that the CUDA lane does not run."""
    name = model.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ValueError(
            f"dtype is {name}, but the CUDA lane computes in {' or '.join(DTYPES)}: set dtype to one of them"
        )
    if model.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"the model's head_dim is {model.head_dim}, but the CUDA lane runs {', '.join(map(str, HEAD_DIMS))}"
        )
    return DTYPES[name]


def check_card(name: str, major: int, minor: int) -> None:
    """Raise `ValueError` for a card that is too old for the kernels."""
    if (major, minor) < OLDEST_CARD:
        raise ValueError(
            f"the GPU is a {name} (sm{major}{minor}), but the CUDA lane runs from sm{OLDEST_CARD[0]}{OLDEST_CARD[1]} "
            "on: take a newer card, or set device to cpu"
        )


@dataclass(slots=True)
class CudaBuild:
    """What is on the card before the KV pool is."""

    config: CoreConfig
    design: LaneDesign
    gpu: Gpu
    sizer: PoolSizer
    weights: DecoderWeights
    rest: dict[str, int]
    """Bytes by part of what only a run tells, as lanes of this kind were measured; empty if none was."""
    inputs: StepInputs
    plan_arena: torch.Tensor
    modules: dict[str, Any]
    cos_sin: torch.Tensor

    @property
    def model(self) -> ModelConfig:
        """Shape of the model."""
        return self.design.model

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and cache."""
        return self.design.dtype

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.gpu.device

    @property
    def capacity(self) -> PlanCapacity:
        """The largest step."""
        return self.design.capacity

    @property
    def geometry(self) -> KvGeometry:
        """Shape of a page."""
        return self.design.geometry

    @property
    def plans(self) -> AttentionCapacity:
        """The largest attention plans."""
        return self.design.plans

    @property
    def arena(self) -> DeviceArena:
        """Activations, logits and what the sampler knows of each row slot."""
        return self.design.arena

    def executor(self, kv: torch.Tensor, pages: int | None = None) -> CudaExecutor:
        """An executor over the first `pages` pages of the cache `kv`, by default over all."""
        parts = DecoderParts(self.model, self.weights, kv, self.arena, FusedOps(), self.cos_sin)
        attention = FlashInferAttention(self.plans, kv, self.inputs, self.plan_arena, self.modules)
        count = kv.shape[0] if pages is None else pages
        return CudaExecutor(ExecutorParts(self.capacity, count, self.inputs, attention, CudaDecoder(parts), self.arena))

    def capture(self, executor: CudaExecutor) -> int | None:
        """Capture the executor's graphs; returns the bytes that they took, None if the settings want no graphs."""
        if self.config.cuda_graphs == "off":
            return None
        self.gpu.settle()
        before = self.gpu.used()
        ladder = Ladder.of(self.config.max_bucket, self.config.graph_buckets)
        graphs = DecodeGraphs(ladder, self.gpu.recorder())
        # A captured stream does not allow to free what an old lane held, so no garbage is collected meanwhile.
        with _no_garbage():
            executor.capture(graphs)
        self.gpu.settle()
        taken = max(0, self.gpu.used() - before)
        log.info("captured %d graphs for %d buckets: %.0f MiB", len(graphs), len(ladder), taken / MIB)
        return taken

    def cache(self, pages: int) -> torch.Tensor:
        """A cache of so many pages. Zeroed: a masked slot's weight of zero survives only finite numbers."""
        return torch.zeros((pages, *self.geometry.page_shape), dtype=self.dtype, device=self.device)


@contextmanager
def _no_garbage() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def create_cuda_lane(
    config: CoreConfig,
    model_dir: Path,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    gpu: Gpu | None = None,
) -> CudaLane:
    """Build the lane that `config` asks for, with the model in `model_dir`, on the current CUDA device.

    Raises `ModelError`, `KvBudgetError`, `PlanError` or another `ValueError` with one line for the operator.
    """
    model = load_model_config(model_dir)
    dtype = check_model(model, config.dtype)
    began = clock()
    gpu = gpu or CudaGpu()
    try:
        build = prepare(config, model, dtype, gpu, _loader(config, model_dir, progress))
        loaded = clock()
        provided = provide(build)
    except torch.OutOfMemoryError as error:
        raise KvBudgetError(
            f"the GPU's memory ran out: {str(error).partition('. ')[0]}; lower max_step_tokens, max_bucket or "
            "context_limit, or take a smaller model"
        ) from error
    planned = MemoryPlan(**asdict(build.design.sizes), kv_pool=provided.budget.bytes, **build.rest)
    log.info("the lane may take %s; other processes have %.0f MiB", build.sizer.allowance, gpu.others / MIB)
    return CudaLane(
        executor=provided.executor,
        model_config=model,
        geometry=build.geometry,
        capacity=provided.budget.capacity,
        context_limit=build.capacity.context_limit,
        servable_length=servable_length(build.capacity.context_limit, provided.budget.capacity),
        report=MemoryReport(planned, provided.measured),
        seconds={"load": loaded - began, "pool": clock() - loaded},
        card_bytes=gpu.card.memory,
        memory=provided.memory,
    )


Loader = Callable[[ModelConfig, Mapping[str, torch.Tensor]], None]
"""Writes a model's weights to where they belong, by the names and in the order of `weight_shapes`."""


def _loader(config: CoreConfig, model_dir: Path, progress: Progress | None) -> Loader:
    def load(model: ModelConfig, parts: Mapping[str, torch.Tensor]) -> None:
        if config.load_format == "dummy":
            fill_dummy(parts)
        else:
            fill_weights(model_dir, model, parts, progress)

    return load


def prepare(
    config: CoreConfig, model: ModelConfig, dtype: torch.dtype, gpu: Gpu, load: Loader, *, xqa: bool = False
) -> CudaBuild:
    """What `CudaBuild` holds; `xqa` takes XQA where policy does: no lane does yet (docs/attention-plans.md)."""
    from engine.kernels.step_head import write_step

    card, device, page_size = gpu.card, gpu.device, config.kv_page_size
    check_card(card.name, *card.capability)
    xqa = xqa and card.sm90 and has_xqa(model.head_dim, model.group, page_size)
    # What may refuse comes before the weights, which take minutes.
    design = design_lane(config, model, dtype, card, device=device, xqa=xqa)
    sizer = PoolSizer(config, design, card, gpu.others)
    # A lower bound: what only a run tells comes on top.
    used = gpu.used()
    taken = used + design.sizes.total
    rest = known_rest(config, model, design.geometry.dtype, card.name)
    sizer.budget(taken, card.memory - gpu.others - taken, coming=max(0, sum(rest.values()) - used))
    modules = load_modules(
        ModuleNeeds(model.head_dim, model.group, page_size, design.geometry.dtype, sm90=card.sm90, xqa=xqa)
    )
    if xqa and "xqa" not in modules:
        design = design_lane(config, model, dtype, card, device=device)
    check_planner(signatures(installed_version()), modules["fa2"], design.plans.shape)
    if sizer.allowance.limited:
        gpu.cap(sizer.allowance.own)
    design.weights.allocate()
    placed = take_weights(design.weights, model)
    load(model, placed.parts)
    # What loading took for a moment goes back: torch would cut the next tensors from it and keep the rest.
    gpu.settle()
    design.arena.allocate()
    inputs, plan_arena, cos_sin = _allocate_small(design, device)
    return CudaBuild(
        config,
        design,
        gpu,
        sizer,
        placed.weights,
        rest=rest,
        inputs=StepInputs(design.capacity, device, write_step, inputs),
        plan_arena=plan_arena,
        modules=modules,
        cos_sin=cos_sin,
    )


def _allocate_small(design: LaneDesign, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for inputs and plans, and the rope table, as one allocation: of tensors of 1 to 10 MiB, torch puts some
    into 20 MiB of their own.
    """
    rope = rope_rows(design.model, design.capacity.max_context, torch.device("cpu"))
    arena = DeviceArena(device)
    arena.reserve("inputs", (InputLayout(design.capacity).nbytes,), torch.uint8)
    arena.reserve("plans", (AttentionLayout(design.plans).nbytes,), torch.uint8)
    arena.reserve("rope", tuple(rope.shape), rope.dtype)
    arena.allocate()
    return arena.take("inputs"), arena.take("plans"), arena.take("rope").copy_(rope)
