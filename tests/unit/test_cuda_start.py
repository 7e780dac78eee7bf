"""The start of a CUDA lane on a CPU: addresses first, graphs over them, memory last, and a report of what is used."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CoreConfig
from engine.cuda import provision
from engine.cuda.executor import CudaExecutor
from engine.cuda.graphs import KINDS
from engine.cuda.kv_memory import SCRATCH_PAGES
from engine.cuda.lane import CudaBuild, CudaLane, create_cuda_lane
from engine.ladder import Ladder
from engine.messages import Sampling
from engine.plan import PlanCapacity, PlanError
from engine.step import Chunk, RowStart, StepPlan
from kv.budget import KvBudgetError
from kv.table import TableUpdate
from tests.cuda_on_cpu import CudaDriver, plain_choice
from tests.fake_gpu import GRANULE, MIB, FakeGpu, driven, stand_in
from tests.models import tiny_model

SETTINGS: dict[str, Any] = {"max_bucket": 2, "max_step_tokens": 24, "context_limit": 128}
GRAPHS = len(KINDS) * len(Ladder.of(2))
TOKEN = 2 * 2 * 16 * 4
"""Bytes of a token of the tiny model in float32."""
REAL_LENGTHS = provision._lengths


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", layers=1, vocab=261)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed is held elsewhere: the likeliest token will do, without its probability, and few lengths."""
    stand_in(monkeypatch)
    plain_choice(monkeypatch)
    monkeypatch.setattr(provision, "_lengths", lambda capacity: [5])


def start(model: Path, gpu: FakeGpu, **settings: Any) -> CudaLane:
    return create_cuda_lane(CoreConfig(model=str(model), **{**SETTINGS, **settings}), model, gpu=gpu)


def written(lane: CudaLane, prompt: int = 14, tokens: int = 4) -> list[int]:
    """What two rows generate, over several pages."""
    driver = CudaDriver(driven(lane))
    rows = [driver.start(0), driver.start(1)]
    for number, row in enumerate(rows):
        driver.prefill(row, [5 + (7 * index + number) % 250 for index in range(prompt)], 11)
    for _ in range(tokens):
        driver.step(rows)
    return [token for row in rows for token in row.tokens]


