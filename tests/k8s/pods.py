"""What a kubelet makes of a rendered pod: commands, variables, files and probes. Pure: nothing is started here."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Object = Mapping[str, Any]

PROBES = ("startup", "liveness", "readiness")
_REFERENCE = re.compile(r"\$(\$|\([A-Za-z_][A-Za-z0-9_]*\))")


class PodError(ValueError):
    """A kubelet would not start this pod, or this reader does not know what it asks for. The text says what."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What the cluster tells a pod of itself; stand-ins here."""

    name: str
    namespace: str = "prod"
    uid: str = "11111111-2222-3333-4444-555555555555"
    ip: str = "127.0.0.1"
    node: str = "node-1"

    def field(self, path: str) -> str:
        """The value of a fieldRef. Raises `PodError`."""
        fields = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "status.podIP": self.ip,
            "spec.nodeName": self.node,
        }
        if path not in fields:
            raise PodError(f"fieldRef {path} has no stand-in; there are {', '.join(fields)}")
        return fields[path]


@dataclass(frozen=True)
class Volume:
    """Where the files of a mount come from."""

    kind: str
    """`files` (a ConfigMap or Secret), `empty` (an emptyDir), `memory` (one of medium Memory), or `claim`."""
    name: str
    """Of the volume in the pod; of a claim, the claim's."""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class VolumeMount:
    """A volume and where a container sees it."""

    path: str
    volume: Volume
    read_only: bool = False
    sub_path: str = ""


@dataclass(frozen=True)
class Probe:
    """A probe by HTTP. Times in seconds, defaults as in Kubernetes."""

    path: str
    port: int
    period: float = 10
    timeout: float = 1
    failures: int = 3
    successes: int = 1
    initial_delay: float = 0


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container, ready to be started."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    mounts: Sequence[VolumeMount]
    ports: Mapping[str, int]
    probes: Mapping[str, Probe]
    security: Mapping[str, Any]
    """The container's securityContext over the pod's."""
    pre_stop_s: float = 0


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod, ready to be started: `init` one after the other, then `main`."""

    init: Sequence[Container]
    main: Container
    grace_s: float


def resolve(template: Object, objects: Sequence[Object], identity: Identity) -> Pod:
    """The pod of a pod template, with what it refers to among `objects`. Raises `PodError`."""
    spec = template["spec"]
    volumes = {volume["name"]: _volume(volume, objects) for volume in spec.get("volumes", ())}
    reader = _Reader(spec, objects, identity, volumes)
    (main,) = (container for container in spec["containers"])
    return Pod(
        init=[reader.container(one) for one in spec.get("initContainers", ())],
        main=reader.container(main),
        grace_s=spec.get("terminationGracePeriodSeconds", 30),
    )


@dataclass(frozen=True)
class _Reader:
    spec: Object
    objects: Sequence[Object]
    identity: Identity
    volumes: Mapping[str, Volume]

    def container(self, one: Object) -> Container:
        environment = self._environment(one)
        command = [expand(word, environment) for word in (*one.get("command", ()), *one.get("args", ()))]
        ports = {port["name"]: port["containerPort"] for port in one.get("ports", ())}
        return Container(
            name=one["name"],
            command=command,
            environment=environment,
            mounts=[self._mount(mount, one) for mount in one.get("volumeMounts", ())],
            ports=ports,
            probes={kind: _probe(one[f"{kind}Probe"], ports) for kind in PROBES if f"{kind}Probe" in one},
            security={**self.spec.get("securityContext", {}), **one.get("securityContext", {})},
            pre_stop_s=_pre_stop(one.get("lifecycle", {}).get("preStop")),
        )

    def _environment(self, one: Object) -> dict[str, str]:
        """In order: a variable may refer to those before it."""
        found: dict[str, str] = {}
        for source in one.get("envFrom", ()):
            found |= {f"{source.get('prefix', '')}{key}": value for key, value in self._data(source).items()}
        for entry in one.get("env", ()):
            if "value" in entry and "valueFrom" in entry:
                raise PodError(f"variable {entry['name']} has both value and valueFrom")
            if "valueFrom" in entry:
                found[entry["name"]] = self._from(entry["valueFrom"])
            else:
                value = entry.get("value", "")
                if not isinstance(value, str):
                    raise PodError(f"variable {entry['name']} is {value!r}, but must be a text: quote it")
                found[entry["name"]] = expand(value, found)
        return found

    def _from(self, source: Object) -> str:
        ((kind, reference),) = source.items()
        if kind == "fieldRef":
            return self.identity.field(reference["fieldPath"])
        if kind in ("configMapKeyRef", "secretKeyRef"):
            data = self._data({kind.removesuffix("KeyRef") + "Ref": {"name": reference["name"]}})
            if reference["key"] not in data:
                raise PodError(f"{reference['name']} has no key {reference['key']}; it has {', '.join(data)}")
            return data[reference["key"]]
        raise PodError(f"a variable from {kind} is not known here")

    def _data(self, source: Object) -> Mapping[str, str]:
        kind = next(key for key in source if key in ("configMapRef", "secretRef"))
        return data_of(self.objects, {"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], source[kind]["name"])

    def _mount(self, mount: Object, one: Object) -> VolumeMount:
        if mount["name"] not in self.volumes:
            raise PodError(f"container {one['name']} mounts {mount['name']}, which is no volume of its pod")
        volume = self.volumes[mount["name"]]
        read_only = mount.get("readOnly", False) or volume.kind == "files"
        return VolumeMount(mount["mountPath"].rstrip("/"), volume, read_only, mount.get("subPath", ""))


def expand(text: str, values: Mapping[str, str]) -> str:
    """`text` with each `$(NAME)` replaced; `$$` is a dollar, and names that are not known stay."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else values.get(match[1][1:-1], match[0])

    return _REFERENCE.sub(value, text)


