"""`pagelane plan`: what it says of GPUs and hosts, that its advice works, its JSON, its exit codes and its errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import CoreConfig
from engine.cpu.lane import create_cpu_lane
from engine.cuda.cards import KNOWN_CARDS
from engine.cuda.lane import CudaLane, create_cuda_lane
from engine.cuda.logprobs import DeviceLogprobs
from engine.cuda.measured import Key, MeasuredTable, Row, Software, row
from engine.cuda.planning import CudaPlanner, Place
from engine.cuda.sampling import DeviceSampler
from engine.models.config import ModelConfig, load_model_config
from engine.planning import LanePlan, Seen, Target, described, plan_lane
from tests.fake_gpu import GRANULE, MIB, FakeGpu, stand_in
from tests.gpu.shaped import write_config
from tests.models import tiny_model
from worker.cli import main

GIB = 1 << 30
QWEN3_4B: dict[str, Any] = {"max_bucket": 256, "max_step_tokens": 2048, "context_limit": 8192, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-4B's config.json, and nothing else."""
    return write_config("qwen3-4b", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory: Path) -> ModelConfig:
    return load_model_config(directory)


@pytest.fixture
def yaml(directory: Path, tmp_path: Path) -> Path:
    path = tmp_path / "worker.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in {**QWEN3_4B, "model": directory}.items()))
    return path


def config(**values: Any) -> CoreConfig:
    return CoreConfig(model="m", device="cuda", **{**QWEN3_4B, **values})


