"""Lanes on given weights, and drivers that bring cases to them in every way that the gate asks for."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from engine.config import CoreConfig
from engine.cuda.executor import CudaExecutor
from engine.cuda.gpu import CudaGpu
from engine.cuda.lane import Loader, prepare
from engine.models.config import load_model_config
from kv.geometry import KvGeometry
from tests.cuda_on_cpu import CudaDriver
from tests.golden import Row
from tests.gpu.oracle import STEPS, Case


@dataclass(frozen=True, slots=True)
class TestLane:
    """An executor on given weights with a pool of a given size."""

    __test__ = False
    executor: CudaExecutor
    geometry: KvGeometry


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under test: where its configuration is, how its weights come to the card, and the type to compute in."""

    name: str
    directory: Path
    load: Loader
    dtype: torch.dtype = torch.bfloat16
    context_limit: int = 8400
    xqa: bool = False
    """False computes on FA2 what policy gives to XQA."""
    graphs: bool = False
    """Decode steps are replayed as CUDA graphs."""


def build(
    subject: Subject,
    page_size: int,
    *,
    kv_tokens: int = 65536,
    max_bucket: int = 64,
    max_step_tokens: int = 8192,
) -> TestLane:
    """A lane with a pool of `kv_tokens` tokens."""
    # Executor and driver point at each other; what an earlier lane holds goes with them.
    gc.collect()
    torch.cuda.empty_cache()
    config = CoreConfig(
        model=str(subject.directory),
        kv_page_size=page_size,
        max_bucket=max_bucket,
        max_step_tokens=max_step_tokens,
        context_limit=subject.context_limit,
        # The reference's weights lie beside it.
        gpu_memory_utilization=0.97,
    )
    model = load_model_config(subject.directory)
    made = prepare(config, model, subject.dtype, CudaGpu(), subject.load, xqa=subject.xqa)
    executor = made.executor(made.cache(kv_tokens // page_size + 1))
    if subject.graphs:
        made.capture(executor)
    return TestLane(executor, made.geometry)


def driver(lane: TestLane) -> CudaDriver:
    """A fresh driver; it hands out pages from 1 on."""
    return CudaDriver(SimpleNamespace(executor=lane.executor, geometry=lane.geometry))


def _follow(drive: CudaDriver, rows: Sequence[Row], cases: Sequence[Case]) -> None:
    """Decode all rows together along their forced tokens, until each has predicted `STEPS` times."""
    while running := [(row, case) for row, case in zip(rows, cases, strict=True) if len(row.logits) < STEPS]:
        for row, case in running:
            drive.force(row, case.forced[len(row.logits) - 1])
        drive.step([row for row, _ in running])


def _result(row: Row) -> Tensor:
    return torch.stack(row.logits[:STEPS]).log_softmax(-1)


def alone(lane: TestLane, cases: Sequence[Case], chunk: int) -> list[Tensor]:
    """Each case by itself, cold, its prompt in chunks of `chunk` tokens."""
    results = []
    for case in cases:
        drive = driver(lane)
        row = drive.start(0)
        drive.prefill(row, case.prompt, chunk)
        _follow(drive, [row], [case])
        results.append(_result(row))
    return results


def warm(lane: TestLane, cases: Sequence[Case]) -> list[Tensor]:
    """Each case on the pages of a row that computed the same prompt and goes on decoding beside it."""
    results = []
    for case in cases:
        drive = driver(lane)
        owner = drive.start(1)
        drive.prefill(owner, case.prompt, 8192)
        row = drive.start(0, owner.pages[: (len(case.prompt) - 1) // drive.page_size])
        drive.prefill(row, case.prompt, 8000, [owner])
        _follow(drive, [row, owner], [case, case])
        results.append(_result(row))
    return results


def shared(lane: TestLane, cases: Sequence[Case], prefix: int, chunk: int) -> list[Tensor]:
    """As `batched`, on the pages of one row that computed the first `prefix` tokens, which all prompts share."""
    drive = driver(lane)
    owner = drive.start(len(cases))
    drive.prefill(owner, cases[0].prompt[:prefix], 1024)
    return batched(lane, cases, chunk, drive, owner.pages)


def batched(
    lane: TestLane, cases: Sequence[Case], chunk: int, drive: CudaDriver | None = None, pages: Sequence[int] = ()
) -> list[Tensor]:
    """All cases together: each prompt in chunks beside the decode rows of those before it, then all decode."""
    drive = drive or driver(lane)
    rows: list[Row] = []
    for slot, case in enumerate(cases):
        row = drive.start(slot, pages)
        while row.length < len(case.prompt):
            part = case.prompt[row.length : row.length + chunk]
            running = [(mate, its) for mate, its in zip(rows, cases, strict=False) if len(mate.logits) < STEPS]
            for mate, its in running:
                drive.force(mate, its.forced[len(mate.logits) - 1])
            ends = row.length + len(part) == len(case.prompt)
            drive.step([mate for mate, _ in running], [(row, part, ends)])
        rows.append(row)
    _follow(drive, rows, cases)
    return [_result(row) for row in rows]


def together(lane: TestLane, cases: Sequence[Case]) -> list[Tensor]:
    """All prompts as chunks of one step where they fit it, then all decode."""
    drive = driver(lane)
    rows = [drive.start(slot) for slot in range(len(cases))]
    drive.step([], [(row, case.prompt, True) for row, case in zip(rows, cases, strict=True)])
    _follow(drive, rows, cases)
    return [_result(row) for row in rows]
