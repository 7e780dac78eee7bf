"""The chart rendered by helm, as objects."""

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helm.tools import tool

CHART = Path(__file__).parents[2] / "helm" / "pagelane"
EXAMPLES = CHART / "examples"
MORE_VALUES = Path(__file__).with_name("values")
"""Values beside the examples, that between them set everything."""

OLDEST, NEWEST = "1.30.0", "1.37.0"
"""Versions of Kubernetes: the oldest that Chart.yaml admits, and the newest that kubernetes-validate knows."""

MODES = ("plain", "dynamo")
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Object = dict[str, Any]


class Refused(Exception):
    """Helm would not render. The text is its own."""


@dataclass(frozen=True, kw_only=True)
class Render:
    """What `helm template` is asked for."""

    values: tuple[Path, ...] = ()
    sets: tuple[str, ...] = ()
    """Each `key=value` as for --set."""
    mode: str = "plain"
    kube_version: str = NEWEST
    release: str = "demo"
    namespace: str = "prod"

    def text(self) -> str:
        """The manifest. Raises `Refused`."""
        command = ["template", self.release, str(CHART), "--namespace", self.namespace]
        command += ["--kube-version", self.kube_version, "--set", f"mode={self.mode}"]
        for path in self.values:
            command += ["--values", str(path)]
        for pair in self.sets:
            command += ["--set", pair]
        return run_helm(*command)

    def objects(self) -> list[Object]:
        """The manifest's objects. Raises `Refused`."""
        return [document for document in yaml.load_all(self.text(), Loader=LOADER) if document]


def run_helm(*arguments: str) -> str:
    """What helm prints. Raises `Refused` with its complaint if it fails."""
    result = subprocess.run(
        [str(tool("helm")), *arguments], capture_output=True, text=True, check=False, env={"HOME": "/nonexistent"}
    )
    if result.returncode:
        raise Refused(result.stderr)
    return result.stdout


def cases() -> Iterator[tuple[str, Path, str]]:
    """Name, file and mode of everything that is rendered: each example and each of the further values in both modes,
    but for those whose first line says `# plain only`.
    """
    for path in sorted([*EXAMPLES.glob("*.yaml"), *MORE_VALUES.glob("*.yaml")]):
        only_plain = path.read_text().startswith("# plain only")
        for mode in MODES[:1] if only_plain else MODES:
            yield f"{path.stem}-{mode}", path, mode


def find(objects: list[Object], kind: str, name: str = "") -> Object:
    """The one object of that kind, and of that name if one is given."""
    (found,) = (o for o in objects if o["kind"] == kind and name in ("", o["metadata"]["name"]))
    return found


def pods(objects: list[Object]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Component and pod template of every workload, whichever mode made it."""
    for obj in objects:
        if obj["kind"] in ("Deployment", "StatefulSet"):
            yield obj["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"], obj["spec"]["template"]
        if obj["kind"] == "DynamoGraphDeployment":
            for component in obj["spec"]["components"]:
                yield component["type"], component["podTemplate"]


def pod(objects: list[Object], component: str) -> Mapping[str, Any]:
    """Pod template of a component."""
    return dict(pods(objects))[component]


def main_container(objects: list[Object], component: str) -> Mapping[str, Any]:
    """Its container `main`."""
    containers: list[Mapping[str, Any]] = pod(objects, component)["spec"]["containers"]
    (found,) = (container for container in containers if container["name"] == "main")
    return found


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Its variables that are plain values; references are left out."""
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def worker_yaml(objects: list[Object]) -> str:
    """The worker's YAML as its ConfigMap has it."""
    (found,) = (o for o in objects if o["kind"] == "ConfigMap" and "worker.yaml" in o["data"])
    return str(found["data"]["worker.yaml"])
