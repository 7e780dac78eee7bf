"""What is wrong with the objects of a manifest taken together: what schemas of single kinds cannot see."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from tests.helm.chart import Object, pods

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_IMAGE = re.compile(r"[^\s:@]+(:[0-9]+/[^\s:@]+)?:[\w][\w.-]{0,127}(@sha256:[0-9a-f]{64})?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi|)")
_UNITS = {"m": Decimal("0.001"), "": 1, **{u: 1000 ** (i + 1) for i, u in enumerate("kMGTP")}}
_UNITS |= {u: 1024 ** (i + 1) for i, u in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"))}
_REFERENCE = re.compile(r"\$\(([A-Za-z_][\w.-]*)\)")
_POLICIES = ("Always", "IfNotPresent", "Never")
_WORKLOADS = ("Deployment", "StatefulSet")

Pod = Mapping[str, Any]


def problems(objects: list[Object]) -> list[str]:
    """One line for each thing that is wrong."""
    found = [*_names(objects), *_selectors(objects), *_ports(objects), *_accounts(objects), *_discovery(objects)]
    for component, template in pods(objects):
        checks = (_volumes(template, objects), _containers(template), _quantities(template))
        found += [f"{component} pod: {problem}" for check in checks for problem in check]
    return found


def _names(objects: list[Object]) -> Iterator[str]:
    counts = Counter((obj["kind"], obj["metadata"]["name"]) for obj in objects)
    yield from (f"{kind} {name} stands {count} times" for (kind, name), count in counts.items() if count > 1)
    for obj in objects:
        kind, metadata = obj["kind"], obj["metadata"]
        pattern = {"Service": _SERVICE, **dict.fromkeys(_WORKLOADS, _LABEL)}.get(kind, _SUBDOMAIN)
        if not pattern.fullmatch(metadata["name"]):
            yield f"{kind} {metadata['name']}: not a name"
        if kind != "CustomResourceDefinition" and "namespace" not in metadata:
            yield f"{kind} {metadata['name']}: no namespace"
        for key, value in metadata.get("labels", {}).items():
            if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
                yield f"{kind} {metadata['name']}: label {key} cannot be {value!r}"


def _matching(selector: Mapping[str, str], objects: list[Object]) -> list[Pod]:
    return [template for _, template in pods(objects) if selector.items() <= template["metadata"]["labels"].items()]


def _selector_of(obj: Object) -> Iterator[Mapping[str, str]]:
    spec = obj.get("spec", {})
    if obj["kind"] == "Service":
        yield spec["selector"]
    elif obj["kind"] in ("PodDisruptionBudget", "PodMonitor", *_WORKLOADS):
        yield spec["selector"]["matchLabels"]
    elif obj["kind"] == "NetworkPolicy":
        yield spec["podSelector"]["matchLabels"]
        for rule in spec["ingress"]:
            yield from (peer["podSelector"]["matchLabels"] for peer in rule.get("from", ()) if "podSelector" in peer)


def _selectors(objects: list[Object]) -> Iterator[str]:
    for obj in objects:
        name = f"{obj['kind']} {obj['metadata']['name']}"
        for selector in _selector_of(obj):
            if not selector or len(_matching(selector, objects)) != 1:
                yield f"{name} selects {len(_matching(selector, objects))} kinds of pods by {dict(selector)}, not 1"
        if obj["kind"] in _WORKLOADS:
            labels = obj["spec"]["template"]["metadata"]["labels"]
            if not obj["spec"]["selector"]["matchLabels"].items() <= labels.items():
                yield f"{name} does not select its own pods"
        if obj["kind"] == "ServiceMonitor":
            wanted = obj["spec"]["selector"]["matchLabels"].items()
            services = [o for o in objects if o["kind"] == "Service" and wanted <= o["metadata"]["labels"].items()]
            if len(services) != 1:
                yield f"{name} selects {len(services)} Services, not 1"
    for component, template in pods(objects):
        for constraint in template["spec"].get("topologySpreadConstraints", ()):
            if not constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items():
                yield f"{component} pod: its topology spread counts other pods"


def _port_names(template: Pod) -> set[str]:
    return {port["name"] for container in template["spec"]["containers"] for port in container.get("ports", ())}


def _ports(objects: list[Object]) -> Iterator[str]:
    for obj in objects:
        name = f"{obj['kind']} {obj['metadata']['name']}"
        if obj["kind"] == "Service":
            for template in _matching(obj["spec"]["selector"], objects):
                wanted = {port["targetPort"] for port in obj["spec"]["ports"]}
                yield from (f"{name}: no port {port} on its pods" for port in wanted - _port_names(template))
        if obj["kind"] == "PodMonitor":
            for template in _matching(obj["spec"]["selector"]["matchLabels"], objects):
                wanted = {endpoint["port"] for endpoint in obj["spec"]["podMetricsEndpoints"]}
                yield from (f"{name}: no port {port} on its pods" for port in wanted - _port_names(template))
        if obj["kind"] == "ServiceMonitor":
            offered = {port["name"] for o in objects if o["kind"] == "Service" for port in o["spec"]["ports"]}
            wanted = {endpoint["port"] for endpoint in obj["spec"]["endpoints"]}
            yield from (f"{name}: no Service has a port {port}" for port in wanted - offered)


def _accounts(objects: list[Object]) -> Iterator[str]:
    accounts = {o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"}
    roles = {o["metadata"]["name"] for o in objects if o["kind"] == "Role"}
    for component, template in pods(objects):
        account = template["spec"].get("serviceAccountName")
        if account is not None and account not in accounts:
            yield f"{component} pod: no ServiceAccount {account}"
    for obj in objects:
        if obj["kind"] == "RoleBinding":
            if obj["roleRef"]["name"] not in roles:
                yield f"RoleBinding {obj['metadata']['name']}: no Role {obj['roleRef']['name']}"
            subjects = {subject["name"] for subject in obj["subjects"]}
            yield from (f"RoleBinding: no ServiceAccount {name}" for name in sorted(subjects - accounts))


def _discovery(objects: list[Object]) -> Iterator[str]:
    """Dynamo finds workers through EndpointSlices with a label, that have ready pods only."""
    services = [obj for obj in objects if obj["kind"] == "Service"]
    for service in services:
        if service["spec"].get("publishNotReadyAddresses"):
            yield f"Service {service['metadata']['name']} publishes not-ready addresses: dead workers stay listed"
    if services:
        labelled = [s for s in services if s["metadata"]["labels"].get("nvidia.com/dynamo-discovery-enabled") == "true"]
        found = {s["spec"]["selector"].get("app.kubernetes.io/component") for s in labelled}
        if "worker" not in found:
            yield "no Service over the workers has the label nvidia.com/dynamo-discovery-enabled: nothing is found"


def _volumes(template: Pod, objects: list[Object]) -> Iterator[str]:
    spec = template["spec"]
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    volumes |= {
        claim["metadata"]["name"]
        for obj in objects
        if obj.get("spec", {}).get("template") is template
        for claim in obj["spec"].get("volumeClaimTemplates", ())
    }
    used = set()
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        mounts = container.get("volumeMounts", ())
        used |= {mount["name"] for mount in mounts}
        yield from (f"{container['name']}: no volume {m['name']}" for m in mounts if m["name"] not in volumes)
        paths = Counter(mount["mountPath"] for mount in mounts)
        yield from (f"{container['name']}: {path} is mounted {n} times" for path, n in paths.items() if n > 1)
    yield from (f"nothing mounts the volume {name}" for name in sorted(volumes - used))
    maps = {obj["metadata"]["name"] for obj in objects if obj["kind"] == "ConfigMap"}
    for volume in spec.get("volumes", ()):
        if "configMap" in volume and volume["configMap"]["name"] not in maps:
            yield f"volume {volume['name']}: no ConfigMap {volume['configMap']['name']}"


def _containers(template: Pod) -> Iterator[str]:
    spec = template["spec"]
    names = Counter(container["name"] for container in (*spec.get("initContainers", ()), *spec["containers"]))
    yield from (f"container {name} stands {count} times" for name, count in names.items() if count > 1)
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        name = container["name"]
        if not _IMAGE.fullmatch(container.get("image", "")):
            yield f"{name}: {container.get('image', '')!r} is no image with a tag"
        if container.get("imagePullPolicy") not in _POLICIES:
            yield f"{name}: imagePullPolicy cannot be {container.get('imagePullPolicy')!r}"
        for field in ("startupProbe", "livenessProbe", "readinessProbe"):
            port = container.get(field, {}).get("httpGet", {}).get("port")
            if port is not None and port not in _port_names(template):
                yield f"{name}: {field} asks port {port}, which no container has"
        yield from (f"{name}: {problem}" for problem in _environment(container.get("env", ())))


def _environment(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    seen: set[str] = set()
    for entry in entries:
        if entry["name"] in seen:
            yield f"variable {entry['name']} is set twice"
        if not isinstance(entry.get("value", ""), str):
            yield f"variable {entry['name']} is no text"
        for reference in _REFERENCE.findall(str(entry.get("value", ""))):
            if reference not in seen:
                yield f"variable {entry['name']} refers to {reference}, which is not set before it"
        seen.add(entry["name"])


def _size(value: object) -> Decimal | None:
    found = _QUANTITY.fullmatch(str(value))
    return Decimal(found[1]) * _UNITS[found[2]] if found else None


def _quantities(template: Pod) -> Iterator[str]:
    spec = template["spec"]
    for volume in spec.get("volumes", ()):
        limit = volume.get("emptyDir", {}).get("sizeLimit", "1")
        if _size(limit) is None:
            yield f"volume {volume['name']}: {limit!r} is no size"
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        resources = container.get("resources", {})
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for name, value in (*requests.items(), *limits.items()):
            if _size(value) is None:
                yield f"{container['name']}: {name} cannot be {value!r}"
        for name in requests.keys() & limits.keys():
            asked, most = _size(requests[name]), _size(limits[name])
            if asked is not None and most is not None and asked > most:
                yield f"{container['name']}: asks for {requests[name]} of {name}, but may have {limits[name]}"
