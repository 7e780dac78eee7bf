"""StatefulSets: pods with names and claims that stay, replaced from the last to the first."""

from tests.k8s.api_store import CLAIMS, PODS, STATEFUL_SETS, Object, Store
from tests.k8s.cluster_control import (
    has_account,
    is_available,
    is_leaving,
    is_ready,
    owned,
    owner_reference,
    template_hash,
)

REVISION = "controller-revision-hash"


def reconcile_stateful_set(store: Store, one: Object) -> None:
    """One step towards what a StatefulSet with podManagementPolicy Parallel wants."""
    metadata, spec = one["metadata"], one["spec"]
    wanted, namespace, revision = spec.get("replicas", 1), metadata["namespace"], template_hash(spec["template"])
    pods = {pod["metadata"]["name"]: pod for pod in owned(store, one)}
    names = [f"{metadata['name']}-{ordinal}" for ordinal in range(wanted)]
    for name in pods.keys() - set(names):
        store.delete(PODS, namespace, name)
    if has_account(store, namespace, spec["template"]):
        for name in names:
            if name not in pods:
                _create(store, one, name, revision)
    _replace(store, one, [pods.get(name) for name in names], revision)
    living = [pod for name, pod in pods.items() if name in names and not is_leaving(pod)]
    updated = sum(pod["metadata"]["labels"][REVISION] == revision for pod in living)
    before = one.get("status", {}).get("currentRevision", revision)
    status = {
        "observedGeneration": metadata["generation"],
        "replicas": len(living),
        "readyReplicas": sum(map(is_ready, living)),
        "availableReplicas": sum(is_available(pod, spec.get("minReadySeconds", 0)) for pod in living),
        "updatedReplicas": updated,
        "updateRevision": revision,
        "currentRevision": revision if updated == wanted else before,
    }
    status["currentReplicas"] = wanted if updated == wanted else len(living) - updated
    store.merge(STATEFUL_SETS, namespace, metadata["name"], {"status": status})


def _replace(store: Store, one: Object, pods: list[Object | None], revision: str) -> None:
    """Delete the last pod of another revision, if all behind it are available."""
    for pod in reversed(pods):
        if pod is None or is_leaving(pod):
            return
        if pod["metadata"]["labels"][REVISION] != revision:
            store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
            return
        if not is_available(pod, one["spec"].get("minReadySeconds", 0)):
            return


def _create(store: Store, one: Object, name: str, revision: str) -> None:
    """A pod, and its claims where there are none yet."""
    namespace, template = one["metadata"]["namespace"], one["spec"]["template"]
    volumes = list(template["spec"].get("volumes", ()))
    for claim in one["spec"].get("volumeClaimTemplates", ()):
        claimed = f"{claim['metadata']['name']}-{name}"
        volumes.append({"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": claimed}})
        if not store.find(CLAIMS, namespace, claimed):
            store.create(CLAIMS, namespace, {"metadata": {"name": claimed}, "spec": claim["spec"]})
    labels = template["metadata"]["labels"] | {REVISION: revision, "statefulset.kubernetes.io/pod-name": name}
    own = template["metadata"] | {"name": name, "labels": labels, "ownerReferences": [owner_reference(one)]}
    store.create(PODS, namespace, {"metadata": own, "spec": template["spec"] | {"volumes": volumes}})