def planned(model: ModelConfig, memory: int, **values: Any) -> LanePlan:
    return plan_lane(config(**values), model, Target("H200", memory))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["plan", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("gib", [12, 16, 24])
def test_small_cards_for_qwen3_4b(model: ModelConfig, gib: int, page_size: int) -> None:
    plan = planned(model, gib * GIB, kv_page_size=page_size)
    assert plan.starts
    assert plan.kv_pages * page_size == plan.kv_tokens
    assert plan.parts["kv_pool"] == (plan.kv_pages + 1) * page_size * 147_456
    assert 0 <= plan.allowed - sum(plan.parts.values()) < page_size * 147_456 + 2 * MIB
    assert plan.allowed == int(0.85 * gib * GIB)
    assert [one.tokens for one in plan.streams] == [1024, 4096, 8192]
    assert [one.streams for one in plan.streams] == [plan.kv_tokens // size for size in (1024, 4096, 8192)]
    assert f"holds {plan.kv_tokens // 1024} requests of 1024 tokens at once, but max_bucket is 256" in plan.advice[-1]


def test_an_h200(model: ModelConfig) -> None:
    plan = plan_lane(config(), model, Target("h200"))
    assert plan.device_memory == 150_109_880_320
    assert plan.device_memory_known
    assert plan.kv_tokens > 805_000
    assert plan.advice == []
    assert plan.streams[0].streams == 256


def test_a_pool_below_one_context_is_named_with_what_would_hold_it(model: ModelConfig) -> None:
    plan = planned(model, 12 * GIB, context_limit=16_000)
    assert plan.starts
    assert plan.servable_length == plan.kv_tokens < 16_000
    (words,) = [advice for advice in plan.advice if "context_limit" in advice]
    utilization = float(words.partition("gpu_memory_utilization to ")[2].split()[0])
    more = planned(model, 12 * GIB, context_limit=16_000, gpu_memory_utilization=utilization)
    assert more.servable_length == 16_000
    less = planned(model, 12 * GIB, context_limit=16_000, gpu_memory_utilization=utilization - 0.01)
    assert less.servable_length < 16_000


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_more_memory_never_holds_fewer_tokens(model: ModelConfig, data: st.DataObject) -> None:
    less = data.draw(st.integers(6 * GIB, 40 * GIB), "less")
    more = less + data.draw(st.integers(0, 4 * GIB), "more")
    values: dict[str, Any] = {
        "kv_page_size": data.draw(st.sampled_from([16, 64]), "page size"),
        "gpu_memory_utilization": data.draw(st.floats(0.3, 1.0), "utilization"),
        "max_step_tokens": data.draw(st.integers(256, 8192), "step tokens"),
    }
    plans = planned(model, less, **values), planned(model, more, **values)
    assert plans[0].kv_tokens <= plans[1].kv_tokens
    assert plans[0].starts <= plans[1].starts


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_advised_setting_makes_it_start(model: ModelConfig, data: st.DataObject) -> None:
    memory = data.draw(st.integers(6 * GIB, 13 * GIB), "memory")
    max_step_tokens = data.draw(st.sampled_from([256, 1000, 2048, 8192, 16384]), "step tokens")
    values: dict[str, Any] = {
        "max_step_tokens": max_step_tokens,
        "kv_page_size": data.draw(st.sampled_from([16, 64]), "page size"),
        "context_limit": data.draw(st.sampled_from([None, 300, 40960]), "context"),
        "gpu_memory_utilization": data.draw(st.sampled_from([0.5, 0.85, 0.97, 1.0]), "utilization"),
        "graph_buckets": data.draw(st.sampled_from([None, "1,256"]), "buckets"),
        "max_chunk_tokens": data.draw(st.sampled_from([None, max_step_tokens]), "chunk"),
    }
    plan = planned(model, memory, **values)
    if plan.starts:
        assert plan.changes == []
        return
    assert plan.reason
    assert plan.advice
    for change in plan.changes:
        changed = msgspec.structs.replace(config(**values), **change)
        assert plan_lane(changed, model, Target("H200", memory)).starts
        assert (changed.max_chunk_tokens or 0) <= changed.max_step_tokens
    if not plan.changes:
        assert plan.advice[0].startswith("take a smaller model, or a card that is ")
        missing = int(plan.advice[0].split()[-3]) + 1
        assert planned(model, memory + missing * MIB + 4 * MIB, **values).starts


def test_every_kind_of_advice_is_given(model: ModelConfig, tmp_path: Path) -> None:
    """Of lanes that no run has told of: bounds, by which graphs are what a lane can do without."""
    table = tmp_path / "measured.json"
    table.write_bytes(msgspec.json.encode([msgspec.structs.replace(MeasuredTable.read().rows[0], exact=False)]))

    def names(memory: int) -> set[str]:
        plan = plan_lane(config(), model, Target("H200", memory), table)
        return {name for change in plan.changes for name in change}

    # From what holds little more than the weights to what starts.
    given = set().union(*(names(8 * GIB + step * 64 * MIB) for step in range(64)))
    assert given == {"gpu_memory_utilization", "max_step_tokens", "max_bucket", "context_limit", "cuda_graphs"}
    assert names(6 * GIB) == set()


def lane(monkeypatch: pytest.MonkeyPatch, path: Path, gpu: FakeGpu, values: CoreConfig) -> CudaLane:
    stand_in(monkeypatch)
    monkeypatch.setattr("engine.cuda.planning.check_model", lambda model, dtype: torch.float32)
    # What is computed is held elsewhere, and takes minutes in the interpreter.
    monkeypatch.setattr(DeviceSampler, "choose", lambda self, logits, inputs, rows, out: out.copy_(logits.argmax(-1)))
    monkeypatch.setattr(DeviceLogprobs, "read", lambda *_: None)
    return create_cuda_lane(values, path, gpu=gpu)


def test_a_known_lane_is_planned_as_it_came_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane is built, its report goes into the table, and then one on another card is planned and built."""
    path = tiny_model(tmp_path / "model", "qwen3")
    model, software = load_model_config(path), Software(torch="1", flashinfer="2")
    first = CoreConfig(model=str(path), max_bucket=2, max_step_tokens=16, context_limit=64)
    gpu = FakeGpu()
    key = Key.of(first, model, "float32", software, gpu.card.name)
    report = lane(monkeypatch, path, gpu, first).report
    made = msgspec.convert(row(key, report.as_dict(), "a run"), Row)
    gpu = FakeGpu(48 * MIB)
    values = msgspec.structs.replace(first, kv_page_size=64)
    planner = CudaPlanner(model, Place(gpu.card, True, software, MeasuredTable([made]), GRANULE))
    assert planner.estimate(values).known
    plan = described(values, planner, Seen(device="cuda", memory=gpu.card.memory))
    built = lane(monkeypatch, path, gpu, values)
    assert plan.kv_pages == built.capacity.usable_pages
    assert plan.servable_length == built.servable_length
    # What the fake's torch holds is a number whatever is allocated, so its workspaces shrink as the parts grow.
    parts = {name: size for name, size in built.report.measured.parts.items() if name not in ("kv_pool", "workspaces")}
    assert parts.items() <= plan.parts.items()


def test_json_has_what_programs_read(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--config", yaml, "--device-memory", "12GiB", "--kv-page-size=64", "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert msgspec.json.decode(out, type=LanePlan).starts is plan["starts"] is True
    assert plan["kv_page_size"] == 64
    assert plan["kv_tokens"] == plan["kv_pages"] * 64 > 2304
    assert set(plan["parts"]) == {
        "weights", "rope_table", "plan_arena", "activations", "kv_pool", "graphs", "workspaces", "context",
    }  # fmt: skip
    assert isinstance(plan["advice"], list)
    assert plan["card"] == "NVIDIA H200"
    assert plan["key"]["shape"]["layers"] == 36
    assert isinstance(plan["upper_bound"], bool)


def test_a_lane_that_does_not_start_gives_1_and_says_what_to_change(
    yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", yaml, "--device-memory", "10GiB", "--gpu-memory-utilization", "0.85")
    code, out, _ = run(capsys, *words)
    assert code == 1
    assert "starts: no: the KV pool would get" in out
    assert "advice: set gpu_memory_utilization to 0." in out
    code, out, _ = run(capsys, *words, "--json")
    plan = json.loads(out)
    assert code == 1
    assert (plan["starts"], plan["kv_tokens"], plan["kv_pages"], plan["servable_length"]) == (False, 0, 0, 0)
    assert {"gpu_memory_utilization": plan["changes"][0]["gpu_memory_utilization"]} in plan["changes"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--context-limit 50000", "the model was made for 40960"),
        ("--dtype float32", "the CUDA lane computes in bfloat16 or float16"),
        ("--max-step-tokens 100000000", "lower max_step_tokens"),
        ("--gpu-memory-limit 30GiB", "gpu_memory_limit is 30GiB (30720 MiB), but the card has 22426 MiB"),
    ],
)
def test_settings_that_no_memory_helps_do_not_start(
    yaml: Path, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    code, out, err = run(capsys, "--config", yaml, "--card", "L4", *flags.split())
    assert (code, err) == (1, "")
    assert words in out
    code, out, _ = run(capsys, "--config", yaml, "--card", "L4", "--json", *flags.split())
    assert code == 1
    assert words in json.loads(out)["advice"][0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--card", "--card needs a value"),
        ("--card=GeForce", "RTX-4090"),
        ("--card H200 --device cpu", "--card is given, but device is cpu"),
        ("--device-memory twelve", "--device-memory: 'twelve' is no size"),
        ("--device-memory 0", "at least 1 byte"),
        ("--kv-page-size 32 --card L4", "kv_page_size is 32, but must be 16 or 64"),
        ("--card L4 --speed 3", "unknown flag --speed"),
        ("--card L4 --model /nowhere/at/all", "no such model"),
    ],
)
def test_a_bad_command_line_gives_2_and_one_line(
    yaml: Path, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    code, out, err = run(capsys, "--config", yaml, *flags.split())
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert err.startswith("pagelane: error: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that is here is planned for")
def test_without_a_gpu_the_known_cards_are_named(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--config", yaml, "--device", "cuda")
    assert code == 2
    assert all(name in err for name in KNOWN_CARDS)
    assert "--device-memory" in err


@pytest.mark.parametrize("name", KNOWN_CARDS)
def test_every_known_card_is_planned_for(model: ModelConfig, name: str) -> None:
    plan = plan_lane(config(), model, Target(name))
    assert plan.starts
    assert plan.card == KNOWN_CARDS[name].card.name
    assert plan == plan_lane(config(), model, Target(plan.card))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "--device-memory SIZE" in out
    assert main(["--help"]) == 0
    assert "pagelane plan --config FILE" in capsys.readouterr().out


def test_a_cpu_lane_is_planned_to_the_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_model(tmp_path / "model", "qwen3")
    flags = ("--model", path, "--device", "cpu", "--kv-cache-memory", "3MiB", "--max-bucket", 4, "--json")
    code, out, _ = run(capsys, *flags)
    plan = json.loads(out)
    assert code == 0
    values = CoreConfig(model=str(path), device="cpu", kv_cache_memory="3MiB", max_bucket=4, threads=1)
    built = create_cpu_lane(values, path)
    assert plan["parts"] == built.report.measured.parts
    assert plan["kv_pages"] == built.capacity.usable_pages
    assert plan["servable_length"] == built.servable_length
    assert (plan["card"], plan["key"], plan["upper_bound"]) == (None, None, False)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_advised_setting_of_a_cpu_lane_makes_it_start(model: ModelConfig, data: st.DataObject) -> None:
    memory = data.draw(st.integers(6 * GIB, 24 * GIB), "memory")
    values = CoreConfig(
        model="m",
        device="cpu",
        dtype=data.draw(st.sampled_from(["auto", "float32", "bfloat16"])),  # type: ignore[arg-type]
        kv_cache_memory=data.draw(st.sampled_from(["1MiB", "5MiB", "512MiB", "7.3GiB", "100GiB"])),
        max_step_tokens=data.draw(st.sampled_from([16, 512, 100_000])),
    )
    plan = plan_lane(values, model, Target(memory=memory))
    if plan.starts:
        return
    assert plan.advice
    for change in plan.changes:
        assert plan_lane(msgspec.structs.replace(values, **change), model, Target(memory=memory)).starts


def test_a_cpu_lane_that_is_too_large_is_told_the_largest_cache(model: ModelConfig) -> None:
    values = CoreConfig(model="m", device="cpu", dtype="bfloat16", kv_cache_memory="40GiB")
    plan = plan_lane(values, model, Target(memory=24 * GIB))
    (size,) = [change["kv_cache_memory"] for change in plan.changes if "kv_cache_memory" in change]
    assert size.endswith("MiB")
    larger = msgspec.structs.replace(values, kv_cache_memory=f"{int(size[:-3]) + 1}MiB")
    assert not plan_lane(larger, model, Target(memory=24 * GIB)).starts


def test_a_cpu_lanes_short_cache_is_told_the_size_for_its_context(model: ModelConfig) -> None:
    values = CoreConfig(model="m", device="cpu", dtype="bfloat16", context_limit=8192)
    plan = plan_lane(values, model, Target(memory=24 * GIB))
    words = next(advice for advice in plan.advice if "context_limit" in advice)
    size = words.partition("kv_cache_memory to ")[2].split()[0]
    changed = msgspec.structs.replace(values, kv_cache_memory=size)
    assert plan_lane(changed, model, Target(memory=24 * GIB)).servable_length == 8192


def test_it_runs_where_no_gpu_library_is(yaml: Path) -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(['flashinfer', 'triton', 'transformers']);"
        "from worker.cli import main;"
        f"sys.exit(main(['plan', '--config', {str(yaml)!r}, '--card', 'H100']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "KV tokens" in result.stdout
