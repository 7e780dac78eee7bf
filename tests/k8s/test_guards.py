"""What would fail without a word, on the chart served by a stand-in cluster: labels, addresses of dead pods, ports."""

import asyncio

import pytest

from tests.k8s.api_store import SERVICES, Resource
from tests.k8s.cluster import Cluster
from tests.k8s.cluster_control import is_ready
from tests.k8s.helm_client import NAMESPACE
from tests.k8s.policies import DRAWN, OUTSIDE, Flow, admitted, flows, listening, without_one_rule
from tests.k8s.served import client, listed, own_network, wait_for_workers
from tests.stack import eventually

pytestmark = pytest.mark.k8s

LABEL = "nvidia.com/dynamo-discovery-enabled"
WORKERS = "demo-pagelane-worker"
POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")


async def test_without_the_label_on_the_service_nothing_is_found_and_all_is_green(served: Cluster) -> None:
    frontends = served.running("frontend")
    for frontend in frontends:
        await wait_for_workers(frontend, 2)
    served.store.merge(SERVICES, NAMESPACE, WORKERS, {"metadata": {"labels": {LABEL: None}}})
    for frontend in frontends:
        await wait_for_workers(frontend, 0)
        assert await eventually(lambda each=frontend: listed(each), lambda has: not has) is False
        assert frontend.look(frontend.pod.main.probes["readiness"]).status == 200
    assert all(map(is_ready, served.pods("worker")))
    served.store.merge(SERVICES, NAMESPACE, WORKERS, {"metadata": {"labels": {LABEL: "true"}}})
    for frontend in frontends:
        await wait_for_workers(frontend, 2)


async def test_a_dead_worker_stays_listed_only_with_addresses_of_pods_that_are_not_ready(served: Cluster) -> None:
    (frontend, _), (worker, _) = served.running("frontend"), served.running("worker")
    served.kubelet.restart_s = 3
    worker.kill()
    await wait_for_workers(frontend, 1, 2)
    for publishes, number in ((True, 2), (None, 1)):
        served.store.merge(SERVICES, NAMESPACE, WORKERS, {"spec": {"publishNotReadyAddresses": publishes}})
        await wait_for_workers(frontend, number, 2)
        assert not all(map(is_ready, served.pods("worker")))
    served.wait("restarted", lambda: all(map(is_ready, served.pods("worker"))))
    await wait_for_workers(frontend, 2)


async def seen_flows(served: Cluster) -> set[Flow]:
    """Connections while both frontends stream from workers and a kubelet asks."""
    seen: set[Flow] = set()
    first, second = served.running("frontend")
    async with client(first) as one, client(second) as other:
        streams = [
            asyncio.create_task(api.complete([50 + number] * 40, True, max_tokens=200, ignore_eos=True))
            for api in (one, other)
            for number in range(4)
        ]
        while not all(stream.done() for stream in streams):
            for worker in served.running("worker"):
                await asyncio.to_thread(worker.look, worker.pod.main.probes["readiness"])
            seen |= await asyncio.to_thread(flows, served)
            await asyncio.sleep(0.05)
        assert {stream.result().status for stream in streams} == {200}
    return seen


@own_network
async def test_the_network_policies_admit_what_connects_and_no_rule_is_idle(served: Cluster) -> None:
    for frontend in served.running("frontend"):
        await wait_for_workers(frontend, 2)
    seen = await seen_flows(served)
    seen.add(Flow(OUTSIDE, "worker", "system", 9090))  # a probe's connection is gone before it is seen
    assert {flow[:3] for flow in seen} == {
        (OUTSIDE, "frontend", "http"),
        (OUTSIDE, "worker", "system"),
        ("frontend", "worker", "rpc"),
        ("frontend", "worker", DRAWN),
        ("worker", "frontend", "responses"),
        ("frontend", "frontend", DRAWN),
    }
    policies = served.store.all(POLICIES, NAMESPACE)
    assert [flow for flow in seen if not admitted(policies, flow)] == []
    for rule, rest in without_one_rule(policies):
        assert not all(admitted(rest, flow) for flow in seen), f"nothing needs {rule}"
    for component, declared in (("frontend", {"http", "responses"}), ("worker", {"system", "rpc"})):
        names = {port.name for port in listening(served).values() if port.component == component}
        assert names == declared | {DRAWN}
