"""What the documents say is there, is there."""

import re
from pathlib import Path

from prometheus_client.exposition import generate_latest

from engine.messages import Ready, Stats
from worker.config import WorkerConfig
from worker.metrics import Sources, build_registry

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_metric_that_is_documented_exists_and_every_one_that_exists_is_documented():
    ready = Ready(1, 16, 16, "h", 1, "", {"total": 1}, {"total": 1.0})
    registry, _ = build_registry(Sources(Stats, ready, lambda: (0, 0, 0), lambda: 0))
    exported = set(re.findall(r"^# TYPE (pagelane_\w+)", generate_latest(registry).decode(), re.MULTILINE))
    exported = {name for name in exported if not name.endswith("_created")}
    documented = set(re.findall(r"`(pagelane_\w+)", (ROOT / "docs" / "serving.md").read_text()))
    assert documented <= exported
    assert exported <= documented


def test_keys_that_the_pages_name_are_keys():
    keys = set(WorkerConfig.__struct_fields__)
    for page in PAGES:
        if page.name == "parameters.md":
            continue  # it names parameters of requests; test_parameter_table.py holds it to the code
        for name in re.findall(r"`((?:max|min|kv|drain|default|priority|itl)_[a-z_]+)`", page.read_text()):
            assert name in keys | {
                "max_tokens",
                "min_tokens",
                "max_context",
                "max_pages",
                "min_p",
                "max_position_embeddings",
            }, f"{page.name}: {name}"