def check_report(lane: CudaLane, gpu: FakeGpu) -> None:
    """The parts sum up to what the device shows; what is known beforehand is what was taken."""
    measured, planned = lane.report.measured, lane.report.planned
    assert measured.total == gpu.used()
    assert min(measured.parts.values()) > 0
    assert planned.graphs is planned.context is planned.workspaces is None
    assert {name: size for name, size in planned.parts.items() if name != "kv_pool"}.items() <= measured.parts.items()
    assert 0 <= measured.kv_pool - planned.kv_pool < GRANULE
    assert lane.report.as_dict()["total"] == measured.total


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("utilization", [0.7, 1.0])
def test_the_pool_gets_what_everything_else_leaves(model: Path, page_size: int, utilization: float) -> None:
    gpu = FakeGpu(others=3 * MIB)
    lane = start(model, gpu, kv_page_size=page_size, gpu_memory_utilization=utilization)
    assert [recorder.graphs for recorder in gpu.recorders] == [GRAPHS]
    allowed = int(utilization * gpu.card.memory) - gpu.others
    assert 0 <= allowed - gpu.used() < GRANULE + page_size * TOKEN
    pages = lane.capacity.usable_pages + 1
    assert lane.executor.parts.pages == pages
    cache = lane.memory.kv
    assert not cache[:pages].any()
    assert lane.memory.nbytes == -(-pages * lane.geometry.page_bytes // GRANULE) * GRANULE
    check_report(lane, gpu)
    assert lane.report.measured.context == gpu.CONTEXT
    assert lane.report.measured.graphs == GRAPHS * (gpu.graph_driver + gpu.graph_pool)


def test_a_graph_that_was_captured_over_two_pages_reads_and_writes_all(model: Path) -> None:
    """And does so as one that was captured over the whole pool, when the memory could not come last."""
    first, second = FakeGpu(), FakeGpu(virtual=False)
    lanes = start(model, first), start(model, second)
    assert lanes[0].executor.graphs is not None
    tokens = [lane.capacity.tokens for lane in lanes]
    assert 0 <= tokens[1] - tokens[0] <= GRANULE // TOKEN
    assert written(lanes[0]) == written(lanes[1])
    last = lanes[0].capacity.usable_pages
    lanes[0].memory.kv[last].fill_(1)


def test_without_virtual_memory_graphs_are_captured_twice_and_the_reason_is_logged(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGpu(virtual=False)
    with caplog.at_level(logging.WARNING):
        lane = start(model, gpu)
    assert "captured twice, since the KV cache's memory cannot come last: cuMemGetAllocationGranularity" in caplog.text
    assert [recorder.graphs for recorder in gpu.recorders] == [GRAPHS, GRAPHS]
    assert lane.executor.parts.pages == lane.capacity.usable_pages + 1 == lane.memory.kv.shape[0]
    gpu.cached = lane.memory.kv.nbytes
    assert gpu.used() <= 0.85 * gpu.card.memory


def test_a_lane_without_graphs_reports_none(model: Path) -> None:
    gpu = FakeGpu()
    lane = start(model, gpu, cuda_graphs="off")
    assert gpu.recorders == []
    assert "graphs" not in lane.report.as_dict()
    assert lane.report.measured.total == gpu.used()


def test_everything_that_runs_before_the_pool_has_memory_lies_on_one_page(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake's addresses are poisoned until they have memory, and checked then. Here: steps that ask for more."""
    steps = provision._largest_steps
    seen = []

    def watched(capacity: Any) -> Any:
        for plan in steps(capacity):
            seen.append(plan)
            yield plan

    monkeypatch.setattr(provision, "_largest_steps", watched)
    start(model, FakeGpu())
    assert {update.page for plan in seen for update in plan.table} == {SCRATCH_PAGES - 1}
    assert max(plan.tokens for plan in seen) == SETTINGS["max_step_tokens"]
    assert {len(plan.chunks) for plan in seen} == {0, 1, 2}


def test_lengths_up_to_the_largest_chunk_are_run() -> None:
    def lengths(max_step_tokens: int, context: int) -> list[int]:
        return REAL_LENGTHS(PlanCapacity(2, max_step_tokens, context, 16, 4, 2, 16))

    assert lengths(2048, 300) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert lengths(2048, 8192)[-3:] == [768, 1024, 1536]
    assert lengths(2, 16) == [1]


def test_a_step_on_a_page_without_memory_is_refused_until_there_is(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that wrote there would end the process."""
    step = StepPlan(0, [RowStart(0, Sampling())], [TableUpdate(0, 0, SCRATCH_PAGES)], [], [], [Chunk(0, 0, [1], True)])
    capture = CudaBuild.capture
    early: list[CudaExecutor] = []

    def capturing(build: CudaBuild, executor: CudaExecutor) -> int | None:
        early.append(executor)
        with pytest.raises(PlanError, match="page of row 0 is 2, but at most 1 fit"):
            executor.launch(step)
        return capture(build, executor)

    monkeypatch.setattr(CudaBuild, "capture", capturing)
    lane = start(model, FakeGpu())
    assert early == [lane.executor]
    lane.executor.collect(lane.executor.launch(step))


def test_a_limit_is_the_lanes_own_and_torch_is_held_to_it(model: Path) -> None:
    gpu = FakeGpu(total=200 * MIB, others=50 * MIB)
    lane = start(model, gpu, gpu_memory_limit="48MiB", gpu_memory_utilization=0.9)
    allowed = int(0.9 * 48 * MIB)
    assert 0 <= allowed - gpu.used() < GRANULE + 16 * TOKEN
    assert gpu.caps == [allowed]
    check_report(lane, gpu)


def test_a_limit_beyond_the_card_is_refused_with_both_numbers(model: Path) -> None:
    with pytest.raises(
        KvBudgetError, match=r"gpu_memory_limit is 60MiB \(60 MiB\), but the card has 64 MiB, 8 of them in other proc"
    ):
        start(model, FakeGpu(others=8 * MIB), gpu_memory_limit="60MiB")


def test_a_card_that_is_too_small_is_refused_before_the_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.lane.fill_weights", pytest.fail)
    with pytest.raises(KvBudgetError, match=r"max_step_tokens \+ max_bucket, 26 tokens: .*27 MiB; no setting makes it"):
        start(model, FakeGpu(total=27 * MIB), gpu_memory_utilization=1.0)


def test_a_pool_below_the_floor_is_refused_and_gives_its_addresses_back(model: Path) -> None:
    """Static parts fit, what a run takes on top does not."""
    gpu = FakeGpu()
    gpu.graph_driver = 20 * MIB
    with pytest.raises(KvBudgetError, match=r"gpu_memory_utilization 0.85 of the card's 64 MiB"):
        start(model, gpu)
    assert gpu.closed == 1
    assert gpu.memory is not None
    assert gpu.memory.mapped == {}


def test_memory_that_is_reported_and_refused_ends_the_start_in_words(model: Path) -> None:
    gpu = FakeGpu(hidden=16 * MIB)
    with pytest.raises(KvBudgetError, match=r"cuMemCreate of .* out of memory: the GPU has less memory free than"):
        start(model, gpu)
    assert gpu.closed == 1


def test_torch_running_out_ends_the_start_in_words(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr("engine.cuda.lane.fill_weights", fill)
    with pytest.raises(KvBudgetError, match=r"ran out: CUDA out of memory; lower max_step_tokens"):
        start(model, FakeGpu())
