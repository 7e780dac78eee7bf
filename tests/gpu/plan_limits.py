"""Attention checks at the edges: the time of a plan, steps beyond a capacity, and caches full of what is not finite."""

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch

from engine.cuda.attention import FlashInferAttention
from engine.cuda.attention_plan import StepRows
from engine.cuda.inputs import step_rows
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from tests.exceeded import ENOUGH, NEXT, Card, Heads, PlanningLane, capacity_of, excesses, plan_of, refusal
from tests.exceeded import step_capacity as small_capacity
from tests.gpu.harness import Results
from tests.gpu.plan_steps import (
    GROUPS,
    XQA_CANDIDATES,
    Step,
    arena,
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

PLAN_BAR_US = 100.0
_REPEATS = 400


def check_plan_time(results: Results, args: argparse.Namespace) -> None:
    """Microseconds of CPU from the rows of a step to its queued copy, the device idle and every cache cold."""
    rng = np.random.default_rng(1)
    for capacity in shapes(args.head_dim):
        kv = cache(capacity, 2, 1, torch.bfloat16)
        step = make_step(capacity, decode_rows(5), 2, seed=1)
        attend = FlashInferAttention(capacity, kv, step, arena(capacity), modules(capacity, kv.dtype))  # type: ignore[arg-type]
        for count in (1, 16, 64, 256):
            lengths = {
                "even": [4096] * count,
                "one long": [512] * (count - 1) + [32768],
                "random": rng.integers(1, 8000, count).tolist(),
            }
            for name, chosen in lengths.items():
                plan = plan_of(dict(enumerate(chosen)))
                times = [(begin_us(attend, step_rows(plan)), rows_us(plan)) for _ in range(_REPEATS)]
                planned, brought = (sorted(column) for column in zip(*times, strict=True))
                launch = attend.plans.current.decode
                row = {"rows": count, "lengths": name, "split": launch is not None and launch.split}
                median = statistics.median(planned)
                results.emit(
                    "plan",
                    **facts(capacity),
                    **row,
                    median_us=median,
                    p99_us=planned[int(0.99 * _REPEATS)],
                    step_rows_us=statistics.median(brought),
                    ok=median <= PLAN_BAR_US,
                )


def begin_us(attend: FlashInferAttention, rows: StepRows) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    attend.begin(rows)
    return 1e6 * (time.perf_counter() - began)


def rows_us(plan: object) -> float:
    began = time.perf_counter()
    step_rows(plan)  # type: ignore[arg-type]
    return 1e6 * (time.perf_counter() - began)


def check_exceeded(results: Results, args: argparse.Namespace) -> None:
    """Each dimension by one: the error, no byte changed, and the attention of the steps that follow."""
    properties = torch.cuda.get_device_properties(0)
    card = Card(properties.multi_processor_count, properties.major == 9)
    for heads in GROUPS[args.head_dim]:
        for page_size in (16, 64):
            step = small_capacity(Heads(*heads, args.head_dim), page_size)
            whole = capacity_of(step, card)
            loaded = modules(whole, torch.bfloat16)

            def lane(capacity: AttentionCapacity, loaded: dict[str, object] = loaded) -> PlanningLane:
                return PlanningLane(capacity, loaded, "cuda", torch.bfloat16)

            for excess in excesses(whole):
                with results.part(f"exceeded: {excess.dimension}"):
                    value = excess.value
                    if value is None:
                        value = refusal(lane(capacity_of(step, card, excess.tight, ENOUGH)), excess).value
                    tried = lane(capacity_of(step, card, excess.tight, value - 1))
                    error = refusal(tried, excess)
                    errors = {name: tried.error(plan) for name, plan in NEXT.items()}
                    named = (error.dimension, error.value, error.limit) == (excess.dimension, value, value - 1)
                    results.emit(
                        "exceeded",
                        **facts(whole),
                        bucket=excess.bucket,
                        message=str(error),
                        errors_after=errors,
                        ok=named and max(errors.values()) < 6e-3,
                    )


POISONED = {
    "decode whole": (decode_rows(*range(1490, 1538)), "fa2", False),
    "decode split": (decode_rows(5003, 701, 3), "fa2", True),
    "chunks on FA2": (chunk_rows((40, 6001), (17, 17), (9, 300)), "fa2", True),
    "chunks on FA3": (chunk_rows((900, 900), (300, 2001), (129, 1291)), "fa3", False),
    "decode on XQA": (decode_rows(*range(1001, 1009)), "xqa", False),
}
"""Steps whose rows end within a page, and the launch (kernel, split) that they are to have."""


def check_poison(results: Results, args: argparse.Namespace) -> None:
    """NaN behind the end of every row, in all pages that no row lists, and in the partial results of earlier steps."""
    for whole in shapes(args.head_dim):
        pool = 100_000 // whole.step.page_size
        for dtype in args.dtypes:
            kv = cache(whole, pool, 1, dtype)
            for name, (rows, kernel, split) in POISONED.items():
                with_xqa = whole.sm90 and whole.shape.group in XQA_CANDIDATES[args.head_dim]
                if kernel == "xqa" and not with_xqa:
                    continue
                capacity = replace(whole, xqa=kernel == "xqa", sm90=whole.sm90 and name != "chunks on FA2")
                forced = patch("engine.cuda.attention_plan.uses_xqa", return_value=True)
                with results.part(f"poison: {name}"), forced:
                    row = {"step": name, **facts(capacity), "dtype": str(dtype)}
                    if capacity.xqa and "xqa" not in modules(capacity, dtype):
                        results.emit("poison", **row, skipped="XQA's module is not here")
                        continue
                    case = Poison(capacity, kv, make_step(capacity, rows, pool, seed=len(name)))
                    clean, launch = case.attend(0.0)
                    poisoned, _ = case.attend(float("nan"))
                    same, finite = bool(torch.equal(clean, poisoned)), bool(poisoned.isfinite().all())
                    error = error_of(clean, reference(case.step, kv, case.queries))
                    ok = None if launch != (kernel, split) else same and finite and error < 8e-3
                    results.emit("poison", **row, launch=launch, equal=same, finite=finite, error=error, ok=ok)


@dataclass
class Poison:
    """A step over a cache whose unwritten slots may be given any value."""

    capacity: AttentionCapacity
    kv: torch.Tensor
    step: Step

    def __post_init__(self) -> None:
        self.queries = random_queries(self.capacity, self.step, self.kv.dtype)

    def attend(self, value: float) -> tuple[torch.Tensor, tuple[str, bool]]:
        """The step's attention, and its kernel and split, with `value` in every slot that no row has written.

        The padding page stays finite, as in a lane.
        """
        memory, layout = arena(self.capacity), AttentionLayout(self.capacity)
        for name, buffer in layout.buffers.items():
            if value != 0 and name.endswith(("_partials", "_lse", "_scratch")):
                memory[buffer.offset : buffer.offset + buffer.nbytes] = 255
        loaded = modules(self.capacity, self.kv.dtype)
        attend = FlashInferAttention(self.capacity, self._filled(value), self.step, memory, loaded)  # type: ignore[arg-type]
        attend.begin(self.step.rows)
        out = torch.full_like(self.queries, torch.nan)
        attend(0, self.queries, out)
        part = attend.plans.current.decode or attend.plans.current.chunks
        assert part is not None
        return out, (part.kernel, part.split)

    def _filled(self, value: float) -> torch.Tensor:
        page_size, kv = self.capacity.step.page_size, self.kv
        filled = torch.full_like(kv, value)
        filled[0] = 0
        for pages, length in zip(self.step.lists, self.step.staged["lengths"].tolist(), strict=True):
            last = length - (len(pages) - 1) * page_size
            filled[pages[:-1]] = kv[pages[:-1]]
            filled[pages[-1], :, :, :last] = kv[pages[-1], :, :, :last]
        return filled
