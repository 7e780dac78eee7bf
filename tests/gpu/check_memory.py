"""What lanes take of the card after their start and under load, against their reports and `pagelane plan`.

    python -m tests.gpu.check_memory [--quick] [--only settings,limits,plan]

Every lane starts in a process of its own, so that none has what another left; this process never touches the card.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.cuda.cards import KNOWN_CARDS
from engine.cuda.measured import TABLE, MeasuredTable, Row
from engine.models.config import load_model_config
from engine.planning import LanePlan, Target, plan_lane
from tests.gpu import rehearsal
from tests.gpu.harness import Results
from tests.gpu.memory_child import MARK

MIB = 1 << 20
PART_TOLERANCE = 16 * MIB
PART_SHARE = 0.05
TOTAL_TOLERANCE = 64 * MIB
PLAN_SHARE = 0.005
KV_TOKENS = 805_000
"""Of Qwen3-4B at 0.85 of an H200, max_step_tokens 2048 and max_bucket 256."""
CHILD_S = 75.0


@dataclass(frozen=True, slots=True)
class Case:
    """A lane to start."""

    shape: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For result lines."""
        return ", ".join([self.shape, *(f"{key} {value}" for key, value in self.changes.items())])


SETTINGS = [
    Case("qwen3-4b", {"kv_page_size": page, "max_step_tokens": tokens})
    for tokens in (2048, 8192, 1024)
    for page in (16, 64)
]
LIMITS = [Case("qwen3-4b", {"gpu_memory_limit": f"{size}GiB"}) for size in (12, 16, 24)]


