"""What would fail without a word, on the chart served by a stand-in cluster: labels, addresses of dead pods, ports."""

import asyncio
from pathlib import Path

import pytest

from tests.k8s.api_store import SERVICES, Resource
from tests.k8s.cluster import Cluster
from tests.k8s.cluster_control import is_ready
from tests.k8s.helm_client import MODEL, NAMESPACE, sim_values
from tests.k8s.pods_run import RunningPod
from tests.k8s.policies import DRAWN, OUTSIDE, Flow, admitted, flows, listening, without_one_rule
from tests.k8s.served import client, models, own_network, wait_for_workers
from tests.stack import eventually, metrics

pytestmark = [pytest.mark.k8s, pytest.mark.faults]

WAIT = ("--wait", "--timeout", "60s")
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
        assert await eventually(lambda each=frontend: models(each), lambda now: not now) == []
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


async def test_while_the_api_server_is_away_all_serve_and_then_see_what_has_changed(served: Cluster) -> None:
    frontends = served.running("frontend")
    with served.api.away():
        served.store.merge(SERVICES, NAMESPACE, WORKERS, {"metadata": {"labels": {LABEL: None}}})
        for number in range(10):
            for frontend in frontends:
                async with client(frontend) as api:
                    assert (await api.complete([60 + number] * 20, max_tokens=2, ignore_eos=True)).status == 200
            await asyncio.sleep(0.1)
    for frontend in frontends:
        await wait_for_workers(frontend, 0)
    served.store.merge(SERVICES, NAMESPACE, WORKERS, {"metadata": {"labels": {LABEL: "true"}}})
    for frontend in frontends:
        await wait_for_workers(frontend, 2)


async def prompt_tokens(worker: RunningPod) -> float:
    """How many a worker has admitted."""
    return (await metrics(worker.url("system"))).total("pagelane_prompt_tokens_total")


async def test_a_second_release_in_the_namespace_is_a_world_of_its_own(served: Cluster, tiny: Path) -> None:
    served.helm.install(sim_values(tiny, worker__replicas=1), *WAIT, release="second")
    try:
        (other,), (worker,) = served.running("frontend", "second"), served.running("worker", "second")
        assert await eventually(lambda: models(other), bool) == [MODEL], "the same name as in the first release"
        for frontend in served.running("frontend"):
            async with client(frontend) as api:
                for number in range(8):
                    assert (await api.complete([40 + number] * 20, max_tokens=2, ignore_eos=True)).status == 200
        assert await prompt_tokens(worker) == 0
        before = [await prompt_tokens(one) for one in served.running("worker")]
        async with client(other) as api:
            for number in range(8):
                assert (await api.complete([60 + number] * 20, max_tokens=2, ignore_eos=True)).status == 200
        assert await prompt_tokens(worker) == 160
        assert [await prompt_tokens(one) for one in served.running("worker")] == before
    finally:
        served.helm.run("uninstall", "second")


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


@own_network
async def test_without_the_label_on_their_own_service_frontends_do_not_hear_of_each_other(served: Cluster) -> None:
    async def sync() -> bool:
        seen = await asyncio.to_thread(flows, served)
        return any((flow.source, flow.target) == ("frontend", "frontend") for flow in seen)

    for label, heard in (("true", True), (None, False), ("true", True)):
        served.store.merge(SERVICES, NAMESPACE, "demo-pagelane-frontend", {"metadata": {"labels": {LABEL: label}}})
        assert await eventually(sync, lambda now, wanted=heard: now is wanted, 10) is heard
