"""What the GPU scripts decide without a GPU: verdicts, advice, tables, and the load that they run."""

import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.build import BuiltLane, build_lane
from engine.config import CoreConfig
from tests.bench.plot_rows import MODELS, OWN, PEER, TESTS, bars, picture, read, table
from tests.gpu import check_memory
from tests.gpu.check_memory import (
    KV_TOKENS,
    MIB,
    SETTINGS,
    Case,
    Session,
    advised,
    check_limits,
    check_plan,
    judge,
)
from tests.gpu.load import Client, Mix, MixedLoad, on_pool
from tests.gpu.page_table import raw_rows
from tests.gpu.page_table import table as page_table
from tests.models import tiny_model

PARTS = {"weights": 8000, "rope_table": 4, "plan_arena": 40, "activations": 600}
REST = {"graphs": 250, "workspaces": 70, "context": 880}


def found() -> dict[str, Any]:
    """A start as it should be: 40 GiB of pool, everything as reported."""
    report = {name: size * MIB for name, size in {**PARTS, **REST, "kv_pool": 40960}.items()}
    report["total"] = sum(report.values())
    held = (8000 + 4 + 40 + 600 + 70 + 60) * MIB
    return {
        "report": report,
        "tensors": {name: size * MIB for name, size in PARTS.items()},
        "used": [report["total"], report["total"]],
        "held": [held, held],
        "kv_tokens": KV_TOKENS,
        "load": {"errors": []},
    }


def test_a_lane_that_takes_what_it_reports_is_green() -> None:
    verdict = judge(SETTINGS[0], found())
    assert verdict["ok"], verdict


@pytest.mark.parametrize(
    ("path", "mib"),
    [
        (("used", 1), 65),
        (("used", 0), 65),
        (("held", 1), 17),
        (("tensors", "activations"), 31),
        (("tensors", "rope_table"), 17),
        (("report", "workspaces"), 17),
        (("report", "activations_planned"), 700),
        (("kv_tokens",), -1),
    ],
)
def test_a_lane_that_takes_other_than_it_reports_is_red(path: tuple[Any, ...], mib: int) -> None:
    changed = copy.deepcopy(found())
    at: Any = changed
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = mib * MIB if path[-1] == "activations_planned" else at[path[-1]] + mib * MIB
    if path == ("held", 1):  # that much more at the peak, which torch had
        changed["used"][1] += mib * MIB
        changed["report"]["workspaces"] = 70 * MIB
    if path == ("report", "workspaces"):  # the device shows less than that
        changed["report"]["total"] += 65 * MIB
    assert not judge(SETTINGS[0], changed)["ok"]


def test_growth_within_the_tolerance_is_green() -> None:
    changed = found()
    changed["used"][1] += 12 * MIB
    changed["held"][1] += 12 * MIB
    assert judge(SETTINGS[0], changed)["ok"]


def test_an_error_under_load_is_red() -> None:
    assert not judge(SETTINGS[0], {**found(), "load": {"errors": ["a step failed"]}})["ok"]


class Lines:
    """`Results` that keeps its lines."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[str, Any]] = {}

    def emit(self, check: str, **values: Any) -> None:
        self.lines[check] = values

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        yield


def test_a_refusal_is_followed_by_what_it_advises_and_by_page_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each lane that started is planned with what the others measured."""
    started: list[dict[str, Any]] = []

    def child(case: Case, turns: int) -> dict[str, Any]:
        started.append(case.changes)
        if case.changes.get("max_bucket") == 48:
            row = {"card_bytes": 0, "build_s": 1.0, "seconds": {}, "others": 0, "row": None, "starts": True}
            return {**found(), **row, "load": {"errors": [], "tokens": 9}}
        return {"starts": False, "refused": "the KV pool would get 0 MiB; what works: max_bucket 48, or max_bucket 40"}

    monkeypatch.setattr(check_memory, "child", child)
    lines = Lines()
    session = Session(lines, 10)  # type: ignore[arg-type]
    check_limits(session, [Case("qwen3-4b", {"gpu_memory_limit": "12GiB"})])
    limit = {"gpu_memory_limit": "12GiB"}
    assert started == [limit, {**limit, "max_bucket": 48}, {**limit, "max_bucket": 48, "kv_page_size": 64}]
    assert lines.lines["the advice works: qwen3-4b, gpu_memory_limit 12GiB"]["ok"]
    assert lines.lines["page 64 starts, too: qwen3-4b, gpu_memory_limit 12GiB, max_bucket 48"]["ok"]
    check_plan(session)
    plans = [values for name, values in lines.lines.items() if name.startswith("plan: ")]
    assert [plan["starts"] for plan in plans] == [False, True, True]


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("what works: gpu_memory_utilization 0.93, or max_bucket 48", {"gpu_memory_utilization": 0.93}),
        (
            "...; what works: max_step_tokens 512 with max_bucket 64 with context_limit 4096",
            {"max_step_tokens": 512, "max_bucket": 64, "context_limit": 4096},
        ),
        ("no setting makes it fit: take a smaller model", None),
    ],
)
def test_the_first_advice_is_read_from_a_refusal(text: str, change: dict[str, Any] | None) -> None:
    assert advised(text) == change


