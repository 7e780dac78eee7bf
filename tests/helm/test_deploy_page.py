"""What docs/deploy.md says of the chart, is so."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.helm.chart import CHART, EXAMPLES, NEWEST, OLDEST, Render, environment, main_container
from tests.helm.config_schema import SCHEMA
from worker.flags import load_config

pytestmark = pytest.mark.helm

PAGE = (CHART.parents[1] / "docs" / "deploy.md").read_text()
SECTIONS = set(json.loads(SCHEMA.read_text())["properties"])


def test_values_that_it_names_are_values() -> None:
    schema = json.loads(SCHEMA.read_text())
    named = [name for name in re.findall(r"`([a-z]+(?:\.\w+)+)[:` ]", PAGE) if name.partition(".")[0] in SECTIONS]
    named += re.findall(r"--set ([\w.]+)=", PAGE)
    assert len(named) > 15
    for name in named:
        node = schema
        for part in name.split("."):
            node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
            free = node.get("additionalProperties")
            assert part in node.get("properties", {}) or isinstance(free, dict), name
            node = node.get("properties", {}).get(part, free)


def test_examples_that_it_names_are_there() -> None:
    named = set(re.findall(r"^\| `([\w-]+\.yaml)`", PAGE, re.MULTILINE))
    assert named == {path.name for path in EXAMPLES.glob("*.yaml")}


def test_versions() -> None:
    for version in (OLDEST, NEWEST):
        assert version.removesuffix(".0") in PAGE


def test_ports() -> None:
    objects = Render().objects()
    ports = {
        port["containerPort"]
        for component in ("frontend", "worker")
        for port in main_container(objects, component)["ports"]
    }
    table = PAGE.partition("## What listens")[2].partition("\n## ")[0]
    assert ports == {int(number) for number in re.findall(r"\b([89]\d{3})\b", table)}


def test_the_command_that_makes_a_file_for_the_plan(tmp_path: Path) -> None:
    script = re.search(r"\| (sed '[^']+')", PAGE)
    assert script is not None
    manifest = Render(values=(EXAMPLES / "single-gpu.yaml",)).text()
    result = subprocess.run(["/bin/sh", "-c", script[1]], input=manifest, capture_output=True, text=True, check=True)
    text = result.stdout.partition("\n---")[0]
    (tmp_path / "worker.yaml").write_text(text)
    container = main_container(Render().objects(), "worker")
    config = load_config(["--config", str(tmp_path / "worker.yaml")], environment(container))
    assert (config.model, config.drain_timeout_s) == ("Qwen/Qwen3-4B", 60)
