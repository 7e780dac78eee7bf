"""Each check of `objects.problems` sees the fault that it is for, planted into a manifest that has none."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.helm.chart import MORE_VALUES, Object, Render, find, main_container, pod
from tests.helm.objects import problems

pytestmark = pytest.mark.helm

Change = Callable[[list[Object]], Any]


@pytest.fixture(scope="module")
def manifest() -> list[Object]:
    values = (MORE_VALUES / "statefulset.yaml",)
    sets = ("rbac.create=true", "networkPolicy.enabled=true", "worker.replicas=2", "frontend.replicas=2")
    return Render(values=values, sets=sets).objects()


def worker(objects: list[Object]) -> Any:
    return pod(objects, "worker")["spec"]


def main(objects: list[Object]) -> Any:
    return main_container(objects, "worker")


def service(objects: list[Object]) -> Any:
    return find(objects, "Service", "demo-pagelane-worker")


FAULTS: dict[str, tuple[Change, str]] = {
    "twice": (lambda o: o.append(copy.deepcopy(service(o))), "Service demo-pagelane-worker stands 2 times"),
    "name": (lambda o: service(o)["metadata"].update(name="1worker"), "Service 1worker: not a name"),
    "dots in a workload's name": (
        lambda o: find(o, "StatefulSet")["metadata"].update(name="a.b"),
        "StatefulSet a.b: not a name",
    ),
    "namespace": (lambda o: service(o)["metadata"].pop("namespace"), "demo-pagelane-worker: no namespace"),
    "label": (
        lambda o: service(o)["metadata"]["labels"].update(team="a b"),
        "Service demo-pagelane-worker: label team cannot be 'a b'",
    ),
    "selector of a Service": (
        lambda o: service(o)["spec"]["selector"].update({"app.kubernetes.io/component": "wroker"}),
        "Service demo-pagelane-worker selects 0 kinds of pods",
    ),
    "selector of two": (
        lambda o: service(o)["spec"]["selector"].pop("app.kubernetes.io/component"),
        "Service demo-pagelane-worker selects 2 kinds of pods",
    ),
    "selector of a workload": (
        lambda o: find(o, "StatefulSet")["spec"]["selector"]["matchLabels"].update(a="b"),
        "StatefulSet demo-pagelane-worker does not select its own pods",
    ),
    "selector of a budget": (
        lambda o: find(o, "PodDisruptionBudget", "demo-pagelane-frontend")["spec"]["selector"].update(matchLabels={}),
        "PodDisruptionBudget demo-pagelane-frontend selects 2 kinds of pods",
    ),
    "peer of a policy": (
        lambda o: find(o, "NetworkPolicy", "demo-pagelane-worker")["spec"]["ingress"][0]["from"][0].update(
            podSelector={"matchLabels": {"app": "frontend"}}
        ),
        "NetworkPolicy demo-pagelane-worker selects 0 kinds of pods",
    ),
    "selector of a monitor": (
        lambda o: find(o, "ServiceMonitor", "demo-pagelane-worker")["spec"]["selector"]["matchLabels"].update(a="b"),
        "ServiceMonitor demo-pagelane-worker selects 0 Services",
    ),
    "spread": (
        lambda o: worker(o)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(a="b"),
        "worker pod: its topology spread counts other pods",
    ),
    "port of a Service": (
        lambda o: service(o)["spec"]["ports"][0].update(targetPort="sytem"),
        "Service demo-pagelane-worker: no port sytem on its pods",
    ),
    "port of a monitor": (
        lambda o: find(o, "ServiceMonitor", "demo-pagelane-worker")["spec"]["endpoints"][0].update(port="metrics"),
        "ServiceMonitor demo-pagelane-worker: no Service has a port metrics",
    ),
    "port of a probe": (
        lambda o: main(o)["livenessProbe"]["httpGet"].update(port="health"),
        "main: livenessProbe asks port health",
    ),
    "account of a pod": (
        lambda o: worker(o).update(serviceAccountName="nobody"),
        "worker pod: no ServiceAccount nobody",
    ),
    "account of a binding": (
        lambda o: find(o, "RoleBinding", "demo-pagelane-worker")["subjects"][0].update(name="nobody"),
        "RoleBinding: no ServiceAccount nobody",
    ),
    "role of a binding": (
        lambda o: find(o, "RoleBinding", "demo-pagelane-worker")["roleRef"].update(name="none"),
        "RoleBinding demo-pagelane-worker: no Role none",
    ),
    "addresses that are not ready": (
        lambda o: service(o)["spec"].update(publishNotReadyAddresses=True),
        "Service demo-pagelane-worker publishes not-ready addresses",
    ),
    "discovery's label": (
        lambda o: service(o)["metadata"]["labels"].pop("nvidia.com/dynamo-discovery-enabled"),
        "no Service over the workers has the label nvidia.com/dynamo-discovery-enabled",
    ),
    "mount without a volume": (
        lambda o: worker(o)["volumes"].pop(),
        "main: no volume",
    ),
    "volume without a mount": (
        lambda o: worker(o)["volumes"].append({"name": "spare", "emptyDir": {}}),
        "nothing mounts the volume spare",
    ),
    "two mounts at one place": (
        lambda o: main(o)["volumeMounts"].append({"name": "tmp", "mountPath": "/cache"}),
        "main: /cache is mounted 2 times",
    ),
    "claim of a StatefulSet": (
        lambda o: find(o, "StatefulSet")["spec"].pop("volumeClaimTemplates"),
        "main: no volume cache",
    ),
    "ConfigMap": (
        lambda o: worker(o)["volumes"][0]["configMap"].update(name="other"),
        "volume config: no ConfigMap other",
    ),
    "two containers of one name": (
        lambda o: worker(o)["initContainers"][0].update(name="main"),
        "container main stands 2 times",
    ),
    "no image": (lambda o: main(o).update(image=""), "main: '' is no image with a tag"),
    "image without a tag": (lambda o: main(o).update(image="pagelane"), "main: 'pagelane' is no image with a tag"),
    "pull policy": (
        lambda o: main(o).update(imagePullPolicy="Sometimes"),
        "main: imagePullPolicy cannot be 'Sometimes'",
    ),
    "variable twice": (
        lambda o: main(o)["env"].append({"name": "HOME", "value": "/root"}),
        "main: variable HOME is set twice",
    ),
    "number as a variable": (
        lambda o: main(o)["env"].append({"name": "X", "value": 1}),
        "main: variable X is no text",
    ),
    "variable used before it is set": (
        lambda o: main(o)["env"].insert(0, {"name": "X", "value": "$(POD_IP)"}),
        "main: variable X refers to POD_IP",
    ),
    "quantity": (
        lambda o: main(o)["resources"]["limits"].update(memory="32GiB"),
        "main: memory cannot be '32GiB'",
    ),
    "request above the limit": (
        lambda o: main(o)["resources"]["requests"].update(memory="33Gi"),
        "main: asks for 33Gi of memory, but may have 32Gi",
    ),
    "size of a volume": (
        lambda o: next(v for v in worker(o)["volumes"] if v["name"] == "tmp")["emptyDir"].update(sizeLimit="8GB"),
        "volume tmp: '8GB' is no size",
    ),
}


def test_the_manifest_has_no_fault(manifest: list[Object]) -> None:
    assert problems(manifest) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault: str, manifest: list[Object]) -> None:
    change, words = FAULTS[fault]
    objects = copy.deepcopy(manifest)
    change(objects)
    assert any(words in problem for problem in problems(objects)), problems(objects)