def data_of(objects: Sequence[Object], kind: str, name: str) -> Mapping[str, str]:
    """The texts of a ConfigMap or Secret. Raises `PodError`."""
    for each in objects:
        if each["kind"] == kind and each["metadata"]["name"] == name:
            return {**each.get("data", {}), **each.get("stringData", {})}
    raise PodError(f"there is no {kind} {name}")


def _volume(volume: Object, objects: Sequence[Object]) -> Volume:
    name = volume["name"]
    kind = next(key for key in volume if key != "name")
    source = volume[kind] or {}
    match kind:
        case "emptyDir":
            return Volume("memory" if source.get("medium") == "Memory" else "empty", name)
        case "configMap":
            return Volume("files", name, data_of(objects, "ConfigMap", source["name"]))
        case "secret":
            return Volume("files", name, data_of(objects, "Secret", source["secretName"]))
        case "persistentVolumeClaim":
            return Volume("claim", source["claimName"])
    raise PodError(f"volume {name} is of kind {kind}, which is not known here")


def _probe(probe: Object, ports: Mapping[str, int]) -> Probe:
    if "httpGet" not in probe:
        raise PodError(f"a probe by {', '.join(probe)} is not known here")
    get = probe["httpGet"]
    port = get["port"]
    if isinstance(port, str) and port not in ports:
        raise PodError(f"a probe asks port {port}; the container's are {', '.join(ports)}")
    return Probe(
        get["path"],
        ports[port] if isinstance(port, str) else port,
        period=probe.get("periodSeconds", 10),
        timeout=probe.get("timeoutSeconds", 1),
        failures=probe.get("failureThreshold", 3),
        successes=probe.get("successThreshold", 1),
        initial_delay=probe.get("initialDelaySeconds", 0),
    )


def _pre_stop(hook: Object | None) -> float:
    if hook is None:
        return 0
    if "sleep" not in hook:
        raise PodError(f"a preStop hook by {', '.join(hook)} is not known here")
    return float(hook["sleep"]["seconds"])


def moved(pod: Pod, ports: Mapping[int, int], paths: Mapping[str, str], variables: Mapping[str, str]) -> Pod:
    """`pod` where its ports and paths are others, and `variables` win over its own.

    Ports are replaced where a word or a variable is the number or ends in `=` and the number, paths where one is the
    path or lies under it. Raises `PodError` for a declared port that stands nowhere: it could not be pinned.
    """
    seen: set[int] = set()

    def word(text: str) -> str:
        head, equals, tail = text.rpartition("=")
        if tail.isdigit() and int(tail) in ports:
            seen.add(int(tail))
            return f"{head}{equals}{ports[int(tail)]}"
        for path in sorted(paths, key=len, reverse=True):
            if tail == path or tail.startswith(f"{path}/"):
                return f"{head}{equals}{paths[path]}{tail[len(path) :]}"
        return text

    def container(one: Container) -> Container:
        return replace(
            one,
            command=[word(each) for each in one.command],
            environment={key: word(value) for key, value in one.environment.items()} | dict(variables),
            ports={name: ports.get(number, number) for name, number in one.ports.items()},
            probes={kind: replace(probe, port=ports.get(probe.port, probe.port)) for kind, probe in one.probes.items()},
        )

    result = replace(pod, init=[container(one) for one in pod.init], main=container(pod.main))
    lost = set(pod.main.ports.values()) & ports.keys() - seen
    if lost:
        raise PodError(f"port {', '.join(map(str, lost))} is declared, but no word and no variable sets it")
    return result


def containers(pod: Pod) -> Iterator[Container]:
    """All containers of a pod."""
    yield from pod.init
    yield pod.main
