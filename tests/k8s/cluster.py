"""A cluster on this machine: a stand-in API server, its controllers, a kubelet that starts pods as processes, and helm.

Left out are schedulers and admission; all pods have the address 127.0.0.1 and free ports.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tests.helm.tools import tool
from tests.k8s.api_rules import Account
from tests.k8s.api_server import ApiServer, Call
from tests.k8s.api_store import ACCOUNTS, DEPLOYMENTS, PODS, REPLICA_SETS, SERVICES, STATEFUL_SETS, Object, Store
from tests.k8s.cluster_control import reconcile_deployment, reconcile_pods, reconcile_slice
from tests.k8s.cluster_kubelet import Kubelet
from tests.k8s.cluster_sets import reconcile_stateful_set
from tests.k8s.helm_client import NAMESPACE, RELEASE, Helm
from tests.k8s.network import private_network, reason_against
from tests.k8s.pods_run import ROOT, Replacement, RunningPod, Site, site

CONTROL_S = 0.1

SIMULATED = Replacement(
    ("pagelane", "worker"),
    ("{python}", "-m", "tests.sim_worker", "--sim-directory", "{shared}"),
)
"""The worker with a simulated engine core; all else of it is real."""


@dataclass
class Cluster:
    """What a test does with a cluster, and sees of it."""

    store: Store
    api: ApiServer
    site: Site
    kubelet: Kubelet
    helm: Helm

    @property
    def calls(self) -> Sequence[Call]:
        """All calls so far."""
        return list(self.api.calls)

    def pods(self, component: str, release: str = RELEASE) -> list[Object]:
        """Pods of a release's component that have not been deleted."""
        wanted = {"app.kubernetes.io/component": component, "app.kubernetes.io/instance": release}
        found = [p for p in self.store.all(PODS, NAMESPACE) if wanted.items() <= p["metadata"]["labels"].items()]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def running(self, component: str, release: str = RELEASE) -> list[RunningPod]:
        """Their processes."""
        names = [pod["metadata"]["name"] for pod in self.pods(component, release)]
        return [self.kubelet.running[name] for name in names if name in self.kubelet.running]

    def wait(self, what: str, condition: Callable[[], bool], within_s: float = 30) -> float:
        """Wait for what is to be seen of the objects. Returns the seconds it took; raises `TimeoutError`."""
        began = time.monotonic()
        if not self.store.wait(condition, within_s):
            states = {pod["metadata"]["name"]: pod.get("status") for pod in self.store.all(PODS)}
            raise TimeoutError(f"not seen within {within_s:g} s: {what}; pods: {states}")
        return time.monotonic() - began

    def variables(self, pod: Object) -> dict[str, str]:
        """How a pod reaches the API server: with its account's token, if it may have one."""
        metadata, spec = pod["metadata"], pod["spec"]
        account = Account(metadata["namespace"], spec.get("serviceAccountName", "default"))
        default = self.store.get(ACCOUNTS, *account).get("automountServiceAccountToken", True)
        token = self.api.token(account) if spec.get("automountServiceAccountToken", default) else ""
        config = self.site.shared / f"{metadata['name']}.json"
        config.write_text(self.api.kubeconfig(token, account.namespace))
        return {"KUBECONFIG": f"/shared/{config.name}" if self.site.sandboxed else str(config)}


@contextmanager
def cluster(*, simulated: bool = True, **options: Any) -> Iterator[Cluster]:
    """An empty cluster; nothing of it outlives the context. `options` are the site's."""
    if simulated:
        options = {"replacements": (SIMULATED,), "variables": {"PYTHONPATH": str(ROOT)}, **options}
    store = Store()
    with site(by_files=False, **options) as place, ApiServer(store) as api:
        # The kubelet asks the cluster for a pod's variables.
        kubelet = Kubelet(store, place, lambda pod: found.variables(pod))
        found = Cluster(store, api, place, kubelet, Helm(api, place.directory))
        thread = threading.Thread(target=_control, args=(found,), name="controllers", daemon=True)
        thread.start()
        try:
            yield found
        finally:
            kubelet.over.set()
            thread.join()
            kubelet.stop()


@contextmanager
def networked_cluster(**options: Any) -> Iterator[Cluster]:
    """An empty cluster, with a network of its own if there can be one: pods then publish events over their own sockets,
    as they do anywhere, else over a broker.
    """
    tool("helm")  # fetched, if need be, while there is another network
    alone = not reason_against()
    with private_network() if alone else nullcontext(), cluster(with_broker=not alone, **options) as found:
        yield found


def reconcile(store: Store) -> None:
    """One look of all controllers at everything. What is as it should be is not written."""
    parts = (
        (SERVICES, reconcile_slice),
        (DEPLOYMENTS, reconcile_deployment),
        (REPLICA_SETS, reconcile_pods),
        (STATEFUL_SETS, reconcile_stateful_set),
    )
    with store.changed:
        for resource, part in parts:
            for obj in store.all(resource):
                part(store, obj)


def _control(found: Cluster) -> None:
    while not found.kubelet.over.is_set():
        reconcile(found.store)
        found.kubelet.reconcile()
        with found.store.changed:
            found.store.changed.wait(CONTROL_S)
