"""Checks the attention plans on a GPU: one JSON line for each result, exit code 1 if one is not ok.

    python -m tests.gpu.check_plan [--only equal,numbers,...] [--head-dim 128] [--replays 10] [--dtypes bfloat16]

equal     FlashInfer's own plans and this project's, on a few shapes
numbers   decode rows and chunks against float64, with shared prefixes, so that page lists exceed the pool
pointers  addresses after 1,000 updates of random steps, and allocations meanwhile
plan      CPU time of planning a decode step of 1 to 256 rows (bar: 100 us)
exceeded  each dimension of a step exceeded by one: the error, what is left of it, and the steps that follow
poison    caches with NaN wherever no row has written
skew      one 32k row among 63 of 1k: attention time against the same KV spread evenly (bar: 1.3)
speed     decode attention against FlashInfer's wrappers in interleaved pairs (bar: 1.03)
xqa       XQA against float64 and against FA2: where `policy.uses_xqa` should say yes
chunks    FA3 against FA2 on chunks of 64 to 2048 tokens: where `policy.chunk_kernel` should change

The results go to tests/gpu/results, in a file named after head dim and checks. A fault that stops the card stops what
follows: run the checks one by one where that must not happen.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from engine.cuda.attention_plan import StepRows
from engine.cuda.flashinfer_raw import installed_version, signatures
from engine.cuda.policy import chunk_kernel
from engine.cuda.self_check import check_planner
from engine.cuda.xqa import XqaDecode
from tests.gpu.harness import Results
from tests.gpu.plan_limits import check_exceeded, check_plan_time, check_poison
from tests.gpu.plan_steps import (
    GROUPS,
    XQA_CANDIDATES,
    Bench,
    Layer,
    arena,
    attention,
    cache,
    chunk_rows,
    decode_rows,
    error_of,
    facts,
    make_step,
    modules,
    random_queries,
    reference,
    shapes,
)

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
        for dtype in args.dtypes:
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
        launches.add((launch.split, *(launch.info[place] for place in places)))
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    # Whole rows have a plan of their own, which never changes.
    ok = len(launches) == len({launch[0] for launch in launches}) and allocations == 0
    results.emit("pointers", updates=1000, places=len(launches), allocations=allocations, ok=ok)


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
                    ok=worst <= 1.03,
                )
                del bench
                torch.cuda.empty_cache()


def check_xqa(results: Results, args: argparse.Namespace) -> None:
    for whole in shapes(args.head_dim):
        if not whole.sm90 or whole.shape.group not in XQA_CANDIDATES[args.head_dim]:
            continue
        capacity = replace(whole, xqa=True)
        module = modules(capacity, torch.bfloat16).get("xqa")
        if module is None:
            results.emit("xqa", **facts(capacity), skipped="the module is not prebuilt, and there is no nvcc")
            continue
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
        for cached in (0, 512, 1024, 4096):
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
    "plan": check_plan_time,
    "exceeded": check_exceeded,
    "poison": check_poison,
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
    parser.add_argument("--dtypes", default="bfloat16", help="of numbers and poison; float16 compiles modules")
    args = parser.parse_args()
    args.dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]
    every = args.only == parser.get_default("only")
    results = Results(f"plan-{args.head_dim}" if every else f"plan-{args.head_dim}-{args.only.replace(',', '-')}")
    for name in args.only.split(","):
        with results.part(name):
            CHECKS[name](results, args)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
