"""The CPU executor as the scheduler sees it: refusals, stable memory, sampling, accounting."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import memory
from engine.config import CoreConfig
from engine.cpu.arena import Arena
from engine.cpu.lane import CpuLane, create_cpu_lane
from engine.cpu.linear import TUNED_ROWS, Gemm, reserve_scratch
from engine.memory import CgroupFiles, MemoryShortError, host_memory, load_line
from engine.messages import Sampling
from engine.models.files import ModelError
from engine.plan import PlanError
from engine.step import Chunk, RowStart, StepPlan, StepResult
from kv.budget import KvBudgetError, KvCapacity
from kv.geometry import KvGeometry
from kv.table import TableUpdate
from tests import golden
from tests.golden import Driver, Row
from tests.models import tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3", group=2)


@pytest.fixture
def lane(directory: Path) -> CpuLane:
    return golden.lane(directory)


PROMPT = list(range(10, 50))


def greedy(lane: CpuLane, prompt: list[int], count: int, slot: int = 0) -> list[int]:
    driver = Driver(lane)
    row = driver.start(slot)
    driver.prefill(row, prompt, 1000)
    for _ in range(count - 1):
        driver.step([row])
    return row.tokens


def test_a_refused_step_leaves_the_last_plan_intact(lane: CpuLane) -> None:
    greedy(lane, PROMPT, 3)
    arena = lane.executor.parts.plan_arena.memory
    before, pool = arena.clone(), lane.executor.parts.kv.clone()
    start, table = [RowStart(1, Sampling(temperature=1.0))], [TableUpdate(1, 0, 3)]
    pages = lane.capacity.usable_pages + 1
    bad = [
        StepPlan(9, start, table, [1], [lane.servable_length + 2], []),
        StepPlan(9, start, [*table, TableUpdate(1, 1, pages)], [1], [5], []),
        StepPlan(9, start, table, [], [], [Chunk(1, 0, [1] * 1025, True)]),
        StepPlan(9, start, table, [], [], [Chunk(1, 0, [1, 320], True)]),
        StepPlan(9, start, table, [], [], [Chunk(1, 0, [-1], True)]),
    ]
    for plan in bad:
        with pytest.raises(PlanError):
            lane.executor.launch(plan)
        assert torch.equal(arena, before)
        assert torch.equal(lane.executor.parts.kv, pool)


def test_nothing_moves_and_nothing_grows(lane: CpuLane) -> None:
    parts = lane.executor.parts
    tensors = [parts.plan_arena.memory, parts.activations.memory, parts.logits.memory, parts.kv, parts.decoder.cos]
    pointers = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    greedy(lane, PROMPT * 4, 40)
    assert [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors] == pointers


def test_the_padding_page_is_never_written(lane: CpuLane) -> None:
    greedy(lane, PROMPT, 30)
    assert not lane.executor.parts.kv[0].any()
    assert lane.executor.parts.kv.shape[0] == lane.capacity.usable_pages + 1


def test_a_step_without_tokens_still_updates_rows_and_table(lane: CpuLane) -> None:
    plan = StepPlan(0, [RowStart(2, Sampling(top_k=4))], [TableUpdate(2, 1, 7)], [], [], [])
    assert lane.executor.collect(lane.executor.launch(plan)) == StepResult()
    assert lane.executor.parts.plan_arena.array("block_table")[2, 1] == 7
    assert lane.executor.parts.plan_arena.array("top_k")[2] == 4


def test_collect_takes_only_what_launch_gave(lane: CpuLane) -> None:
    with pytest.raises(TypeError, match="str"):
        lane.executor.collect("handle")


def test_a_row_slot_is_clean_for_its_next_request(lane: CpuLane) -> None:
    first = greedy(lane, PROMPT, 8)
    assert greedy(lane, PROMPT[::-1], 8) != first
    assert greedy(lane, PROMPT, 8) == first


def test_tokens_come_in_the_order_of_sampled_rows_in_more_slices_than_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT[start:] for start in range(0, 21, 3)]
    alone = [greedy(golden.lane(directory), prompt, 6) for prompt in prompts]
    monkeypatch.setattr("engine.cpu.executor.LOGITS_ROWS", 2)
    driver = Driver(golden.lane(directory))
    rows = [driver.start(slot) for slot in (6, 2, 5, 0, 3, 1, 4)]
    driver.step(chunks=[(row, prompt, True) for row, prompt in zip(rows, prompts, strict=True)])
    for _ in range(5):
        driver.step(rows[::-1])
    assert [row.tokens for row in rows] == alone


def texts_of_unequal_rows(lane: CpuLane) -> list[list[int]]:
    """Rows that hit a prefix, begin a page in a chunk and cross into new pages while they decode, all in one batch."""
    driver = Driver(lane)
    owner = driver.start(5)
    driver.prefill(owner, PROMPT, 1000)
    rows = [owner, driver.start(2, owner.pages[:2]), driver.start(0), driver.start(3)]
    for row, prompt in zip(rows[1:], (PROMPT, PROMPT[:1], PROMPT[:33]), strict=True):
        driver.prefill(row, prompt, 7)
    for _ in range(20):
        driver.step(rows)
    return [row.tokens for row in rows]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_left_on_a_page_changes_no_text(directory: Path, dtype: str) -> None:
    expected = texts_of_unequal_rows(golden.lane(directory, dtype=dtype))
    lane = golden.lane(directory, dtype=dtype)
    lane.executor.parts.kv[1:] = torch.nan
    assert texts_of_unequal_rows(lane) == expected


def poisoned_batch(lane: CpuLane, page: int | None) -> tuple[list[Row], list[StepResult]]:
    """Three rows decode, then the first decodes on while another's prompt goes on; what is on `page` is lost before."""
    driver = Driver(lane)
    rows = [driver.start(slot) for slot in (4, 1, 6)]
    for row in rows:
        driver.prefill(row, PROMPT[row.slot :], 1000)
    late = driver.start(2)
    driver.step(chunks=[(late, PROMPT[:16], False)])
    if page is not None:
        lane.executor.parts.kv[(rows[1].pages + late.pages)[page]] = torch.inf
    return rows, [driver.step(rows), driver.step(rows[:1], [(late, PROMPT[16:20], False)])]


