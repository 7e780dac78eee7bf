"""The chart installed by helm into a stand-in cluster: by Kubernetes' discovery its pods find each other."""

import asyncio

import pytest

from tests.k8s.api_store import ACCOUNTS, BINDINGS, DEPLOYMENTS, PODS, ROLES, Object
from tests.k8s.cluster import Cluster
from tests.k8s.cluster_control import is_ready
from tests.k8s.helm_client import NAMESPACE
from tests.k8s.served import METADATA, client, found_workers, models, own_network, wait_for_workers
from tests.stack import eventually

pytestmark = pytest.mark.k8s

COMPONENTS = ("frontend", "worker")


async def test_two_workers_are_found_and_a_prefix_goes_where_it_lies(served: Cluster) -> None:
    first, second = served.running("frontend")
    for frontend in (first, second):
        await wait_for_workers(frontend, 2)
    prompts = [[37 + (number * 31 + i * (7 + number)) % 50 for i in range(100)] for number in range(8)]
    async with client(first) as one, client(second) as other:
        for api, cached in ((one, 0), (one, 96)):
            for prompt in prompts:
                reply = await api.complete(prompt, max_tokens=2, ignore_eos=True)
                assert (reply.status, reply.cached_tokens) == (200, cached), reply.error
            await asyncio.sleep(0.5)  # events reach both frontends
        # What went by the first frontend, the second one knows by the workers' events.
        assert [(await other.complete(p, max_tokens=2, ignore_eos=True)).cached_tokens for p in prompts] == [96] * 8


def published(served: Cluster) -> set[str]:
    """Pods that stand in discovery."""
    return {obj["metadata"]["name"] for obj in served.store.all(METADATA, NAMESPACE)}


async def test_a_worker_that_is_deleted_leaves_at_once_and_its_metadata_goes_with_its_pod(served: Cluster) -> None:
    frontends, before = served.running("frontend"), {pod.name for pod in served.running("worker")}
    assert published(served) >= before
    gone = min(before)
    served.store.delete(PODS, NAMESPACE, gone)
    for frontend in frontends:
        await wait_for_workers(frontend, 1, 2)
    assert gone in published(served), "the pod is not gone yet"
    served.wait("two ready workers", lambda: sum(map(is_ready, served.pods("worker"))) == 2, 40)
    served.wait("its metadata collected", lambda: gone not in published(served), 20)
    (ended,) = (one for one in served.kubelet.ended if one.pod == gone)
    assert (ended.code, ended.why) == (0, "deleted")
    for frontend in frontends:
        await wait_for_workers(frontend, 2)


def role(served: Cluster, component: str) -> list[Object]:
    """The rules of a component's account."""
    found: list[Object] = served.store.get(ROLES, NAMESPACE, f"demo-pagelane-{component}")["rules"]
    return found


def granted(rules: list[Object]) -> set[tuple[str, str, str]]:
    """Group, resource and verb of all that rules allow."""
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


@own_network
@pytest.mark.parametrize("component", COMPONENTS)
async def test_a_role_allows_the_calls_that_are_made_and_no_others(served: Cluster, component: str) -> None:
    for frontend in served.running("frontend"):
        await wait_for_workers(frontend, 2)
    calls = [call for call in served.calls if call.account == f"demo-pagelane-{component}"]
    made = {(call.group, call.resource, call.verb) for call in calls}
    # The apply that makes an object is a create, too.
    assert made | {("nvidia.com", "dynamoworkermetadatas", "create")} == granted(role(served, component))
    assert {call.code for call in calls} == {200}
    assert {call.namespace for call in calls} == {NAMESPACE}


def lacking(rules: list[Object], resource: str, verb: str) -> list[Object]:
    """The rules without a verb on a resource."""
    return [
        rule | {"verbs": [one for one in rule["verbs"] if one != verb or resource not in rule["resources"]]}
        for rule in rules
    ]


