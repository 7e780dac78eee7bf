"""Steps, caches and references of the attention checks on a GPU, in place of a lane's inputs."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.cuda.attention import FlashInferAttention, load_modules
from engine.cuda.attention_plan import StepRows
from engine.cuda.flashinfer_raw import ModuleNeeds
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.plan import PlanCapacity

GROUPS = {64: [(9, 3)], 128: [(32, 8), (40, 8), (20, 4)], 256: [(24, 4), (16, 4)]}
XQA_CANDIDATES = {64: (3,), 128: (4, 5), 256: (6,)}
"""Groups to try XQA for, by head dim."""
MODULES: dict[ModuleNeeds, dict[str, Any]] = {}
NO_ROWS = np.zeros(0, np.int64)
Layer = Callable[[int], None]


@dataclass
class Step:
    """A step with its page lists, in place of the lane's `StepInputs`."""

    rows: StepRows
    staged: dict[str, torch.Tensor]
    device: dict[str, torch.Tensor]
    lists: list[list[int]]


def capacity_for(heads: int, kv_heads: int, head_dim: int, page_size: int) -> AttentionCapacity:
    step = PlanCapacity(256, 8192, 40000, page_size, heads, kv_heads, head_dim)
    card = torch.cuda.get_device_properties(0)
    return AttentionCapacity(step, card.multi_processor_count, card.major == 9, xqa=False)


def shapes(head_dim: int) -> list[AttentionCapacity]:
    return [capacity_for(*heads, head_dim, page_size) for heads in GROUPS[head_dim] for page_size in (16, 64)]


def facts(capacity: AttentionCapacity) -> dict[str, int]:
    step = capacity.step
    return {"heads": step.heads, "kv_heads": step.kv_heads, "head_dim": step.head_dim, "page_size": step.page_size}


def make_step(capacity: AttentionCapacity, rows: StepRows, pool: int, seed: int, shared: int = 0) -> Step:
    """Rows over random pages 1 to pool - 1; the first `shared` pages of every row are the same."""
    page_size, rng = capacity.step.page_size, np.random.default_rng(seed)
    lengths = np.concatenate([rows.decode_lengths, rows.chunk_lengths])
    pages = -(-lengths // page_size)
    prefix = rng.permutation(np.arange(1, pool))[:shared]
    free = iter(np.concatenate([rng.permutation(np.setdiff1d(np.arange(1, pool), prefix))] * 64))
    lists = [[int(p) for p in prefix[:count]] + [int(next(free)) for _ in range(count - shared)] for count in pages]
    table = np.zeros((len(lists), capacity.step.max_pages_per_row), np.int32)
    for row, pages_of in enumerate(lists):
        table[row, : len(pages_of)] = pages_of

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(np.asarray(values, np.int32), device="cuda")

    def indptr(counts: Any) -> torch.Tensor:
        return ints(np.concatenate(([0], np.cumsum(counts))))

    staged = {"row_slots": ints(range(len(lists))), "lengths": ints(lengths), "chunk_indptr": indptr(rows.chunk_tokens)}
    device = {
        "block_table": ints(table),
        "decode_indptr": ints(range(257)),
        "page_indptr": indptr(pages),
        "page_indices": ints([page for pages_of in lists for page in pages_of]),
        "last_page_len": ints(lengths - (pages - 1) * page_size),
    }
    return Step(rows, staged, device, lists)


def modules(capacity: AttentionCapacity, dtype: torch.dtype) -> dict[str, Any]:
    shape = capacity.shape
    name = str(dtype).removeprefix("torch.")
    needs = ModuleNeeds(shape.head_dim, shape.group, shape.page_size, name, capacity.sm90, capacity.xqa)
    if needs not in MODULES:
        MODULES[needs] = load_modules(needs)
    return MODULES[needs]


def arena(capacity: AttentionCapacity) -> torch.Tensor:
    return torch.zeros(AttentionLayout(capacity).nbytes, dtype=torch.uint8, device="cuda")


def attention(capacity: AttentionCapacity, kv: torch.Tensor, step: Step) -> FlashInferAttention:
    """The lane's attention, with the step begun."""
    attend = FlashInferAttention(capacity, kv, step, arena(capacity), modules(capacity, kv.dtype))  # type: ignore[arg-type]
    attend.begin(step.rows)
    return attend


def cache(capacity: AttentionCapacity, pages: int, layers: int, dtype: torch.dtype) -> torch.Tensor:
    step = capacity.step
    shape = (pages, layers, 2, step.page_size, step.kv_heads, step.head_dim)
    return torch.randn(shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(7))


def decode_rows(*lengths: int) -> StepRows:
    return StepRows(np.array(lengths, np.int64), NO_ROWS, NO_ROWS)


def chunk_rows(*pairs: tuple[int, int], decode: tuple[int, ...] = ()) -> StepRows:
    """Chunks by tokens and length of their rows, behind decode rows by length."""
    tokens, lengths = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    return StepRows(np.array(decode, np.int64), tokens, lengths)


def random_queries(capacity: AttentionCapacity, step: Step, dtype: torch.dtype) -> torch.Tensor:
    tokens = len(step.rows.decode_lengths) + int(step.rows.chunk_tokens.sum())
    return torch.randn(tokens, capacity.step.heads, capacity.step.head_dim, device="cuda", dtype=dtype)


def reference(step: Step, kv: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Attention in float64."""
    heads, outputs, at = queries.shape[1], [], 0
    counts = [*[1] * len(step.rows.decode_lengths), *step.rows.chunk_tokens.tolist()]
    lengths = [*step.rows.decode_lengths.tolist(), *step.rows.chunk_lengths.tolist()]
    for count, length, pages in zip(counts, lengths, step.lists, strict=True):
        k, v = (kv[pages, 0, part].flatten(0, 1)[:length].double() for part in (0, 1))
        k, v = (tensor.repeat_interleave(heads // k.shape[1], 1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries[at : at + count].double(), k) / queries.shape[-1] ** 0.5
        seen = torch.arange(length, device="cuda") <= torch.arange(length - count, length, device="cuda")[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        at += count
    return torch.cat(outputs)


def error_of(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


def seconds(run: Layer, layers: int, replays: int) -> float:
    """Median seconds a layer over replays of a graph of all layers."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / layers)
    return float(statistics.median(times))


@dataclass
class Bench:
    """A step over a cache of several layers, together several times the L2 cache."""

    capacity: AttentionCapacity
    rows: StepRows
    replays: int

    def __post_init__(self) -> None:
        step = self.capacity.step
        lengths = [*self.rows.decode_lengths, *self.rows.chunk_lengths]
        pool = int(sum(-(-length // step.page_size) for length in lengths)) + 2
        page_bytes = 2 * step.page_size * step.kv_heads * step.head_dim * 2
        self.layers = min(64, max(2, -(-400_000_000 // (pool * page_bytes))))
        self.kv = cache(self.capacity, pool, self.layers, torch.bfloat16)
        self.step = make_step(self.capacity, self.rows, pool, seed=2)
        self.queries = random_queries(self.capacity, self.step, torch.bfloat16)
        self.out = torch.empty_like(self.queries)
        self.attend = attention(self.capacity, self.kv, self.step)

    def own(self, layer: int) -> None:
        self.attend(layer, self.queries, self.out)

    def time(self, run: Layer) -> float:
        return seconds(run, self.layers, self.replays)