@pytest.mark.parametrize(("page", "failed"), [(None, (set(), set())), (0, ({1}, set())), (-1, (set(), {2}))])
def test_a_row_that_is_not_finite_fails_by_name_and_its_mates_go_on(
    directory: Path, page: int | None, failed: tuple[set[int], set[int]]
) -> None:
    sound, _ = poisoned_batch(golden.lane(directory), None)
    rows, results = poisoned_batch(golden.lane(directory), page)
    assert tuple(set(result.failed_rows) for result in results) == failed
    for row, expected in zip(rows, sound, strict=True):
        assert row.slot in failed[0] or row.tokens == expected.tokens
        assert all(0 <= token < 320 for token in row.tokens)


def test_logits_that_overflow_fail_their_row_alone(lane: CpuLane) -> None:
    driver = Driver(lane)
    rows = [driver.start(slot, sampling=Sampling(1.0, top_k=slot, seed=3)) for slot in (0, 3)]
    driver.step(chunks=[(row, PROMPT, True) for row in rows])
    see = driver.executor.tap

    def spoil(slots: Sequence[int], logits: torch.Tensor) -> None:
        see(slots, logits)
        logits[list(slots).index(3), 17] = torch.inf

    driver.executor.tap = spoil
    assert driver.step(rows).failed_rows == {3}


def sampled(lane: CpuLane, seed: int, chunk: int, mates: int) -> list[int]:
    driver = Driver(lane)
    others = [driver.start(slot, sampling=Sampling(1.0, seed=slot)) for slot in range(1, mates + 1)]
    for other in others:
        driver.prefill(other, PROMPT[other.slot :], 1000)
    row = driver.start(0, sampling=Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=seed))
    driver.prefill(row, PROMPT, chunk, others)
    for _ in range(15):
        driver.step([*others, row])
    return row.tokens