def test_the_page_table_pairs_what_was_measured_together() -> None:
    rows = [
        {"check": "raw", "what": "decode", "at": 1, "page": page, "pair": pair, "ms": ms, "plan_us": 20.0}
        for pair, both in enumerate(((4.0, 2.0), (4.0, 4.0), (4.0, 8.0)))
        for page, ms in zip((16, 64), both, strict=True)
    ]
    lines = list(page_table(raw_rows([json.dumps({"check": "lane"}), *map(json.dumps, rows)])))
    assert "| decode step at 1 streams of 1024 tokens, ms | 4 | 4 | 1.00 (0.50 to 2.00; 3 pairs) |" in lines
    assert len(lines) == 4


@pytest.mark.parametrize("model", MODELS)
def test_rows_stand_beside_the_better_one_of_the_peers(model: str, tmp_path: Path) -> None:
    own = tmp_path / "rows.jsonl"
    peer = TESTS / "bench" / "results" / f"vllm-{model}.jsonl"
    row = {"check": "row", "max_step_tokens": 2048, "point": "pagelane c16 1024/128", "tpot_p50": 1.0, "out_tok_s": 1e4}
    own.write_text(json.dumps(row) + "\n")
    found = list(bars({OWN[0]: read([own]), PEER: read([peer])}))
    rows = [json.loads(line) for line in peer.read_text().splitlines()]
    best = min(one["tpot_p50"] for one in rows if one.get("point", "").endswith("c16 1024/128"))
    (bar,) = [one for one in found if one.measure.key == "tpot_p50" and one.label == "16 users"]
    assert bar.gain(OWN[0]) == pytest.approx(best / 1.0)
    assert len({one.measure.title for one in found}) == 9
    assert all(line.count("|") == 7 for line in table(model, found))
    assert picture(model, found).count("<rect") > 30


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[CoreConfig, BuiltLane]:
    directory = tiny_model(tmp_path_factory.mktemp("model") / "m", "qwen3", layers=1, vocab=320)
    config = CoreConfig(
        model=str(directory), device="cpu", kv_cache_memory="4MiB", max_bucket=8, max_step_tokens=128, threads=1,
        pipeline_depth=1,
    )  # fmt: skip
    return config, build_lane(config, directory, time.perf_counter)


def test_a_mixed_load_has_everything_in_it(served: tuple[CoreConfig, BuiltLane]) -> None:
    """And a pool that is too small for it preempts; all requests end, and none by an error."""
    config, built = served
    lane = on_pool(built.lane, config, 320, 640)
    mix = Mix(320, streams=9, longest_prompt=90, longest_output=60, burst=5, cancelled=0.1)
    load = MixedLoad(lane, mix)
    for _ in range(250):
        load.turn()
    load.client.drain()
    stats, reasons = lane.stats(), {one.reason for one in load.client.finished.values()}
    assert reasons == {"length", "cancelled"}
    assert not load.client.live
    assert min(stats.preemptions, stats.decode_steps, stats.unified_steps, stats.cached_tokens) > 0
    assert stats.referenced_pages == 0
    assert stats.free_pages + stats.cached_pages == 640 // 16


def test_a_client_sees_what_was_cached(served: tuple[CoreConfig, BuiltLane]) -> None:
    config, built = served
    client = Client(on_pool(built.lane, config, 320, 640))
    prompt = list(range(10, 79))
    keys = []
    for _ in range(2):
        keys.append(client.send(prompt, 1))
        client.drain()
    assert [client.finished[key].cached_tokens for key in keys] == [0, 64]
    assert all(client.ttft(key) > 0 for key in keys)