def start_lacking(served: Cluster, component: str, resource: str, verb: str) -> str:
    """A pod of the component, of an account of its own that lacks one right. Returns their name."""
    name = f"{component}-lacks-{verb}-{resource}"
    put, store = served.store.create, served.store
    put(ACCOUNTS, NAMESPACE, {"metadata": {"name": name}})
    put(ROLES, NAMESPACE, {"metadata": {"name": name}, "rules": lacking(role(served, component), resource, verb)})
    subject = {"kind": "ServiceAccount", "name": name}
    put(BINDINGS, NAMESPACE, {"metadata": {"name": name}, "roleRef": {"name": name}, "subjects": [subject]})
    template = store.get(DEPLOYMENTS, NAMESPACE, f"demo-pagelane-{component}")["spec"]["template"]
    metadata = template["metadata"] | {"name": name}
    put(PODS, NAMESPACE, {"metadata": metadata, "spec": template["spec"] | {"serviceAccountName": name}})
    return name


async def fate(served: Cluster, name: str) -> str:
    """What has become of a pod."""
    pod = served.store.get(PODS, NAMESPACE, name)
    if pod.get("status", {}).get("containerStatuses", [{}])[0].get("restartCount"):
        return "ends"
    if not is_ready(pod):
        return "never ready"
    if name.startswith("worker"):
        return "serves"
    frontend = served.kubelet.running[name]
    return f"finds {await found_workers(frontend)} workers" if await models(frontend) else "has no model"


FATES = {
    "frontend": {
        ("endpointslices", "list"): "never ready",
        ("endpointslices", "watch"): "finds 2 workers",
        ("dynamoworkermetadatas", "list"): "never ready",
        ("dynamoworkermetadatas", "watch"): "finds 2 workers",
        ("dynamoworkermetadatas", "create"): "has no model",
        ("dynamoworkermetadatas", "patch"): "has no model",
        ("nothing", "at-all"): "finds 5 workers",
    },
    "worker": {
        ("endpointslices", "list"): "never ready",
        ("endpointslices", "watch"): "serves",
        ("dynamoworkermetadatas", "list"): "never ready",
        ("dynamoworkermetadatas", "watch"): "serves",
        ("dynamoworkermetadatas", "create"): "ends",
        ("dynamoworkermetadatas", "patch"): "ends",
        ("nothing", "at-all"): "serves",
    },
}
"""What becomes of a pod whose account lacks a right, by what is taken away, where there are 2 workers and 3 come later.
A worker serves without its watches; it asks for them for as long as it lives.
"""


@own_network
async def test_every_rule_is_needed(served: Cluster) -> None:
    for component, fates in FATES.items():
        granted_rights = {(resource, verb) for _, resource, verb in granted(role(served, component))}
        assert granted_rights | {("nothing", "at-all")} == set(fates)
    names: dict[str, str] = {}
    try:
        for component, fates in FATES.items():
            names |= {start_lacking(served, component, *right): wanted for right, wanted in fates.items()}
            whole = f"{component}-lacks-at-all-nothing"
            served.wait(f"{whole} ready", lambda: is_ready(served.store.get(PODS, NAMESPACE, whole)), 60)  # noqa: B023

        async def fates_now() -> dict[str, str]:
            return {name: await fate(served, name) for name in names}

        assert await eventually(fates_now, lambda now: now == names, 40) == names
        refused = {(call.account, call.verb) for call in served.calls if call.code == 403}
        lacked = {(name, name.split("-")[2].replace("create", "patch")) for name in names if "nothing" not in name}
        assert refused == lacked
    finally:
        remove(served, *names)


def remove(served: Cluster, *names: str) -> None:
    """Have pods gone at once, as by a deletion without grace."""
    for name in names:
        served.store.remove(PODS, NAMESPACE, name)
        if name in served.kubelet.running:
            served.kubelet.running[name].kill()
