"""Checks the attention plans on a GPU: one JSON line for each result, exit code 1 if one is not ok.

    python -m tests.gpu.check_plan [--only equal,numbers,pointers,skew,speed,xqa,chunks] [--head-dim 128] [--replays 10]

equal     FlashInfer's own plans and this project's, on a few shapes
numbers   decode rows and chunks against float64, with shared prefixes, so that page lists exceed the pool
pointers  addresses after 1,000 updates of random steps, and allocations meanwhile
skew      one 32k row among 63 of 1k: attention time against the same KV spread evenly (bar: 1.3)
speed     decode attention against FlashInfer's wrappers in interleaved pairs (bar: 1.03); time of the plan (100 us)
xqa       XQA against float64 and against FA2: where `policy.uses_xqa` should say yes
chunks    FA3 against FA2 on chunks of 64 to 2048 tokens: where `policy.chunk_kernel` should change
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from engine.cuda.attention import FlashInferAttention, load_modules
from engine.cuda.attention_plan import StepRows
from engine.cuda.flashinfer_raw import ModuleNeeds, installed_version, signatures
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.cuda.policy import XQA_GROUPS, chunk_kernel
from engine.cuda.self_check import check_planner
from engine.cuda.xqa import XqaDecode
from engine.plan import PlanCapacity
from tests.gpu.harness import Results

GROUPS = {64: [(9, 3)], 128: [(32, 8), (40, 8), (20, 4)], 256: [(24, 4), (16, 4)]}
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


STEPS = {
    "decode whole": decode_rows(*[1500] * 48),
    "decode split": decode_rows(5000, 700, 3),
    "decode skewed": decode_rows(*[900] * 40, 20000),
    "decode short": decode_rows(*[1000] * 8),
    "chunks wide": chunk_rows((700, 700), (300, 2000), (129, 1290), decode=(800,) * 6),
    "chunk narrow": chunk_rows((40, 6000), decode=(4000, 30)),
    "one chunk": chunk_rows((17, 17)),
}


def check_equal(results: Results, args: argparse.Namespace) -> None:
    for capacity in shapes(args.head_dim):
        count = check_planner(signatures(installed_version()), modules(capacity, torch.bfloat16)["fa2"], capacity.shape)
        results.emit("equal", **facts(capacity), plans=count, ok=True)


def check_numbers(results: Results, args: argparse.Namespace) -> None:
    for capacity in shapes(args.head_dim):
        pool = 36000 // capacity.step.page_size
        for dtype in (torch.bfloat16, torch.float16):
            kv = cache(capacity, pool, 1, dtype)
            for name, rows in STEPS.items():
                shortest = int(min([*rows.decode_lengths, *rows.chunk_lengths]))
                step = make_step(capacity, rows, pool, seed=len(name), shared=shortest // capacity.step.page_size)
                attend, queries = attention(capacity, kv, step), random_queries(capacity, step, dtype)
                first, again = (torch.full_like(queries, float("nan")) for _ in range(2))
                attend(0, queries, first)
                attend(0, queries, again)
                error, same = error_of(first, reference(step, kv, queries)), bool(torch.equal(first, again))
                results.emit(
                    "numbers",
                    step=name,
                    **facts(capacity),
                    dtype=str(dtype),
                    kernels=[(part.kernel, part.split) for part in attend.plans.current if part is not None],
                    listed_pages=sum(map(len, step.lists)),
                    pool=pool,
                    error=error,
                    repeatable=same,
                    ok=error < 6e-3 and same,
                )


def check_pointers(results: Results, args: argparse.Namespace) -> None:
    capacity = shapes(args.head_dim)[0]
    kv = cache(capacity, 3000, 1, torch.bfloat16)
    attend = attention(capacity, kv, make_step(capacity, decode_rows(5), 3000, seed=1))
    rng = np.random.default_rng(3)
    launches: set[tuple[int, ...]] = set()
    places = (4, 5, 6, 8, 9)  # of request, query and KV tile indices, o_indptr and chunk size
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(1000):
        decode, chunks = int(rng.integers(1, 200)), int(rng.integers(0, 6))
        tokens = rng.integers(1, 1000, chunks)
        lengths = tokens + rng.integers(0, 30000, chunks)
        launch = attend.plans.update(StepRows(rng.integers(1, 40001, decode), tokens, lengths)).decode
        assert launch is not None
        launches.add(tuple(launch.info[place] for place in places))
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    ok = len(launches) == 1 and allocations == 0
    results.emit("pointers", updates=1000, places=len(launches), allocations=allocations, ok=ok)


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

    def plan_us(self) -> float:
        """Median microseconds of planning the step, the device idle."""
        times = []
        for _ in range(50):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.attend.begin(self.rows)
            times.append(time.perf_counter() - began)
        return 1e6 * statistics.median(times)


def check_skew(results: Results, args: argparse.Namespace) -> None:
    for capacity in shapes(args.head_dim):
        even = Bench(capacity, decode_rows(*[95 * 1024 // 64] * 64), args.replays)
        skewed = Bench(capacity, decode_rows(*[1024] * 63, 32 * 1024), args.replays)
        ratios = [skewed.time(skewed.own) / even.time(even.own) for _ in range(5)]
        ratio = statistics.median(ratios)
        results.emit("skew", **facts(capacity), us=1e6 * skewed.time(skewed.own), ratios=ratios, ok=ratio <= 1.3)


def wrappers(bench: Bench) -> dict[str, Layer]:
    """FlashInfer's decode wrapper on tensor cores and its prefill wrapper on FA2, planned for the step."""
    import flashinfer

    step, kv, device = bench.capacity.step, bench.kv, bench.step.device
    lists = (device["page_indptr"].cpu(), device["page_indices"], device["last_page_len"].cpu())
    dims = (step.heads, step.kv_heads, step.head_dim, step.page_size)
    kinds = {"q_data_type": kv.dtype, "kv_data_type": kv.dtype}
    spaces = [torch.zeros(512 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(spaces[0], "NHD", use_tensor_cores=True, backend="fa2")
    decode.plan(*lists, *dims, **kinds)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(spaces[1], "NHD", backend="fa2")
    prefill.plan(torch.arange(len(bench.queries) + 1, dtype=torch.int32), *lists, *dims, causal=True, **kinds)
    return {
        "decode_tc": lambda layer: decode.run(bench.queries, kv[:, layer], out=bench.out),
        "prefill_fa2": lambda layer: prefill.run(bench.queries, kv[:, layer], out=bench.out),
    }


def check_speed(results: Results, args: argparse.Namespace) -> None:
    for capacity in shapes(args.head_dim):
        for length in (1024, 4096):
            for rows in (1, 4, 16, 32, 64, 128, 256):
                bench = Bench(capacity, decode_rows(*[length] * rows), args.replays)
                plan_us = bench.plan_us()
                pairs = {
                    name: [(bench.time(bench.own), bench.time(run)) for _ in range(3)]
                    for name, run in wrappers(bench).items()
                }
                worst = max(statistics.median(own / other for own, other in times) for times in pairs.values())
                launch = bench.attend.plans.current.decode
                results.emit(
                    "speed",
                    **facts(capacity),
                    rows=rows,
                    length=length,
                    split=launch is not None and launch.split,
                    pairs_us={name: [[1e6 * x for x in pair] for pair in times] for name, times in pairs.items()},
                    worst=worst,
                    plan_us=plan_us,
                    ok=worst <= 1.03 and plan_us <= 100,
                )
                del bench
                torch.cuda.empty_cache()


def check_xqa(results: Results, args: argparse.Namespace) -> None:
    for whole in shapes(args.head_dim):
        if whole.shape.group not in XQA_GROUPS[args.head_dim]:
            continue
        capacity = replace(whole, xqa=True)
        module = modules(capacity, torch.bfloat16)["xqa"]
        for length in (512, 1024, 2048, 4096):
            for rows in (1, 4, 8, 16, 32, 64):
                bench = Bench(whole, decode_rows(*[length] * rows), args.replays)
                xqa = XqaDecode(capacity, signatures(installed_version()), module, arena(capacity))
                xqa.begin(bench.step.device["block_table"], bench.step.staged["row_slots"])
                lengths = bench.step.staged["lengths"]

                def run(layer: int, bench: Bench = bench, xqa: XqaDecode = xqa, lengths: Any = lengths) -> None:
                    pair = (bench.kv[:, layer, 0], bench.kv[:, layer, 1])
                    xqa.run(bench.queries, pair, lengths, bench.out, pdl=True)

                run(0)
                error = error_of(bench.out, reference(bench.step, bench.kv, bench.queries))
                times = [(bench.time(run), bench.time(bench.own)) for _ in range(3)]
                ratio = statistics.median(mine / other for mine, other in times)
                head_tokens = rows * length * capacity.step.kv_heads
                results.emit(
                    "xqa",
                    **facts(capacity),
                    rows=rows,
                    length=length,
                    head_tokens=head_tokens,
                    us=1e6 * times[0][0],
                    ratio=ratio,
                    error=error,
                    ok=error < 8e-3,
                )
                del bench
                torch.cuda.empty_cache()


def check_chunks(results: Results, args: argparse.Namespace) -> None:
    for capacity in shapes(args.head_dim):
        if not capacity.sm90:
            continue
        for cached in (0, 4096):
            for tokens in (64, 128, 256, 384, 512, 2048):
                rows = chunk_rows((tokens, tokens + cached))
                fa2 = Bench(replace(capacity, sm90=False), rows, args.replays)
                with patch("engine.cuda.attention_plan.chunk_kernel", return_value="fa3"):
                    fa3 = Bench(capacity, rows, args.replays)
                ratio = statistics.median(fa3.time(fa3.own) / fa2.time(fa2.own) for _ in range(3))
                chosen = chunk_kernel(rows.chunk_tokens, capacity.shape)
                row = {"tokens": tokens, "cached": cached, "chosen": chosen, "fa3_to_fa2": ratio}
                results.emit("chunks", **facts(capacity), **row, ok=(ratio if chosen == "fa3" else 1 / ratio) <= 1.1)


CHECKS = {
    "equal": check_equal,
    "numbers": check_numbers,
    "pointers": check_pointers,
    "skew": check_skew,
    "speed": check_speed,
    "xqa": check_xqa,
    "chunks": check_chunks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHECKS))
    parser.add_argument("--head-dim", type=int, default=128, choices=sorted(GROUPS))
    parser.add_argument("--replays", type=int, default=10)
    args = parser.parse_args()
    results = Results(f"plan-{args.head_dim}")
    for name in args.only.split(","):
        with results.part(name):
            CHECKS[name](results, args)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
