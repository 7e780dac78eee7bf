"""The real helm against a stand-in API server: it reads and writes it as it would a cluster's.

Its releases are Secrets there. Helm's own client for them speaks Protocol Buffers, which the server reads of Secrets;
all else is JSON, and applied by the server.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import CHART, EXAMPLES
from tests.helm.tools import tool
from tests.k8s.api_server import ApiServer

NAMESPACE = "prod"
RELEASE = "demo"
MODEL = "tiny"
HELM_S = 150


class HelmError(Exception):
    """Helm failed. The text is its own."""


def sim_values(model: Path, **more: Any) -> dict[str, Any]:
    """Values, beside those of the CPU demo, for simulated workers over a tiny model's folder. `more` are dotted keys
    with two underscores for each dot.
    """
    flat = {
        "model__prefetch__enabled": False,
        "worker__config__model": str(model),
        "worker__config__served_model_name": MODEL,
        "worker__minReadySeconds": 1,
        "worker__preStopSeconds": 1,
        "worker__gracePeriodSeconds": 1,
        **more,
    }
    values: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split("__")
        place = values
        for step in path:
            place = place.setdefault(step, {})
        place[last] = value
    return values


@dataclass(frozen=True)
class Helm:
    """Helm as the administrator of a server; what it needs lies in a folder."""

    api: ApiServer
    folder: Path

    def run(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """What helm prints. `values` come over those of the CPU demo. Raises `HelmError`."""
        config = self.folder / "admin.json"
        config.write_text(self.api.kubeconfig(self.api.admin_token, NAMESPACE))
        command = [str(tool("helm")), *arguments, "--namespace", NAMESPACE]
        if values is not None:
            path = self.folder / "values.yaml"
            path.write_text(yaml.safe_dump(dict(values)))
            command += ["--values", str(EXAMPLES / "cpu-demo.yaml"), "--values", str(path)]
            # What the chart renders is held against Kubernetes' schemas elsewhere (tests/helm).
            command += ["--disable-openapi-validation"]
        environment = {"HOME": str(self.folder / "helm"), "KUBECONFIG": str(config)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=HELM_S)
        if done.returncode:
            raise HelmError(done.stderr)
        return done.stdout

    def install(self, values: Mapping[str, Any], *flags: str, release: str = RELEASE) -> str:
        """Install the chart. Raises `HelmError`."""
        return self.run("install", release, str(CHART), *flags, values=values)

    def upgrade(self, values: Mapping[str, Any], *flags: str) -> str:
        """Upgrade the release to these values. Raises `HelmError`."""
        return self.run("upgrade", RELEASE, str(CHART), *flags, values=values)
