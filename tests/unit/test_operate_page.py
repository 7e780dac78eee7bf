"""docs/operate.md names metrics that exist, settings that exist and lines that the code writes."""

import re
from pathlib import Path

from prometheus_client.exposition import generate_latest

from engine.messages import Ready, Stats
from worker.config import WorkerConfig
from worker.metrics import Sources, build_registry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operate.md").read_text()
SOURCES = "\n".join(path.read_text() for folder in ("engine", "worker", "kv") for path in (ROOT / folder).rglob("*.py"))


def test_every_metric_and_label_exists() -> None:
    ready = Ready(1, 16, 16, "h", 1, "", {"total": 1}, {"total": 1.0})
    registry, _ = build_registry(Sources(Stats, ready, lambda: (0, 0, 0), lambda: 0))
    exported = generate_latest(registry).decode()
    names = set(re.findall(r"`(pagelane_\w+)", PAGE))
    assert len(names) > 15
    assert names <= set(re.findall(r"^# TYPE (pagelane_\w+)", exported, re.MULTILINE))
    for name, label, value in re.findall(r"`(pagelane_\w+)\{(\w+)=\"(\w+)\"\}`", PAGE):
        assert f'{name}{{{label}="{value}"' in exported, f"{name} has no {label} {value}"


def test_every_setting_exists() -> None:
    keys = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)(?:: \w+)?`", PAGE)) - {"queue_full", "queue_time"}
    keys = {key for key in keys if not key.startswith(("pagelane_", "dynamo_"))} - {"cache_salt"}
    assert len(keys) > 10
    assert keys <= set(WorkerConfig.__struct_fields__)


def test_every_line_of_a_log_that_is_quoted_is_one_that_the_code_writes() -> None:
    wedged = PAGE.partition("## A worker is wedged")[2].partition("\n## ")[0]
    quoted = [*re.findall(r"`([a-z' ]+ [a-z' ]+)`", wedged), "the KV pool would get", "the GPU's memory ran out"]
    assert len(quoted) >= 6
    for words in quoted:
        assert words in SOURCES, f"nothing writes {words!r}"
