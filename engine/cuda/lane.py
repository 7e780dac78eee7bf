"""Builds the computing half of a CUDA lane: weights and buffers, a run of the largest step, then the KV pool.

Graphs hold the address of the KV pool, and the pool gets what graphs leave, so they are captured twice: over a scratch
pool to measure what they take, and over the real one to be used.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import CoreConfig
from engine.cuda.arena import DeviceArena
from engine.cuda.attention import FlashInferAttention, load_modules
from engine.cuda.decoder import CudaDecoder, DecoderParts, FusedOps, rope_rows
from engine.cuda.executor import CudaExecutor, ExecutorParts, reserve_logits
from engine.cuda.flashinfer_raw import ModuleNeeds, installed_version, signatures
from engine.cuda.graphs import CudaRecorder, DecodeGraphs
from engine.cuda.inputs import InputLayout, StepInputs
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.cuda.policy import has_xqa
from engine.cuda.self_check import check_planner
from engine.ladder import Ladder
from engine.memory import MIB, MemoryPlan, MemoryReport
from engine.messages import Sampling
from engine.models.config import ModelConfig, load_model_config
from engine.models.decoder import DecoderWeights
from engine.models.placed import reserve_weights, take_weights
from engine.models.progress import Progress
from engine.models.weights import fill_dummy, fill_weights, weight_bytes
from engine.plan import PlanCapacity
from engine.step import Chunk, RowContext, RowStart, StepPlan
from kv.budget import KvBudget, KvBudgetError, KvCapacity, servable_length
from kv.geometry import KvGeometry
from kv.table import TableUpdate

log = logging.getLogger(__name__)

OLDEST_CARD = (8, 0)
"""Compute capability."""
HEAD_DIMS = (64, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_SCRATCH_PAGES = 2
"""The padding page, and the one that every row of the profiled step lies on."""


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
    """Start-up phases: load, profile, graphs."""
    card_bytes: int

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


def pool_budget(geometry: KvGeometry, utilization: float, free: int, total: int) -> KvBudget:
    """What `utilization` of a card of `total` bytes leaves for the KV pool if `free` bytes of it are free, the lane's
    own weights and buffers taken. Raises `KvBudgetError`.
    """
    try:
        return KvBudget(geometry, max(0, int(utilization * total) - (total - free)))
    except KvBudgetError as error:
        raise KvBudgetError(
            f"{error}. gpu_memory_utilization is {utilization:g} of {total / MIB:.0f} MiB, of which weights, buffers, "
            f"graphs and other processes have {(total - free) / MIB:.0f} MiB: raise it, lower max_step_tokens, "
            "max_bucket or context_limit, or take a smaller model"
        ) from None


@dataclass(slots=True)
class CudaBuild:
    """What is on the card before the KV pool is."""

    config: CoreConfig
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    capacity: PlanCapacity
    geometry: KvGeometry
    weights: DecoderWeights
    arena: DeviceArena
    """Activations, logits and what the sampler knows of each row slot."""
    inputs: StepInputs
    plans: AttentionCapacity
    plan_arena: torch.Tensor
    modules: dict[str, Any]
    cos_sin: torch.Tensor
    capture_stream: torch.cuda.Stream | None
    """Where graphs are captured; None for no graphs. One for all captures: cuBLAS has a workspace for each stream."""

    def executor(self, kv: torch.Tensor) -> CudaExecutor:
        """An executor over the cache `kv`."""
        parts = DecoderParts(self.model, self.weights, kv, self.arena, FusedOps(), self.cos_sin)
        attention = FlashInferAttention(self.plans, kv, self.inputs, self.plan_arena, self.modules)
        return CudaExecutor(
            ExecutorParts(self.capacity, kv.shape[0], self.inputs, attention, CudaDecoder(parts), self.arena)
        )

    def capture(self, executor: CudaExecutor) -> int | None:
        """Capture the executor's graphs; returns the bytes that they took, None if the settings want no graphs."""
        if self.capture_stream is None:
            return None
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        ladder = Ladder.of(self.config.max_bucket, self.config.graph_buckets)
        graphs = DecodeGraphs(ladder, CudaRecorder(self.device, self.capture_stream))
        with _no_garbage():
            executor.capture(graphs)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        taken = free - torch.cuda.mem_get_info(self.device)[0]
        log.info("captured %d graphs for %d buckets: %.0f MiB", len(graphs), len(ladder), taken / MIB)
        return max(0, taken)

    def cache(self, pages: int) -> torch.Tensor:
        """A cache of so many pages. Zeroed: a masked slot's weight of zero survives only finite numbers."""
        return torch.zeros((pages, *self.geometry.page_shape), dtype=self.dtype, device=self.device)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect garbage now, and none meanwhile: a captured stream does not allow to free what an old lane held."""
    enabled = gc.isenabled()
    gc.collect()
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
) -> CudaLane:
    """Build the lane that `config` asks for, with the model in `model_dir`, on the current CUDA device.

    Raises `ModelError`, `KvBudgetError`, `PlanError` or another `ValueError` with one line for the operator.
    """
    model = load_model_config(model_dir)
    dtype = check_model(model, config.dtype)
    device = torch.device("cuda", torch.cuda.current_device())
    began = clock()
    build = prepare(config, model, dtype, device, _loader(config, model_dir, progress))
    torch.cuda.synchronize()
    loaded = clock()
    free, total, graphs = _profile(build)
    budget = pool_budget(build.geometry, config.gpu_memory_utilization, free, total)
    build.capacity.check_pool(budget.total_pages)
    # The scratch pool's graphs are gone; what they took has to be free before the pool takes the rest.
    torch.cuda.empty_cache()
    kv = build.cache(budget.total_pages)
    executor = build.executor(kv)
    profiled = clock()
    measured = _measure(build, kv, build.capture(executor))
    return CudaLane(
        executor=executor,
        model_config=model,
        geometry=build.geometry,
        capacity=budget.capacity,
        context_limit=build.capacity.context_limit,
        servable_length=servable_length(build.capacity.context_limit, budget.capacity),
        report=MemoryReport(_planned(build, budget, graphs), measured),
        seconds={"load": loaded - began, "profile": profiled - loaded, "graphs": clock() - profiled},
        card_bytes=total,
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
    config: CoreConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load: Loader,
    *,
    xqa: bool = False,
) -> CudaBuild:
    """What `CudaBuild` holds; `xqa` takes XQA where policy does: no lane does yet (docs/attention-plans.md)."""
    from engine.kernels.step_head import write_step

    limit = config.context_limit or model.context_limit
    if limit > model.context_limit:
        raise ValueError(
            f"context_limit is {limit} tokens, but the model was made for {model.context_limit}: "
            f"lower it, or leave it out to take {model.context_limit}"
        )
    name = "bfloat16" if dtype == torch.bfloat16 else "float16"
    geometry = KvGeometry(config.kv_page_size, model.layers, model.kv_heads, model.head_dim, name)
    capacity = PlanCapacity(
        config.max_bucket,
        config.max_step_tokens,
        limit,
        geometry.page_size,
        model.heads,
        model.kv_heads,
        model.head_dim,
    )
    card = torch.cuda.get_device_properties(device)
    check_card(card.name, card.major, card.minor)
    sm90 = card.major == 9
    xqa = xqa and sm90 and has_xqa(model.head_dim, model.group, geometry.page_size)
    # What may refuse comes before the weights, which take minutes.
    modules = load_modules(ModuleNeeds(model.head_dim, model.group, geometry.page_size, name, sm90=sm90, xqa=xqa))
    plans = AttentionCapacity(capacity, card.multi_processor_count, sm90=sm90, xqa="xqa" in modules)
    check_planner(signatures(installed_version()), modules["fa2"], plans.shape)
    memory, arena = DeviceArena(device), DeviceArena(device)
    reserve_weights(memory, model, dtype)
    CudaDecoder.reserve(arena, model, capacity.max_step_tokens, dtype)
    reserve_logits(arena, capacity, model.vocab_size, model.hidden_size, dtype)
    memory.allocate()
    placed = take_weights(memory, model)
    load(model, placed.parts)
    arena.allocate()
    return CudaBuild(
        config,
        model,
        dtype,
        device,
        capacity,
        geometry,
        placed.weights,
        arena,
        inputs=StepInputs(capacity, device, write_step),
        plans=plans,
        plan_arena=torch.zeros(AttentionLayout(plans).nbytes, dtype=torch.uint8, device=device),
        modules=modules,
        cos_sin=rope_rows(model, capacity.max_context, device),
        capture_stream=None if config.cuda_graphs == "off" else torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
    )


def _profile(build: CudaBuild) -> tuple[int, int, int | None]:
    """Free and total bytes of the card after the largest step has run and all graphs are captured, with what they take
    still held; and the graphs' bytes.
    """
    torch.cuda.empty_cache()
    executor = build.executor(build.cache(_SCRATCH_PAGES))
    capacity = build.capacity
    rows = capacity.max_bucket
    tokens = min(capacity.max_step_tokens // rows, capacity.context_limit)
    plans = (_largest(capacity, rows, tokens), _decode_all(rows))
    _run(executor, plans)
    graphs = build.capture(executor)
    if graphs is not None:
        # Capturing gives back what steps without a graph take for a moment. They will take it again, so it counts.
        _run(executor, plans)
    return *torch.cuda.mem_get_info(build.device), graphs


def _run(executor: CudaExecutor, plans: Iterable[StepPlan]) -> None:
    for plan in plans:
        executor.collect(executor.launch(plan))
    torch.cuda.synchronize()


def _largest(capacity: PlanCapacity, rows: int, tokens: int) -> StepPlan:
    """A chunk of `tokens` tokens on every row, all on one page, so that the step takes no KV memory.

    All rows draw, and the first asks for all that a request may ask for: what is compiled on first use is so here.
    """
    pages = -(-tokens // capacity.page_size)
    table = [TableUpdate(row, index, 1) for row in range(rows) for index in range(pages)]
    asking = Sampling(temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.1, min_tokens=1, logprobs=1)
    starts = [RowStart(0, asking, RowContext([0], [0], [0], tokens + 1))]
    starts += [RowStart(row, Sampling(temperature=1.0)) for row in range(1, rows)]
    chunks = [Chunk(row, 0, [0] * tokens, True) for row in range(rows)]
    chunks[0] = chunks[0]._replace(targets=chunks[0].tokens, top_logprobs=1)
    return StepPlan(0, starts, table, [], [], chunks)


def _decode_all(rows: int) -> StepPlan:
    starts = [RowStart(row, Sampling()) for row in range(rows)]
    return StepPlan(1, starts, [], list(range(rows)), [2] * rows, [])


def _planned(build: CudaBuild, budget: KvBudget, graphs: int | None) -> MemoryPlan:
    return MemoryPlan(
        weights=weight_bytes(build.model, build.dtype),
        rope_table=build.capacity.max_context * build.model.head_dim * 4,
        plan_arena=InputLayout(build.capacity).nbytes + AttentionLayout(build.plans).nbytes,
        activations=build.arena.nbytes,
        kv_pool=budget.bytes,
        graphs=graphs,
    )


def _measure(build: CudaBuild, kv: torch.Tensor, graphs: int | None) -> MemoryPlan:
    return MemoryPlan(
        weights=build.weights.nbytes,
        rope_table=build.cos_sin.nbytes,
        plan_arena=build.inputs.nbytes + build.plan_arena.nbytes,
        activations=build.arena.nbytes,
        kv_pool=kv.nbytes,
        graphs=graphs,
    )
