"""What a lane may take of a card, the floor of its pool, and the advice that comes with a refusal."""

import re

import msgspec
import pytest
import torch

from engine.config import CoreConfig
from engine.cuda.budget import Allowance, PoolSizer, floor_bytes, floor_tokens
from engine.cuda.sizing import Card, design_lane
from engine.memory import MIB, MemoryPlan, MemoryReport
from engine.models.config import ModelConfig, load_model_config
from kv.budget import KvBudgetError
from tests.gpu.shaped import write_config

GIB = 1 << 30
H200 = Card("NVIDIA H200", 132, (9, 0), 150_109_880_320)
REST = 900 * MIB
"""What the driver and graphs take."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_model_config(write_config("qwen3-4b", tmp_path_factory.mktemp("model")))


def config(**settings: object) -> CoreConfig:
    given: dict[str, object] = {"max_bucket": 256, "max_step_tokens": 2048, "context_limit": 8192}
    return msgspec.convert({"model": "m", **given, **settings}, CoreConfig)


def sizer(model: ModelConfig, settings: CoreConfig, others: int = 0) -> PoolSizer:
    return PoolSizer(settings, design_lane(settings, model, torch.bfloat16, H200), H200, others)


def tokens(model: ModelConfig, settings: CoreConfig, rest: int = REST) -> int:
    """Of the pool beside what the settings determine and `rest`."""
    made = sizer(model, settings)
    taken = made.design.sizes.total + rest
    return made.budget(taken, H200.memory - taken, 2 * MIB).capacity.tokens


def test_qwen3_4b_at_085_of_an_h200(model: ModelConfig) -> None:
    """Beside 900 MiB of context, graphs and workspace. Everything else is determined."""
    assert tokens(model, config()) > 801_500


@pytest.mark.parametrize("limit", [None, "12GiB", "24GiB"])
def test_page_64_starts_wherever_page_16_starts(model: ModelConfig, limit: str | None) -> None:
    """Whatever memory is left, by a page or by a byte; and the pool never exceeds it."""
    both = [sizer(model, config(kv_page_size=size, gpu_memory_limit=limit)) for size in (16, 64)]
    assert both[1].design.sizes.total <= both[0].design.sizes.total
    needed = {floor_bytes(made.config, made.design.geometry) for made in both}
    assert len(needed) == 1
    floor = needed.pop()
    for room in (floor - 1, floor, floor + 1, floor + both[0].design.geometry.page_bytes, 3 * floor):
        started = []
        for made in both:
            taken = made.allowance.own - room
            try:
                budget = made.budget(taken, H200.memory - taken)
            except KvBudgetError:
                started.append(False)
            else:
                started.append(True)
                assert budget.bytes <= room
                assert budget.capacity.tokens >= floor_tokens(made.config)
        assert started == [room >= floor] * 2


def test_the_floor_is_a_full_step_and_a_token_more_of_each_row() -> None:
    assert floor_tokens(config()) == 2048 + 256


def test_other_processes_count_unless_the_lane_has_a_limit_of_its_own() -> None:
    shared = Allowance.of(config(gpu_memory_utilization=0.5), 100 * GIB, 30 * GIB)
    assert (shared.own, shared.limited) == (20 * GIB, False)
    assert Allowance.of(config(gpu_memory_utilization=0.5), 100 * GIB, 60 * GIB).own == 0
    own = Allowance.of(config(gpu_memory_utilization=0.5, gpu_memory_limit="24GiB"), 100 * GIB, 30 * GIB)
    assert (own.own, own.limited) == (12 * GIB, True)
    with pytest.raises(KvBudgetError, match=r"gpu_memory_limit is 71GiB .* has 102400 MiB, 30720 of them in other"):
        Allowance.of(config(gpu_memory_limit="71GiB"), 100 * GIB, 30 * GIB)


def test_what_the_card_has_is_all_there_is(model: ModelConfig) -> None:
    """Other processes may take memory while a lane starts: then its share is not there."""
    made = sizer(model, config())
    assert made.budget(20 * GIB, 5 * GIB).bytes <= 5 * GIB
    with pytest.raises(KvBudgetError, match=r"only 100 MiB of the card are free: wait for the other processes"):
        made.budget(20 * GIB, 100 * MIB)


@pytest.mark.parametrize("limit", ["9200MiB", "9600MiB", "10GiB"])
@pytest.mark.parametrize("context", [8192, 40960])
def test_each_setting_that_a_refusal_names_works_and_the_next_one_does_not(
    model: ModelConfig, limit: str, context: int
) -> None:
    given = config(gpu_memory_limit=limit, context_limit=context, max_step_tokens=8192)
    with pytest.raises(KvBudgetError) as caught:
        tokens(model, given)
    text = str(caught.value)
    assert "max_step_tokens + max_bucket, 8448 tokens" in text
    assert (
        f"gpu_memory_utilization 0.85 of gpu_memory_limit's {Allowance.of(given, H200.memory, 0).total / MIB:.0f}"
        in text
    )
    ways = re.findall(r"(\w+) ([\d.]+)(?= with|, or|$)", text.partition("what works: ")[2])
    assert ways or "no setting makes it fit: take a smaller model, or a gpu_memory_limit" in text
    together = " with " in text
    steps = {"max_step_tokens": 64, "max_bucket": 8, "context_limit": 256, "gpu_memory_utilization": 0.01}
    changes = {name: float(value) if name == "gpu_memory_utilization" else int(value) for name, value in ways}
    for change in [changes] if together else [{name: value} for name, value in changes.items()]:
        assert tokens(model, msgspec.structs.replace(given, **change)) >= 0
        for name, value in change.items():
            nearer = value + (-steps[name] if name == "gpu_memory_utilization" else steps[name])
            if not together:
                with pytest.raises(KvBudgetError):
                    tokens(model, msgspec.structs.replace(given, **{name: nearer}))


def test_a_model_that_no_setting_makes_fit_is_told_so(model: ModelConfig) -> None:
    with pytest.raises(KvBudgetError, match=r"no setting makes it fit: .* gpu_memory_limit that is \d+ MiB larger"):
        tokens(model, config(gpu_memory_limit="6GiB"))


def test_the_report_has_no_planned_size_for_what_was_not_known() -> None:
    planned = MemoryPlan(weights=MIB, rope_table=1, plan_arena=2, activations=3, kv_pool=4 * MIB)
    measured = MemoryPlan(**{**planned.parts, "kv_pool": 5 * MIB, "graphs": MIB // 2, "context": 7 * MIB})
    report = MemoryReport(planned, measured)
    assert report.as_dict() == {**measured.parts, "total": measured.total, "kv_pool_planned": 4 * MIB}
    lines = {line.split()[0]: line.split()[1:] for line in report.as_text().splitlines()[1:]}
    assert lines["kv_pool"] == ["4.0", "5.0"]
    assert lines["graphs"] == ["-", "0.5"]
    assert lines["total"] == ["-", "13.5"]
