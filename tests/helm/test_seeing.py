"""Dashboard and alerts ask for what workers export, and the alerts lead to a page that helps."""

import json
import re
from typing import Any

import pytest
import yaml
from prometheus_client.exposition import generate_latest

from engine.messages import Ready, Stats
from tests.helm.chart import CHART, MORE_VALUES, Render, find
from tests.helm.dashboard import FILE, render
from worker.metrics import Sources, build_registry

pytestmark = pytest.mark.helm

ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
ADDED = {"namespace", "pod", "job", "le", "__rate_interval"}
"""Labels that Prometheus adds to what is scraped, or that a histogram has; and Grafana's variable."""


def expressions() -> list[str]:
    panels = json.loads(FILE.read_text())["panels"]
    return [line["expr"] for panel in panels for line in panel.get("targets", ())] + [rule["expr"] for rule in ALERTS]


@pytest.fixture(scope="module")
def exported() -> str:
    ready = Ready(1, 16, 16, "h", 1, "", {"total": 1}, {"total": 1.0})
    registry, _ = build_registry(Sources(Stats, ready, lambda: (0, 0, 0), lambda: 0))
    return generate_latest(registry).decode()


def samples(exported: str) -> dict[str, set[str]]:
    """Label pairs and label names by sample name."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(pagelane_\w+)(?:\{(.*?)\})? ", exported, re.MULTILINE):
        pairs = re.findall(r"(\w+)=\"(.*?)\"", labels)
        found.setdefault(name, set()).update(f"{key}={value}" for key, value in pairs)
        found[name].update(key for key, _ in pairs)
    return found


def test_the_file_is_what_is_declared() -> None:
    assert FILE.read_text() == render(), "run: python -m tests.helm.dashboard"


def test_every_name_and_label_is_exported(exported: str) -> None:
    known, used = samples(exported), set()
    for expression in expressions():
        labels = set().union(*(known[name] for name in re.findall(r"pagelane_\w+", expression)))
        for name, matchers in re.findall(r"(pagelane_\w+)(?:\{(.*?)\})?", expression):
            used.add(name)
            for key, value in re.findall(r"(\w+)=\"(.*?)\"", matchers):
                assert f"{key}={value}" in known[name], f"{name} has no {key} {value}"
        for group in re.findall(r"by \((.*?)\)", expression):
            assert set(re.split(r", ?", group)) <= labels | ADDED, expression
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    unseen = set(re.findall(r"^# TYPE (pagelane_\w+)", exported, re.MULTILINE)) - shown
    unseen = {name for name in unseen if not name.endswith("_created")}
    # Facts of the start, and one that only tests of leaks look at.
    assert unseen == {
        "pagelane_kv_usable_pages",
        "pagelane_kv_page_size_tokens",
        "pagelane_servable_length_tokens",
        "pagelane_startup_seconds",
        "pagelane_step_cost_seconds",
        "pagelane_worker_tasks",
    }


def test_a_name_that_is_not_exported_is_noticed(exported: str) -> None:
    assert "pagelane_step_second_total" not in samples(exported)
    assert "reason=busy" not in samples(exported)["pagelane_requests_finished_total"]


@pytest.mark.parametrize("expression", expressions())
def test_brackets_close(expression: str) -> None:
    for opened, closed in ("()", "{}", "[]"):
        assert expression.count(opened) == expression.count(closed)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_where_help_is(rule: dict[str, Any]) -> None:
    words = rule["annotations"]
    assert "{{ $labels.pod }}" in words["summary"]
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    page = (CHART.parents[1] / "docs" / "operate.md").read_text()
    for section in re.findall(r"docs/operate\.md, ([^.]+)", words["description"]):
        assert f"\n## {section}" in page, section


def test_the_chart_carries_both_unchanged() -> None:
    sets = [f"monitoring.{part}.enabled=true" for part in ("dashboard", "alerts")]
    objects = Render(values=(MORE_VALUES / "everything.yaml",), sets=tuple(sets)).objects()
    shown = find(objects, "ConfigMap", "lab-dashboard")
    assert json.loads(shown["data"]["pagelane.json"]) == json.loads(FILE.read_text())
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert find(objects, "PrometheusRule")["spec"]["groups"][0]["rules"] == ALERTS
    assert not {o["kind"] for o in Render().objects()} & {"PrometheusRule"}
