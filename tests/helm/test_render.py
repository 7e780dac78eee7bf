"""Every example, and values that set everything, in both modes: what helm, the API server and Dynamo would say."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.helm import crds
from tests.helm.chart import CHART, EXAMPLES, NEWEST, OLDEST, Object, Render, cases, pods, run_helm
from tests.helm.objects import problems

pytestmark = pytest.mark.helm

CASES = {name: (path, mode) for name, path, mode in cases()}


@functools.cache
def objects_of(name: str, kube_version: str) -> list[Object]:
    path, mode = CASES[name]
    return Render(values=(path,), mode=mode, kube_version=kube_version).objects()


@pytest.mark.parametrize("kube_version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", CASES)
def test_schemas(name: str, kube_version: str) -> None:
    unknown = []
    for obj in objects_of(name, kube_version):
        schema = crds.schema_of(obj)
        if schema is not None:
            assert crds.problems(schema, obj) == [], obj["kind"]
        else:
            version = kube_version.rpartition(".")[0]
            try:
                kubernetes_validate.validate(obj, version, strict=True)
            except kubernetes_validate.SchemaNotFoundError:
                unknown.append(obj["kind"])
    assert unknown == []


@pytest.mark.parametrize("name", CASES)
def test_objects_fit_together(name: str) -> None:
    assert problems(objects_of(name, NEWEST)) == []


@pytest.mark.parametrize("name", CASES)
def test_lint(name: str) -> None:
    path, mode = CASES[name]
    text = run_helm("lint", "--strict", str(CHART), "--values", str(path), "--set", f"mode={mode}")
    assert "0 chart(s) failed" in text
    assert "[WARNING]" not in text


@pytest.mark.parametrize("name", CASES)
def test_pods_are_confined(name: str) -> None:
    for _, template in pods(objects_of(name, NEWEST)):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            confined = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True}
            assert container["securityContext"] == {**confined, "capabilities": {"drop": ["ALL"]}}
            assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/tmp"}
            assert environment_of(container)["HOME"] == "/tmp"


def environment_of(container: Mapping[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_every_value_has_a_comment() -> None:
    """Above it, or above the block of values that it belongs to."""
    explained, bare = False, []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if line.strip().startswith("#"):
            explained = True
        elif not line.strip():
            explained = False
        elif re.match(r"\s*[\w-]+:", line) and not explained:
            bare.append(line.strip())
    assert [line for line in bare if not line.endswith(":")] == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_say_how_to_install_them(path: Path) -> None:
    assert f"-f helm/pagelane/examples/{path.name}" in path.read_text()
