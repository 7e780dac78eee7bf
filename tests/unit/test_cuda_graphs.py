"""Decode steps in buckets, on a CPU: which steps are replayed, what padding rows touch, what is reported."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cuda.attention_plan import AttentionPlans, StepRows
from engine.cuda.flashinfer_raw import signatures
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.cuda.staging import HostDevice
from engine.ladder import Ladder, LadderError
from engine.messages import Sampling
from engine.plan import PlanCapacity
from engine.step import StepPlan
from tests import golden
from tests.cuda_on_cpu import CudaDriver, cuda_lane_on_cpu, plain_choice
from tests.models import tiny_model

NONE = np.zeros(0, np.int64)


@pytest.fixture(autouse=True)
def _cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "Driver", CudaDriver)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_choice(monkeypatch)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", group=3)


def started(directory: Path, rows: int, buckets: str | None, **sampling: float) -> CudaDriver:
    """A driver whose `rows` rows, in slots 7, 6, ..., have prompts of 9, 14, ... tokens behind them."""
    lane = cuda_lane_on_cpu(directory, buckets=buckets)
    driver = CudaDriver(lane)
    driver.lane = lane
    for place in range(rows):
        row = driver.start(7 - place, sampling=Sampling(**sampling))
        driver.prefill(row, list(range(20 + place, 29 + 6 * place)), 100)
    return driver


def test_the_default_ladder_doubles_to_8_and_then_takes_every_8_rows() -> None:
    assert Ladder.of(20) == (1, 2, 4, 8, 16, 20)
    assert Ladder.of(256)[-3:] == (240, 248, 256)
    assert [Ladder.of(most) for most in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]
    assert [Ladder.of(20).bucket(rows) for rows in (1, 3, 5, 9, 17)] == [1, 4, 8, 16, 20]
    assert Ladder.of(16, "4, 1,4") == (1, 4, 16)


@pytest.mark.parametrize("buckets", ["0", "17", "4,x", "", "1,,2", "-1", "9" * 5000])
def test_a_ladder_that_cannot_be_is_refused_with_the_way_out(buckets: str) -> None:
    with pytest.raises(LadderError, match=r"graph_buckets.*but"):
        Ladder.of(16, buckets)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.usefixtures("greedy")
def test_tokens_and_logits_in_buckets_are_those_of_transformers(directory: Path, page_size: int) -> None:
    model = golden.reference_model(directory)
    prompts = torch.randint(5, 320, (3, 81), generator=torch.Generator().manual_seed(3)).tolist()
    sizes = (81, 16, 37)
    expected = [golden.reference(model, prompt[:size], 10) for prompt, size in zip(prompts, sizes, strict=True)]
    lane = cuda_lane_on_cpu(directory, buckets="2,5")
    golden.check_batched(lane, expected, chunk=32)
    assert lane.reruns.replayed > 8


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.usefixtures("greedy")
def test_rows_in_a_bucket_get_the_tokens_they_get_without(directory: Path, rows: int) -> None:
    texts = []
    for buckets in (None, "1,4,6"):
        driver = started(directory, rows, buckets)
        results = [driver.step(list(driver.rows.values())) for _ in range(10)]
        texts.append([driver.rows[slot].tokens for slot in sorted(driver.rows)])
        padding = int(rows == 5) if buckets else 0
        assert {(len(result.tokens), result.padding_tokens) for result in results} == {(rows, padding)}
        assert driver.lane.reruns.replayed == (10 if buckets else 0)
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("greedy")
def test_padding_rows_write_page_0_alone_and_capture_touches_no_other(directory: Path) -> None:
    driver = started(directory, 5, "8")
    kv, inputs = driver.lane.kv, driver.executor.inputs
    rows = list(driver.rows.values())
    driver.step(rows)
    kept, table = kv.clone(), inputs.device["block_table"].clone()
    driver.step(rows)
    changed = (kv != kept).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert set(changed) <= {0, *(row.pages[-1] for row in rows)}
    assert torch.equal(table, inputs.device["block_table"])
    assert not table[-1].any()
    assert not inputs.staged["lengths"][8:].any()
    fresh = cuda_lane_on_cpu(directory, buckets="1,2,4").kv
    assert fresh[0].any()
    assert not fresh[1:].any()


@pytest.mark.usefixtures("greedy")
def test_steps_with_chunks_run_without_a_graph(directory: Path) -> None:
    driver = started(directory, 2, "1,2,4")
    row = driver.start(0)
    driver.prefill(row, list(range(30, 60)), 10, list(driver.rows.values())[:2])
    assert driver.lane.reruns.replayed == 0
    driver.step(list(driver.rows.values()))
    assert driver.lane.reruns.replayed == 1


def test_rows_that_draw_get_the_tokens_they_get_without_a_bucket(directory: Path) -> None:
    texts = []
    for buckets in (None, "3"):
        driver = started(directory, 2, buckets, temperature=1.3, top_k=30, top_p=0.9, seed=(1 << 63) + 5)
        for _ in range(4):
            driver.step(list(driver.rows.values()))
        texts.append([row.tokens for row in driver.rows.values()])
        assert driver.lane.reruns.replayed == (4 if buckets else 0)
    assert texts[0] == texts[1]
    assert len({token for text in texts[0] for token in text}) > 4


@pytest.mark.usefixtures("greedy")
def test_rows_that_are_not_finite_are_named_in_a_bucket_and_the_others_are_not(directory: Path) -> None:
    driver = started(directory, 5, "8")
    driver.executor.parts.decoder.parts.weights.embedding[300] = torch.nan
    driver.force(driver.rows[5], 300)
    assert driver.step(list(driver.rows.values())).failed_rows == {5}
    assert driver.lane.reruns.replayed == 1


@pytest.mark.usefixtures("greedy")
def test_a_row_too_few_in_the_bucket_goes_red(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for wrong in (False, True):
        driver = started(directory, 5, "1,4,6")
        if wrong:
            monkeypatch.setattr(Ladder, "bucket", lambda self, rows: self[self.index(6) - 1] if rows == 5 else 1)
        try:
            driver.step(list(driver.rows.values()))
            driver.step(list(driver.rows.values()))
            texts.append([row.tokens for row in driver.rows.values()])
        except (ValueError, RuntimeError, KeyError) as error:
            texts.append(error)
    assert texts[0] != texts[1]


@pytest.mark.usefixtures("greedy")
def test_results_of_steps_in_flight_do_not_mix(directory: Path) -> None:
    driver = started(directory, 3, "4")
    alone = started(directory, 3, None)
    want = [alone.step(list(alone.rows.values())).tokens for _ in range(6)]
    rows = list(driver.rows.values())
    handles, got = [], []
    for _ in range(6):
        for row in rows:
            driver.grow(row, row.length + 1)
            row.length += 1
        plan = StepPlan(0, [], driver._table, [row.slot for row in rows], [row.length for row in rows], [])
        driver._table = []
        handles.append(driver.executor.launch(plan))
        if len(handles) == 3:
            got.append(driver.executor.collect(handles.pop(0)).tokens)
    got += [driver.executor.collect(handle).tokens for handle in handles]
    assert got == want


def plans(**changes: int) -> AttentionPlans:
    settings = {"max_bucket": 256, "max_step_tokens": 2048, "context_limit": 40960, "page_size": 16}
    step = PlanCapacity(**{**settings, **changes}, heads=32, kv_heads=8, head_dim=128)
    layout = AttentionLayout(AttentionCapacity(step, 132, sm90=True, xqa=False))
    return AttentionPlans(layout, signatures("0.6.18.post1"), HostDevice(layout.nbytes))


@pytest.mark.parametrize("changes", [{}, {"context_limit": 100}, {"page_size": 64}])
def test_probes_show_every_launch_that_steps_of_a_bucket_have(changes: dict[str, int]) -> None:
    made = plans(**changes)
    random = np.random.default_rng(2)
    longest = made.layout.capacity.step.max_context
    for bucket in Ladder.of(256, "1,2,8,24,64"):
        known = set()
        for rows in made.probes(bucket):
            launch = made.update(rows, bucket).decode
            assert launch is not None
            known.add((launch.kernel, launch.split, *launch.info))
        assert len(known) == (2 if longest > 1000 else 1), bucket
        for _ in range(60):
            count = int(random.integers(max(1, bucket // 2), bucket + 1))
            lengths = random.integers(1, int(np.exp(random.uniform(0.8, np.log(longest)))) + 1, count)
            if random.random() < 0.3:
                lengths[0] = longest
            launch = made.update(StepRows(lengths.astype(np.int64), NONE, NONE), bucket).decode
            assert launch is not None
            assert (launch.kernel, launch.split, *launch.info) in known
