"""Quick checks of a GPU host: kernels against torch, a lane built and stepped, step times.

python -m tests.gpu.smoke [--shape qwen3-4b]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from engine.config import CoreConfig
from engine.cuda.decoder import FusedOps, TorchOps
from engine.cuda.lane import CudaLane, create_cuda_lane
from engine.kernels.rope_append import rope_append, rope_append_reference
from engine.messages import Sampling
from engine.step import Chunk, RowStart, StepPlan
from kv.table import TableUpdate
from tests.gpu.harness import Results
from tests.gpu.shaped import write_config


def check_kernels(results: Results) -> None:
    """The append kernel and the fused operations against plain torch."""
    for heads, kv_heads, head_dim, page_size in ((32, 8, 128, 16), (40, 8, 128, 64), (24, 4, 256, 16), (9, 3, 64, 64)):
        for dtype in (torch.bfloat16, torch.float16):
            tokens = 65
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
            kv = torch.randn(9, 3, 2, page_size, kv_heads, head_dim, device="cuda").to(dtype)
            slots = torch.randperm(9 * page_size, device="cuda")[:tokens]
            rest = {
                "cos_sin": torch.randn(4096, head_dim, device="cuda"),
                "positions": torch.randint(0, 4096, (tokens,), device="cuda", dtype=torch.int32),
                "slots": slots,
                "q_weight": torch.randn(head_dim, device="cuda").to(dtype),
                "k_weight": torch.randn(head_dim, device="cuda").to(dtype),
                "eps": 1e-6,
            }
            outs = []
            for compute in (rope_append, rope_append_reference):
                cache, queries = kv.clone(), torch.empty(tokens, heads, head_dim, device="cuda", dtype=dtype)
                compute(qkv, queries, cache, 1, **rest)
                outs.append((queries, cache))
            close = [torch.allclose(a.float(), b.float(), rtol=1.6e-2, atol=1e-2) for a, b in zip(*outs, strict=True)]
            shape = f"{heads}/{kv_heads} dim {head_dim} page {page_size} {dtype}"
            results.emit(f"rope_append {shape}", ok=all(close), close=close)


def check_ops(results: Results) -> None:
    """FlashInfer's norms and activation against plain torch."""
    fused, plain = FusedOps(), TorchOps()
    inputs, residual = (torch.randn(33, 2560, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(2560, device="cuda", dtype=torch.bfloat16)
    pairs = []
    for ops in (fused, plain):
        normed = torch.empty_like(inputs)
        ops.rms_norm(inputs, weight, 1e-6, normed)
        mine, rest = inputs.clone(), residual.clone()
        ops.add_rms_norm(mine, rest, weight, 1e-6)
        active = torch.empty(33, 1280, device="cuda", dtype=torch.bfloat16)
        ops.silu_and_mul(inputs, active)
        pairs.append((normed, mine, rest, active))
    close = [torch.allclose(a.float(), b.float(), rtol=1.6e-2, atol=1e-2) for a, b in zip(*pairs, strict=True)]
    results.emit("fused operations", ok=all(close), close=close)


def time_decode(results: Results, lane: CudaLane, rows: int, length: int) -> None:
    """Median time of a decode step of `rows` rows at `length` tokens, launched one after another and collected."""
    pages = -(-(length + 64) // lane.geometry.page_size)
    starts = [RowStart(row, Sampling()) for row in range(rows)]
    table = [TableUpdate(row, index, 1 + row * pages + index) for row in range(rows) for index in range(pages)]
    times = []
    for step in range(30):
        plan = StepPlan(
            step, starts if not step else [], table if not step else [], list(range(rows)), [length + step] * rows, []
        )
        began = time.perf_counter()
        handle = lane.executor.launch(plan)
        launched = time.perf_counter()
        lane.executor.collect(handle)
        times.append((time.perf_counter() - began, launched - began))
    total, launch = (1e3 * statistics.median(column) for column in zip(*times[5:], strict=True))
    results.emit(f"decode step, {rows} rows of {length} tokens", step_ms=total, launch_ms=launch, ok=True)


def time_prefill(results: Results, lane: CudaLane, tokens: int) -> None:
    """Median time of a step with one chunk of `tokens` tokens."""
    pages = -(-tokens // lane.geometry.page_size)
    table = [TableUpdate(0, index, 1 + index) for index in range(pages)]
    times = []
    for step in range(6):
        plan = StepPlan(step, [RowStart(0, Sampling())], table, [], [], [Chunk(0, 0, [5 + step] * tokens, True)])
        began = time.perf_counter()
        lane.executor.collect(lane.executor.launch(plan))
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[1:])
    results.emit(f"prefill step of {tokens} tokens", step_ms=1e3 * seconds, tokens_per_s=tokens / seconds, ok=True)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-4b")
    arguments = parser.parse_args()
    results = Results("smoke")
    with results.part("kernels"):
        check_kernels(results)
    with results.part("operations"):
        check_ops(results)
    with results.part("lane"), tempfile.TemporaryDirectory() as folder:
        directory = write_config(arguments.shape, Path(folder))
        config = CoreConfig(
            model=str(directory), load_format="dummy", max_bucket=256, max_step_tokens=2048, context_limit=8192
        )
        lane = create_cuda_lane(config, directory)
        results.emit(
            "lane built",
            line=lane.load_line("none"),
            memory=lane.report.as_dict(),
            seconds=lane.seconds,
            free_bytes=torch.cuda.mem_get_info()[0],
            total_bytes=lane.card_bytes,
            reserved=torch.cuda.memory_reserved(),
            ok=lane.capacity.usable_pages > 0,
        )
        for rows in (1, 16, 64, 256):
            with results.part(f"decode {rows}"):
                time_decode(results, lane, rows, 1088)
        for tokens in (256, 2048):
            with results.part(f"prefill {tokens}"):
                time_prefill(results, lane, tokens)
    results.emit("summary", failed=results.failed)


if __name__ == "__main__":
    main()
