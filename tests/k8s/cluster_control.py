"""The controllers that discovery and roll-outs lean on, as functions from objects to objects.

EndpointSlices of Services and pods, ReplicaSets of Deployments in the sizes of a rolling update, pods of ReplicaSets;
StatefulSets are in `cluster_sets`.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from tests.k8s.api_store import ACCOUNTS, DEPLOYMENTS, PODS, REPLICA_SETS, SLICES, Object, Store

HASH = "pod-template-hash"


class Count(NamedTuple):
    """Pods of one ReplicaSet."""

    size: int
    available: int


def condition(obj: Object, kind: str) -> Object:
    """A condition of an object's status, empty if it has none of that kind."""
    found: list[Object] = obj.get("status", {}).get("conditions", [])
    return next((one for one in found if one["type"] == kind), {})


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def is_leaving(pod: Object) -> bool:
    """Whether it has been deleted and has not ended."""
    return "deletionTimestamp" in pod["metadata"]


def is_available(pod: Object, min_ready_s: float) -> bool:
    """Whether it has been ready for so long."""
    if not is_ready(pod):
        return False
    since = datetime.fromisoformat(condition(pod, "Ready")["lastTransitionTime"])
    return (datetime.now(UTC) - since).total_seconds() >= min_ready_s


def owned(store: Store, owner: Object) -> list[Object]:
    """Pods or ReplicaSets that an object owns."""
    uid, namespace = owner["metadata"]["uid"], owner["metadata"]["namespace"]
    candidates = store.all(PODS, namespace) + store.all(REPLICA_SETS, namespace)
    return [one for one in candidates if any(r["uid"] == uid for r in one["metadata"].get("ownerReferences", ()))]


def template_hash(template: Object) -> str:
    """What tells pods of one template from those of another."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def has_account(store: Store, namespace: str, template: Object) -> bool:
    """Whether there is the account of a template's pods. Kubernetes refuses them without it, and tries again."""
    account = template["spec"].get("serviceAccountName", "default")
    return store.find(ACCOUNTS, namespace, account) is not None


def owner_reference(obj: Object) -> Object:
    metadata = obj["metadata"]
    named = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": metadata["name"], "uid": metadata["uid"]}
    return named | {"controller": True, "blockOwnerDeletion": True}


def reconcile_slice(store: Store, service: Object) -> None:
    """The EndpointSlice of a Service: it has the Service's labels, and what the Service selects."""
    metadata, spec = service["metadata"], service["spec"]
    if not spec.get("selector"):
        return
    pods = [
        pod
        for pod in store.all(PODS, metadata["namespace"])
        if spec["selector"].items() <= pod["metadata"].get("labels", {}).items() and "podIP" in pod.get("status", {})
    ]
    name = f"{metadata['name']}-{metadata['uid'][:5]}"
    managed = {
        "kubernetes.io/service-name": metadata["name"],
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
    }
    wanted = {
        "metadata": {
            "name": name,
            "labels": metadata.get("labels", {}) | managed,
            "ownerReferences": [owner_reference(service)],
        },
        "addressType": "IPv4",
        "endpoints": [endpoint(pod, spec.get("publishNotReadyAddresses", False)) for pod in pods],
    }
    make = store.update if store.find(SLICES, metadata["namespace"], name) else store.create
    make(SLICES, metadata["namespace"], wanted)


def endpoint(pod: Object, publish_not_ready: bool) -> Object:
    """A pod as its EndpointSlice has it."""
    metadata, serving, leaving = pod["metadata"], is_ready(pod), is_leaving(pod)
    ready = publish_not_ready or (serving and not leaving)
    return {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": ready, "serving": serving, "terminating": leaving},
        "targetRef": {"kind": "Pod", **{key: metadata[key] for key in ("name", "namespace", "uid")}},
    }