def test_a_seed_gives_the_same_text_whatever_the_chunks_and_mates(lane: CpuLane) -> None:
    text = sampled(lane, 2**64 - 5, 1000, 0)
    assert sampled(lane, 2**64 - 5, 7, 3) == text
    assert sampled(lane, 2**64 - 6, 1000, 0) != text


def test_bfloat16_stays_near_float32(directory: Path) -> None:
    seen: dict[str, torch.Tensor] = {}
    for dtype in ("float32", "bfloat16"):
        driver = Driver(golden.lane(directory, dtype=dtype))
        row = driver.start(0)
        driver.prefill(row, PROMPT, 16)
        seen[dtype] = row.logits[0]
    error = (seen["bfloat16"] - seen["float32"]).abs().max() / seen["float32"].abs().max()
    assert 0 < error < 0.1


def test_planned_bytes_are_the_measured_ones(lane: CpuLane) -> None:
    report = lane.report
    assert report.planned == report.measured
    assert report.as_dict()["total"] == sum(report.measured.parts.values())
    assert set(report.as_dict()) == {*report.planned.parts, "total"}
    assert all(size > 0 for size in report.measured.parts.values())
    assert "kv_pool              16.0" in report.as_text()
    other = replace(report, measured=replace(report.measured, weights=1))
    assert other.as_dict()["weights_planned"] == report.planned.weights


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    report = golden.lane(tiny_model(tmp_path / "tied", "llama", tied=True)).report
    assert report.planned.weights == report.measured.weights


def config(directory: Path, **settings: object) -> CoreConfig:
    return CoreConfig(model=str(directory), threads=1, **{"kv_cache_memory": "1MiB", **settings})


