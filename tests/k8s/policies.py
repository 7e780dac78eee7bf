"""NetworkPolicies against the connections that are there: which pod really talks to which, and whether it may."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil

from tests.k8s.api_store import DEPLOYMENTS, Object
from tests.k8s.cluster import Cluster
from tests.k8s.helm_client import NAMESPACE

COMPONENT = "app.kubernetes.io/component"
OUTSIDE = "outside"
DRAWN = "drawn"


class Flow(NamedTuple):
    """A connection to a pod."""

    source: str
    """Component of the pod that connects, or `outside`."""
    target: str
    name: str
    """Of a declared port, or `drawn` for one that Dynamo chose."""
    port: int
    """As the chart has it; a drawn one as it is."""


class Listening(NamedTuple):
    """A port of a pod."""

    component: str
    name: str
    port: int


def listening(found: Cluster) -> dict[int, Listening]:
    """What the pods listen on, by the port on this machine."""
    ports: dict[int, Listening] = {}
    for component in ("frontend", "worker"):
        declared = _declared(found, component)
        for pod in found.running(component):
            names = {here: name for name, here in pod.pod.main.ports.items()}
            for connection in psutil.Process(pod.pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    here = connection.laddr.port
                    name = names.get(here, DRAWN)
                    ports[here] = Listening(component, name, declared.get(name, here))
    return ports


def flows(found: Cluster) -> set[Flow]:
    """All connections between pods, and from this process to pods, at this moment."""
    targets, result = listening(found), set()
    processes = [("frontend", pod.pid) for pod in found.running("frontend")]
    processes += [("worker", pod.pid) for pod in found.running("worker")]
    for source, pid in (*processes, (OUTSIDE, psutil.Process().pid)):
        for connection in psutil.Process(pid).net_connections("tcp"):
            target = targets.get(connection.raddr.port) if connection.raddr else None
            if target and connection.status == psutil.CONN_ESTABLISHED:
                result.add(Flow(source, *target))
    return result


def _declared(found: Cluster, component: str) -> dict[str, int]:
    """Ports by their names, as the chart's template has them."""
    template = found.store.get(DEPLOYMENTS, NAMESPACE, f"demo-pagelane-{component}")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def admitted(policies: Sequence[Object], flow: Flow) -> bool:
    """Whether Kubernetes lets a connection in: every pod here that a policy selects is closed but for its rules."""
    selecting = [one for one in policies if _selects(one["spec"]["podSelector"], flow.target)]
    return not selecting or any(_lets_in(rule, flow) for one in selecting for rule in one["spec"]["ingress"])


def without_one_rule(policies: Sequence[Object]) -> Iterator[tuple[Object, list[Object]]]:
    """Each rule, and the policies without it."""
    for number, policy in enumerate(policies):
        rules = policy["spec"]["ingress"]
        for rule in rules:
            rest = {"spec": policy["spec"] | {"ingress": [other for other in rules if other is not rule]}}
            yield rule, [*policies[:number], rest, *policies[number + 1 :]]


def _selects(selector: Object, component: str) -> bool:
    return bool(selector["matchLabels"][COMPONENT] == component)


def _lets_in(rule: Object, flow: Flow) -> bool:
    sources = rule.get("from")
    from_there = sources is None or any(_selects(peer["podSelector"], flow.source) for peer in sources)
    return from_there and any(port["port"] <= flow.port <= port.get("endPort", port["port"]) for port in rule["ports"])