def reconcile_deployment(store: Store, deployment: Object) -> None:
    """The ReplicaSet of the newest template, the sizes of all, and what the Deployment's status says of them."""
    metadata, spec = deployment["metadata"], deployment["spec"]
    namespace, wanted = metadata["namespace"], spec.get("replicas", 1)
    digest = template_hash(spec["template"])
    name = f"{metadata['name']}-{digest}"
    sets = {one["metadata"]["name"]: one for one in owned(store, deployment)}
    if name not in sets:
        sets[name] = store.create(REPLICA_SETS, namespace, _replica_set(deployment, name, digest))
    min_ready_s = spec.get("minReadySeconds", 0)
    pods = {key: [pod for pod in owned(store, one) if not is_leaving(pod)] for key, one in sets.items()}
    available = {key: sum(is_available(pod, min_ready_s) for pod in group) for key, group in pods.items()}
    counts = {key: Count(one["spec"]["replicas"], available[key]) for key, one in sets.items()}
    others = [key for key in sets if key != name]
    rolling = spec.get("strategy", {}).get("rollingUpdate", {})
    surge = absolute(rolling.get("maxSurge", "25%"), wanted, up=True)
    unavailable = absolute(rolling.get("maxUnavailable", "25%"), wanted, up=False)
    new, olds = sizes(wanted, surge, unavailable, counts[name], [counts[key] for key in others])
    for key, size in ((name, new), *zip(others, olds, strict=True)):
        store.merge(REPLICA_SETS, namespace, key, {"spec": {"replicas": size}})
    ready = sum(is_ready(pod) for group in pods.values() for pod in group)
    total, usable, updated = sum(map(len, pods.values())), sum(available.values()), len(pods[name])
    done = updated == total == usable == wanted
    status = {
        "observedGeneration": metadata["generation"],
        **{"replicas": total, "updatedReplicas": updated, "readyReplicas": ready, "availableReplicas": usable},
        "unavailableReplicas": max(0, wanted - usable),
        "conditions": [
            {"type": "Available", "status": str(usable >= wanted - unavailable)},
            {
                "type": "Progressing",
                "status": "True",
                "reason": "NewReplicaSetAvailable" if done else "ReplicaSetUpdated",
            },
        ],
    }
    store.merge(DEPLOYMENTS, namespace, metadata["name"], {"status": status})


def _replica_set(deployment: Object, name: str, digest: str) -> Object:
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"] | {HASH: digest}
    return {
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner_reference(deployment)]},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": deployment["spec"]["selector"]["matchLabels"] | {HASH: digest}},
            "template": template | {"metadata": template["metadata"] | {"labels": labels}},
        },
    }


def absolute(value: int | str, replicas: int, up: bool) -> int:
    """maxSurge or maxUnavailable as a number; a share of the replicas is rounded `up` or down."""
    if isinstance(value, int):
        return value
    hundredths = int(value.removesuffix("%")) * replicas
    return -(-hundredths // 100) if up else hundredths // 100


def sizes(wanted: int, surge: int, unavailable: int, new: Count, olds: Sequence[Count]) -> tuple[int, list[int]]:
    """The next sizes of a rolling update, as Kubernetes' Deployment controller computes them."""
    unavailable = unavailable if surge or unavailable else 1
    total = new.size + sum(old.size for old in olds)
    least = wanted - unavailable
    room = max(0, wanted + surge - total)
    grown = min(new.size + room, wanted)
    # How many old ones may go, if those of the new ones that are not available never will be.
    spare = max(0, total - least - (new.size - new.available))
    result = []
    for old in olds:
        broken = min(old.size - old.available, spare)
        spare -= broken
        result.append(old.size - broken)
    spare = min(spare, max(0, new.available + sum(old.available for old in olds) - least))
    for number, size in enumerate(result):
        gone = min(size, spare)
        spare -= gone
        result[number] = size - gone
    return grown, result


def reconcile_pods(store: Store, replica_set: Object) -> None:
    """As many pods as the ReplicaSet wants; those that are not ready go first."""
    metadata, spec = replica_set["metadata"], replica_set["spec"]
    namespace, template = metadata["namespace"], spec["template"]
    pods = sorted((pod for pod in owned(store, replica_set) if not is_leaving(pod)), key=is_ready)
    for pod in pods[: max(0, len(pods) - spec["replicas"])]:
        store.delete(PODS, namespace, pod["metadata"]["name"])
    for _ in range(spec["replicas"] - len(pods) if has_account(store, namespace, template) else 0):
        name = f"{metadata['name']}-{secrets.token_hex(3)[:5]}"
        own = template["metadata"] | {"name": name, "ownerReferences": [owner_reference(replica_set)]}
        store.create(PODS, namespace, {"metadata": own, "spec": template["spec"]})