def test_the_lane_says_what_it_can_serve(directory: Path) -> None:
    built = create_cpu_lane(config(directory, context_limit=100), directory)
    assert built.servable_length == 100
    assert built.geometry == KvGeometry(16, 2, 2, 16, "float32")
    small = create_cpu_lane(config(directory, kv_cache_memory="64KiB"), directory)
    assert small.capacity.usable_pages == (64 << 10) // small.geometry.page_bytes - 1
    assert small.servable_length == small.capacity.tokens < small.model_config.context_limit == 2048


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"context_limit": 4096}, ValueError, "context_limit is 4096 tokens, but the model was made for 2048"),
        (
            {"max_bucket": 8, "max_step_tokens": 7},
            ValueError,
            "max_step_tokens is 7, but must be at least max_bucket, 8",
        ),
        ({"kv_cache_memory": "1KiB"}, KvBudgetError, "1024 bytes"),
        ({"kv_cache_memory": "900TiB"}, PlanError, "slots of the KV pool"),
        ({"kv_page_size": 32}, ValueError, "16 or 64"),
    ],
)
def test_what_cannot_be_served_is_refused_with_both_numbers(
    directory: Path, settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        create_cpu_lane(config(directory, **settings), directory)


def test_a_lane_larger_than_the_host_is_refused_before_it_loads(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cpu.lane.host_memory", lambda: 5 << 20)
    monkeypatch.setattr("engine.cpu.lane.load_weights", pytest.fail)
    with pytest.raises(MemoryShortError, match=r"kv_pool 64.* but the host offers 5 MiB: lower kv_cache_memory"):
        create_cpu_lane(config(directory, kv_cache_memory="64MiB"), directory)


def test_a_missing_model_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        create_cpu_lane(config(tmp_path), tmp_path)


def test_dummy_weights_need_no_checkpoint(directory: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((directory / name).read_text())
    built = create_cpu_lane(config(tmp_path, load_format="dummy"), tmp_path)
    assert len(greedy(built, PROMPT, 4)) == 4


def test_the_host_offers_the_least_of_memory_and_cgroup(tmp_path: Path) -> None:
    meminfo, limit, usage = tmp_path / "meminfo", tmp_path / "max", tmp_path / "current"
    meminfo.write_text("MemTotal: 999 kB\nMemAvailable:     500 kB\n")
    assert host_memory(meminfo, ()) == 500 * 1024
    limit.write_text("300000\n")
    usage.write_text("100000\n")
    cgroup = CgroupFiles(limit, usage, tmp_path / "stat", "inactive_file")
    assert host_memory(meminfo, [cgroup]) == 200_000
    limit.write_text("max\n")
    assert host_memory(meminfo, [cgroup]) == 500 * 1024
    assert host_memory(tmp_path / "none", ()) is None
    assert memory.host_memory() is None or memory.host_memory() > 0


def test_page_cache_that_can_be_dropped_is_not_taken(tmp_path: Path) -> None:
    limit, usage, stat = tmp_path / "max", tmp_path / "current", tmp_path / "stat"
    limit.write_text("300000\n")
    usage.write_text("290000\n")
    stat.write_text("anon 50000\ninactive_file 200000\nactive_file 4000\n\ntotal_inactive_file 240000\n")
    none = tmp_path / "none"
    assert host_memory(none, [CgroupFiles(limit, usage, stat, "inactive_file")]) == 210_000
    assert host_memory(none, [CgroupFiles(limit, usage, stat, "total_inactive_file")]) == 250_000
    usage.write_text("100\n")  # read at another moment than stat
    assert host_memory(none, [CgroupFiles(limit, usage, stat, "inactive_file")]) == 300_000


def test_the_load_line() -> None:
    line = load_line(KvCapacity(99, 16), KvGeometry(16, 4, 2, 64, "float32"), "blake2b128.x")
    assert line == "KV cache (cpu): 99 pages of 16 tokens, 1584 tokens, 6.2 MiB, fingerprint blake2b128.x"


@pytest.mark.parametrize("size", [1, 3, 5, 6, 9, 17, 33])
def test_a_lane_starts_and_runs_where_steps_are_no_larger_than_the_bucket(directory: Path, size: int) -> None:
    built = create_cpu_lane(config(directory, max_bucket=size, max_step_tokens=size), directory)
    driver = Driver(built)
    rows = [driver.start(slot) for slot in range(size)]
    driver.step(chunks=[(row, [10 + row.slot], True) for row in rows])
    driver.step(rows)
    assert [len(row.tokens) for row in rows] == [2] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
def test_every_form_of_a_product_gives_the_same(rows: int, dtype: torch.dtype) -> None:
    arena = Arena()
    reserve_scratch(arena, 64, 24, 48, dtype)
    arena.allocate()
    weight, inputs = torch.randn(48, 24).to(dtype), torch.randn(rows, 24).to(dtype)
    expected = inputs.double() @ weight.double().T
    gemm = Gemm(arena)
    for form in [*gemm.forms(dtype, rows)]:
        out = torch.full((rows, 48), torch.nan, dtype=dtype)
        if rows <= TUNED_ROWS[-1] or not form.transposed:
            gemm.run(form, inputs, weight, out)
            torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=1e-1 if dtype != torch.float32 else 1e-4)
    assert torch.backends.mkldnn.enabled


def test_the_fastest_form_is_kept_for_its_shape_and_row_count() -> None:
    arena = Arena()
    reserve_scratch(arena, 8, 24, 48, torch.float32)
    arena.allocate()
    # Readings alternate begin, end: forms take 3, 1 and 2 ticks in each round.
    ticks = iter([0, 3, 10, 11, 20, 22] * 3)
    gemm = Gemm(arena, clock=lambda: float(next(ticks)))
    weight = torch.randn(48, 24)
    gemm.tune([weight], max_rows=1)
    forms = gemm.forms(torch.float32, 1)
    assert gemm.form_for(weight, 1) == forms[1]
    assert gemm.form_for(weight, 2) == forms[0]
