"""The CUDA executor's own logic, on a CPU: staging, table differences, kernels in the interpreter, sampling."""

from pathlib import Path

import pytest
import torch

from engine.messages import Sampling
from engine.models.families import FAMILIES
from engine.plan import PlanError
from engine.step import Chunk, RowStart, StepPlan
from kv.table import TableUpdate
from tests import golden
from tests.cuda_on_cpu import CudaDriver, KernelOps, cuda_lane_on_cpu
from tests.models import tiny_model


@pytest.fixture(autouse=True)
def _cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "Driver", CudaDriver)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[golden.Reference]]:
    directory = tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", group=3)
    model = golden.reference_model(directory)
    prompts = torch.randint(5, 320, (3, 81), generator=torch.Generator().manual_seed(3)).tolist()
    return directory, [
        golden.reference(model, prompt[:size], 12) for prompt, size in zip(prompts, (81, 16, 37), strict=True)
    ]


@pytest.mark.parametrize("page_size", [16, 64])
def test_tokens_and_logits_are_those_of_transformers(
    qwen3: tuple[Path, list[golden.Reference]], page_size: int
) -> None:
    directory, expected = qwen3
    golden.check_cold(cuda_lane_on_cpu(directory, page_size), expected[0], chunk=30)
    golden.check_warm(cuda_lane_on_cpu(directory, page_size), expected[0])
    golden.check_batched(cuda_lane_on_cpu(directory, page_size), expected, chunk=32)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_append_kernel_computes_what_transformers_does(tmp_path: Path, family: str) -> None:
    directory = tiny_model(tmp_path / "model", family, group=2, rope="llama3")
    expected = golden.reference(golden.reference_model(directory), list(range(5, 45)), 4)
    golden.check_cold(cuda_lane_on_cpu(directory, ops=KernelOps()), expected, chunk=25)


def test_addresses_stay_and_last_entry_of_a_table_place_wins(qwen3: tuple[Path, list[golden.Reference]]) -> None:
    executor = cuda_lane_on_cpu(qwen3[0]).executor
    inputs = executor.inputs
    before = {name: tensor.data_ptr() for name, tensor in (inputs.device | inputs.staged).items()}
    for step in range(5):
        table = [TableUpdate(step, 0, 9), TableUpdate(step, 0, 20 + step)]
        plan = StepPlan(step, [RowStart(step, Sampling())], table, [], [], [Chunk(step, 0, [7] * (step + 1), True)])
        executor.collect(executor.launch(plan))
        assert int(inputs.device["page_indices"][0]) == 20 + step
    assert before == {name: tensor.data_ptr() for name, tensor in (inputs.device | inputs.staged).items()}


def test_a_refused_step_leaves_everything_as_it_was(qwen3: tuple[Path, list[golden.Reference]]) -> None:
    lane = cuda_lane_on_cpu(qwen3[0], pages=16)
    driver, expected = CudaDriver(lane), qwen3[1][1]
    row = driver.start(0)
    driver.prefill(row, expected.prompt, 100)
    inputs = lane.executor.inputs
    kept = {name: tensor.clone() for name, tensor in (inputs.device | inputs.staged).items()}
    for plan in (
        StepPlan(9, [RowStart(0, Sampling(seed=5))], [TableUpdate(0, 0, 16)], [0], [17], []),
        StepPlan(9, [], [TableUpdate(0, 0, 3)], [8], [1], []),
        StepPlan(9, [], [TableUpdate(0, 0, 3)], [], [], [Chunk(1, 0, [320], True)]),
        StepPlan(9, [], [TableUpdate(0, 0, 3)], [], [], [Chunk(1, 0, [1] * 257, True)]),
        StepPlan(9, [], [TableUpdate(0, 0, 3)], [0], [1026], []),
    ):
        with pytest.raises(PlanError):
            lane.executor.launch(plan)
    for name, tensor in (inputs.device | inputs.staged).items():
        assert torch.equal(tensor, kept[name]), name
    driver.follow(row, expected)


def test_drawn_tokens_depend_on_seed_and_position_and_not_on_mates(
    qwen3: tuple[Path, list[golden.Reference]],
) -> None:
    sampling = Sampling(temperature=1.2, top_k=40, top_p=0.95, seed=(1 << 63) + 11)
    texts = []
    for mates in (0, 3):
        driver = CudaDriver(cuda_lane_on_cpu(qwen3[0]))
        others = [driver.start(slot + 1, sampling=Sampling(temperature=0.7, seed=slot)) for slot in range(mates)]
        for slot, other in enumerate(others):
            driver.prefill(other, list(range(20 + slot, 40)), 100)
        row = driver.start(0, sampling=sampling)
        driver.prefill(row, list(range(50, 70)), 100, others)
        for _ in range(8):
            driver.step([row, *others])
        texts.append(row.tokens)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 4


def test_rows_that_are_not_finite_are_named_and_the_others_are_not(qwen3: tuple[Path, list[golden.Reference]]) -> None:
    executor = cuda_lane_on_cpu(qwen3[0]).executor
    embedding = executor.parts.decoder.parts.weights.embedding
    embedding[300] = torch.nan
    chunks = [
        Chunk(slot, 0, tokens, slot != 2) for slot, tokens in ((5, [7] * 9), (1, [8, 300, 8]), (2, [300]), (0, [9]))
    ]
    table = [TableUpdate(chunk.row, 0, 1 + chunk.row) for chunk in chunks]
    starts = [RowStart(chunk.row, Sampling()) for chunk in chunks]
    result = executor.collect(executor.launch(StepPlan(0, starts, table, [], [], chunks)))
    assert result.failed_rows == {1, 2}
    assert len(result.tokens) == 3
    decoded = executor.collect(executor.launch(StepPlan(1, [], [], [5, 0], [10, 2], [])))
    assert decoded.failed_rows == set()
