"""A release of the chart through its life, by the real helm: install, upgrade, rollback, uninstall, and the CRD."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm.chart import Render, find
from tests.k8s.api_server import ApiServer
from tests.k8s.api_store import DEFINITIONS, DEPLOYMENTS, PODS, Object, Resource, Store, merged
from tests.k8s.cluster import Cluster, networked_cluster
from tests.k8s.helm_client import NAMESPACE, RELEASE, Helm, HelmError, sim_values
from tests.k8s.served import METADATA, client, wait_for_workers

pytestmark = [pytest.mark.k8s, pytest.mark.faults]

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
CRD = "dynamoworkermetadatas.nvidia.com"
WAIT = ("--wait", "--timeout", "60s")


def config(store: Store) -> str:
    """The worker's YAML in the cluster."""
    return str(store.get(CONFIG_MAPS, NAMESPACE, "demo-pagelane-worker")["data"]["worker.yaml"])


def names(found: Cluster) -> dict[str, set[str]]:
    """The pods by their components."""
    return {one: {pod["metadata"]["name"] for pod in found.pods(one)} for one in ("frontend", "worker")}


def templates(found: Cluster, component: str) -> set[str]:
    """Hashes of the templates that the component's pods are of."""
    return {pod["metadata"]["labels"]["pod-template-hash"] for pod in found.pods(component)}


async def serves(found: Cluster, workers: int) -> None:
    (frontend,) = found.running("frontend")
    await wait_for_workers(frontend, workers)
    async with client(frontend) as api:
        assert (await api.chat("hello", max_tokens=4)).status == 200


async def test_a_release_is_installed_upgraded_rolled_back_and_removed(tiny: Path) -> None:
    first = sim_values(tiny, worker__replicas=1, worker__config__context_limit=1024)
    second = sim_values(tiny, worker__replicas=2, worker__config__context_limit=768)
    with networked_cluster() as found:
        store, helm = found.store, found.helm
        printed = helm.install(first, *WAIT)
        assert "with 1 worker, pages of 16 tokens, routing kv" in printed
        await serves(found, 1)
        installed, template, text = names(found), templates(found, "worker"), config(store)
        assert "context_limit: 1024" in text

        with pytest.raises(HelmError, match="kv_page_size"):
            helm.upgrade(sim_values(tiny, worker__config__kv_page_size=32))
        assert (names(found), config(store)) == (installed, text)

        helm.upgrade(second, *WAIT)
        await serves(found, 2)
        upgraded = names(found)
        assert upgraded["frontend"] == installed["frontend"], "frontends have not changed"
        assert not upgraded["worker"] & installed["worker"]
        assert store.find(BUDGETS, NAMESPACE, "demo-pagelane-worker")

        helm.run("rollback", RELEASE, "1", *WAIT)
        await serves(found, 1)
        assert (templates(found, "worker"), config(store)) == (template, text)
        assert names(found)["frontend"] == installed["frontend"]
        assert not store.find(BUDGETS, NAMESPACE, "demo-pagelane-worker"), "it was the second revision's"
        (frontend,) = found.running("frontend")
        assert "incompatible workers" not in frontend.log(), "what differs in what frontends compare stands apart"
        history = json.loads(helm.run("history", RELEASE, "--output", "json"))
        assert [row["status"] for row in history] == ["superseded", "superseded", "deployed"]

        helm.run("uninstall", RELEASE)
        found.wait("pods gone", lambda: not store.all(PODS), 30)
        assert {(ended.code, ended.why) for ended in found.kubelet.ended} == {(0, "deleted")}
        left = {obj["metadata"]["name"] for one in store.resources() for obj in store.all(one)}
        assert left == {CRD}


@pytest.fixture
def helm(tmp_path: Path) -> Iterator[Helm]:
    """Helm and a server alone: nothing is started of what is installed."""
    with ApiServer(Store()) as api:
        yield Helm(api, tmp_path)


def operators() -> Object:
    """The definition as somebody else has made it, with more in it."""
    ours = find(Render().objects(), "CustomResourceDefinition")
    metadata = {"name": CRD, "labels": {"app.kubernetes.io/managed-by": "dynamo-operator"}, "annotations": None}
    return merged(ours, {"metadata": metadata, "spec": {"names": {"categories": ["dynamo"]}}})


def test_a_definition_that_is_there_is_left_alone(helm: Helm, tiny: Path) -> None:
    store, values = helm.api.store, sim_values(tiny)
    before = store.create(DEFINITIONS, "", operators())
    helm.install(values)
    helm.upgrade(values | {"frontend": {"replicas": 2}})
    helm.run("rollback", RELEASE, "1")
    helm.run("uninstall", RELEASE)
    assert store.get(DEFINITIONS, "", CRD) is before
    writes = [call for call in helm.api.calls if call.resource == DEFINITIONS.plural and call.verb != "get"]
    assert {call.verb for call in writes} <= {"list", "watch"}


def test_the_charts_own_definition_and_the_workers_objects_outlive_every_release(helm: Helm, tiny: Path) -> None:
    store, values = helm.api.store, sim_values(tiny)
    helm.install(values)
    assert store.find(DEPLOYMENTS, NAMESPACE, "demo-pagelane-worker")
    made = store.get(DEFINITIONS, "", CRD)["metadata"]["uid"]
    worker = store.apply(METADATA, NAMESPACE, "w", {"metadata": {"name": "w"}, "spec": {"data": {}}}, "dynamo")
    helm.upgrade(values | {"frontend": {"replicas": 2}})
    helm.upgrade(values)
    helm.run("rollback", RELEASE, "1")
    helm.run("uninstall", RELEASE)
    helm.install(values)
    assert store.get(DEFINITIONS, "", CRD)["metadata"]["uid"] == made
    assert store.get(METADATA, NAMESPACE, "w") is worker