def child(case: Case, turns: int) -> dict[str, Any]:
    """Start a lane in a process of its own. Raises `RuntimeError` with the end of what it said."""
    asked = json.dumps({"shape": case.shape, "changes": case.changes, "turns": turns})
    command = [sys.executable, "-m", "tests.gpu.memory_child", asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(f"{case.name}: exit {done.returncode}: {done.stderr[-1500:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return result


def off(one: int, other: int) -> bool:
    """Whether a part is further from the report than the tolerance."""
    return abs(one - other) > max(PART_TOLERANCE, PART_SHARE * other)


def judge(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """What a started lane took against its report. The bytes that no tensor of the lane has are compared by growth."""
    report, (used, peak), held = found["report"], found["used"], found["held"]
    by_tensor = {name: size for name, size in found["tensors"].items() if off(size, report[name])}
    planned = {
        name: report[f"{name}_planned"] for name in report
        if f"{name}_planned" in report and off(report[f"{name}_planned"], report[name])
    }  # fmt: skip
    growth = {"workspaces": held[1] - held[0], "context": (peak - held[1]) - (used - held[0])}
    grown = {name: size for name, size in growth.items() if off(report[name] + size, report[name])}
    # What the device shows beyond the parts that are tensors: graphs, workspaces and context together.
    rest = used - sum(found["tensors"].values()) - report["kv_pool"]
    reported = sum(report.get(name, 0) for name in ("graphs", "workspaces", "context"))
    whole = {"after start": used - report["total"], "at the peak": peak - report["total"]}
    stated = case == SETTINGS[0]
    ok = (
        not (by_tensor or planned or grown or off(rest, reported))
        and all(abs(gap) <= TOTAL_TOLERANCE for gap in whole.values())
        and not found["load"]["errors"]
        and (not stated or found["kv_tokens"] >= KV_TOKENS)
    )
    return {
        "total_off_mib": {name: gap / MIB for name, gap in whole.items()},
        "parts_off_mib": {
            **{name: (size - report[name]) / MIB for name, size in found["tensors"].items()},
            "graphs, workspaces and context": (rest - reported) / MIB,
        },
        "growth_mib": {name: size / MIB for name, size in growth.items()},
        "not_as_reported": by_tensor | planned | grown,
        "report_mib": {name: size / MIB for name, size in report.items()},
        **({"bar_kv_tokens": KV_TOKENS} if stated else {}),
        "ok": ok,
    }


@dataclass
class Session:
    """The lanes that were started, and where results go."""

    results: Results
    turns: int
    found: list[tuple[Case, dict[str, Any]]] = field(default_factory=list)

    def start(self, case: Case) -> dict[str, Any]:
        """Start a lane and judge it, unless it refuses."""
        found = child(case, self.turns)
        self.found.append((case, found))
        if found["starts"]:
            shown = {key: found[key] for key in ("build_s", "seconds", "kv_tokens", "others", "card_bytes", "load")}
            self.results.emit(f"memory: {case.name}", **judge(case, found), **shown)
            if found["row"] is not None:
                self.results.emit(f"row: {case.name}", measured=found["row"])
        else:
            self.results.emit(
                f"refused: {case.name}", reason=found["refused"], **({} if limited(case) else {"ok": False})
            )
        return found


def limited(case: Case) -> bool:
    """Whether the lane has a memory limit: then it may refuse, with a way out."""
    return "gpu_memory_limit" in case.changes


def advised(reason: str) -> dict[str, Any] | None:
    """The first change of settings that a refusal names; None if it names none."""
    found = re.search(r"what works: (.*)$", reason)
    if found is None:
        return None
    first = found[1].split(", ")[0]
    pairs = re.findall(r"([a-z_]+) ([0-9.]+)(?= with |$)", first)
    return {name: float(text) if "." in text else int(text) for name, text in pairs} or None


def check_limits(session: Session, cases: list[Case]) -> None:
    """A small card serves a load or refuses with settings that work; page 64 starts wherever 16 does."""
    for case in cases:
        with session.results.part(f"limit: {case.name}: ran"):
            found = session.start(case)
            if found["starts"]:
                working = case
            else:
                change = advised(found["refused"])
                session.results.emit(f"advice: {case.name}", change=change, ok=change is not None)
                if change is None:
                    continue
                working = Case(case.shape, {**case.changes, **change})
                again = session.start(working)
                session.results.emit(
                    f"the advice works: {case.name}", ok=again["starts"] and again["load"]["tokens"] > 0
                )
                if not again["starts"]:
                    continue
            other = session.start(Case(working.shape, {**working.changes, "kv_page_size": 64}))
            session.results.emit(f"page 64 starts, too: {working.name}", ok=other["starts"])


def check_plan(session: Session) -> None:
    """`pagelane plan` against the lanes that were started, each by the rows of the others; and without any row."""
    committed = MeasuredTable.read()
    for place, (case, found) in enumerate(session.found):
        with session.results.part(f"plan: {case.name}: ran"), tempfile.TemporaryDirectory() as folder:
            rows = [
                msgspec.convert(other["row"], Row)
                for index, (_, other) in enumerate(session.found)
                if index != place and other.get("row") is not None
            ]
            table = Path(folder) / "measured.json"
            committed.with_rows(rows).write(table)
            plan = planned(case, found, table, Path(folder))
            gap = plan.kv_tokens / found["kv_tokens"] - 1 if found["starts"] else None
            known = not plan.upper_bound
            exact = gap is not None and abs(gap) <= PLAN_SHARE
            session.results.emit(
                f"plan: {case.name}",
                known=known,
                planned_starts=plan.starts,
                starts=found["starts"],
                planned_kv_tokens=plan.kv_tokens,
                kv_tokens=found.get("kv_tokens", 0),
                off=gap,
                ok=plan.starts is found["starts"] and (gap is None or exact) if known else None,
            )


def planned(case: Case, found: dict[str, Any], table: Path, folder: Path) -> LanePlan:
    """The plan of a lane, for the card that it started on."""
    directory = rehearsal.model_directory(case.shape, folder / "model")
    config = rehearsal.config_of(directory, **case.changes)
    total = found.get("card_bytes") or KNOWN_CARDS["H200"].card.memory
    return plan_lane(config, load_model_config(directory), Target("H200", total), table)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="two settings and one limit, few steps")
    parser.add_argument("--only", default="settings,limits,plan")
    arguments = rehearsal.parsed(parser)
    results = Results("memory")
    session = Session(results, rehearsal.scaled(40 if arguments.quick else 150, 12))
    wanted = arguments.only.split(",")
    if "settings" in wanted:
        cases = SETTINGS[:2] if arguments.quick else [*SETTINGS, Case("qwen3-14b")]
        for case in cases:
            with results.part(f"start: {case.name}: ran"):
                session.start(case)
    if "limits" in wanted:
        check_limits(session, LIMITS[:1] if arguments.quick else LIMITS)
    if "plan" in wanted:
        check_plan(session)
    results.emit("summary", failed=results.failed, table=TABLE.name)
    sys.exit(bool(results.failed))


if __name__ == "__main__":
    main()
