"""The chart's pods with simulated engine cores: cheap enough for heavy load, and they can be made to hang."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.helm.chart import EXAMPLES, Object, Render, pod
from tests.k8s.helm_client import sim_values
from tests.k8s.pods import Identity, resolve
from tests.k8s.pods_run import ROOT, Replacement, RunningPod, Site, site


@dataclass(frozen=True)
class SimulatedPods:
    """Where they run, and what the chart says of them."""

    site: Site
    objects: list[Object]

    def start(self, component: str, name: str) -> RunningPod:
        """Start a pod of `frontend` or `worker`."""
        return self.site.start(resolve(pod(self.objects, component), self.objects, Identity(name=name)), name)


@contextmanager
def simulated_pods(model: Path, folder: Path, *sim: str, **values: Any) -> Iterator[SimulatedPods]:
    """A site for the CPU demo's pods over a tiny model. `values` are as `sim_values` takes them, `sim` is for
    `tests.sim_worker`.
    """
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(sim_values(model, **values)))
    objects = Render(values=(EXAMPLES / "cpu-demo.yaml", path)).objects()
    by = ("{python}", "-m", "tests.sim_worker", "--sim-directory", "{shared}", *sim)
    replacement = Replacement(("pagelane", "worker"), by)
    with site(replacements=(replacement,), variables={"PYTHONPATH": str(ROOT)}) as place:
        yield SimulatedPods(place, objects)


def core_of(worker: RunningPod) -> int:
    """Process id of a worker's engine core."""
    (core,) = psutil.Process(worker.pid).children()
    return core.pid
