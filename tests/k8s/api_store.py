"""What a stand-in Kubernetes API server stores: objects, their versions, who applied what, and all changes in order.

Behaves as Kubernetes does in what the tests rely on: versions and generations, conflicts, merge and apply patches,
owners, custom resources that exist and are checked as their definition says, pods that a kubelet has to end.
Simpler than Kubernetes: nobody else's fields conflict with an apply, and lists are replaced as a whole.
"""

import copy
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tests.helm.crds import problems

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace, empty for what has none, and name."""


class ApiError(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Resource(NamedTuple):
    """A kind of object and the path at which it is served."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
SLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
BUILT_IN = (
    *(PODS, SERVICES, CLAIMS, ACCOUNTS, DEPLOYMENTS, STATEFUL_SETS, REPLICA_SETS, SLICES, ROLES, BINDINGS, DEFINITIONS),
    Resource("", "v1", "namespaces", "Namespace", namespaced=False),
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "secrets", "Secret"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
)


@dataclass(frozen=True)
class Event:
    """A change: of a new object `old` is None, of a removed one `new`."""

    version: int
    resource: Resource
    old: Object | None
    new: Object | None


class Store:
    """All objects. Those that it returns are its own: copy before you change one."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Held for every access, notified of every change."""
        self.version = 1
        self.events: list[Event] = []
        self._objects: dict[Resource, dict[Key, Object]] = {}
        self._applied: dict[tuple[Resource, Key, str], Object] = {}

    def resources(self) -> list[Resource]:
        """All that is served now: what is built in, and what definitions define."""
        found = list(BUILT_IN)
        for definition in self.all(DEFINITIONS):
            spec = definition["spec"]
            names, namespaced = spec["names"], spec["scope"] == "Namespaced"
            versions = (version["name"] for version in spec["versions"] if version["served"])
            found += [Resource(spec["group"], name, names["plural"], names["kind"], namespaced) for name in versions]
        return found

    def resource_of(self, obj: Object) -> Resource:
        """What an object is one of. Raises `ApiError`."""
        for resource in self.resources():
            if (resource.api_version, resource.kind) == (obj["apiVersion"], obj["kind"]):
                return resource
        raise ApiError(404, "NotFound", f"no kind {obj['kind']} of {obj['apiVersion']} is served")

    def all(self, resource: Resource, namespace: str = "") -> list[Object]:
        """All objects of a resource, those of one namespace if it is given."""
        with self.changed:
            found = self._objects.get(resource, {})
            return [obj for (place, _), obj in found.items() if namespace in ("", place)]

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.changed:
            return self._objects.get(resource, {}).get((namespace, name))

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Raises `ApiError` if there is none."""
        found = self.find(resource, namespace, name)
        if found is None:
            full = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
            raise ApiError(404, "NotFound", f'{full} "{name}" not found')
        return found

    def create(self, resource: Resource, namespace: str, obj: Object) -> Object:
        """Raises `ApiError` if it is there already, or cannot be."""
        with self.changed:
            name = obj["metadata"]["name"]
            if self.find(resource, namespace, name):
                raise ApiError(409, "AlreadyExists", f'{resource.plural} "{name}" already exists')
            return self._write(resource, namespace, obj)

    def update(self, resource: Resource, namespace: str, obj: Object) -> Object:
        """Replace an object. Raises `ApiError`: 409 if `obj` names another version than the last."""
        with self.changed:
            old = self.get(resource, namespace, obj["metadata"]["name"])
            version = obj["metadata"].get("resourceVersion", old["metadata"]["resourceVersion"])
            if version != old["metadata"]["resourceVersion"]:
                raise ApiError(409, "Conflict", f"{obj['metadata']['name']} has been modified since version {version}")
            return self._write(resource, namespace, obj)

    def merge(self, resource: Resource, namespace: str, name: str, patch: Object) -> Object:
        """A merge patch (RFC 7386). Raises `ApiError`."""
        with self.changed:
            return self._write(resource, namespace, merged(self.get(resource, namespace, name), patch))

    def apply(self, resource: Resource, namespace: str, name: str, obj: Object, manager: str) -> Object:
        """A server-side apply: what the manager has applied before and now leaves out goes. Raises `ApiError`."""
        with self.changed:
            key = (resource, (namespace, name), manager)
            old = self.find(resource, namespace, name) or {"metadata": {"name": name}}
            new = merged(without(old, self._applied.get(key, {}), obj), obj)
            written = self._write(resource, namespace, new)
            self._applied[key] = copy.deepcopy(obj)
            return written

    def delete(self, resource: Resource, namespace: str, name: str) -> Object:
        """Remove an object and what it owns; a pod is only marked, until `remove`. Raises `ApiError`."""
        with self.changed:
            old = self.get(resource, namespace, name)
            if resource != PODS:
                return self.remove(resource, namespace, name)
            if "deletionTimestamp" in old["metadata"]:
                return old
            return self.merge(resource, namespace, name, {"metadata": {"deletionTimestamp": now()}})

    def remove(self, resource: Resource, namespace: str, name: str) -> Object:
        """Remove an object for good, and what it owns. Raises `ApiError`."""
        with self.changed:
            old = self.get(resource, namespace, name)
            del self._objects[resource][(namespace, name)]
            for key in [key for key in self._applied if key[:2] == (resource, (namespace, name))]:
                del self._applied[key]
            self._record(Event(self._next(), resource, old, None))
            for owned, (place, owned_name) in self._owned_by(old["metadata"]["uid"]):
                self.delete(owned, place, owned_name)
            return old

    def wait(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Wait until a condition on the objects holds. Returns whether it does."""
        with self.changed:
            return self.changed.wait_for(condition, within_s)

    def _owned_by(self, uid: str) -> list[tuple[Resource, Key]]:
        return [
            (resource, key)
            for resource, objects in self._objects.items()
            for key, obj in objects.items()
            if any(owner["uid"] == uid for owner in obj["metadata"].get("ownerReferences", ()))
        ]

    def _write(self, resource: Resource, namespace: str, obj: Object) -> Object:
        name = obj["metadata"]["name"]
        old = self.find(resource, namespace, name)
        new = copy.deepcopy(obj) | {"apiVersion": resource.api_version, "kind": resource.kind}
        metadata: Object = new["metadata"]
        kept = old["metadata"] if old else {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 0}
        metadata |= {key: kept[key] for key in ("uid", "creationTimestamp", "generation")}
        metadata |= {"namespace": namespace} if resource.namespaced else {}
        if old is None or _desired(old) != _desired(new):
            metadata["generation"] += 1
        elif _content(old) == _content(new):
            return old
        if resource == DEFINITIONS:
            conditions = [{"type": kind, "status": "True"} for kind in ("NamesAccepted", "Established")]
            new["status"] = {"acceptedNames": new["spec"]["names"], "conditions": conditions, "storedVersions": []}
        self._check(resource, new)
        metadata["resourceVersion"] = str(self._next())
        self._objects.setdefault(resource, {})[(namespace, name)] = new
        self._record(Event(self.version, resource, old, new))
        return new

    def _check(self, resource: Resource, obj: Object) -> None:
        """As a definition's schema says."""
        for definition in self.all(DEFINITIONS):
            spec = definition["spec"]
            if (spec["group"], spec["names"]["plural"]) != (resource.group, resource.plural):
                continue
            (version,) = (one for one in spec["versions"] if one["name"] == resource.version)
            found = problems(version["schema"]["openAPIV3Schema"], obj)
            if found:
                name = obj["metadata"]["name"]
                raise ApiError(422, "Invalid", f'{resource.kind} "{name}" is invalid: {"; ".join(found)}')

    def _next(self) -> int:
        self.version += 1
        return self.version

    def _record(self, event: Event) -> None:
        self.events.append(event)
        self.changed.notify_all()


def merged(old: Object, patch: Object) -> Object:
    """`old` with a merge patch: a null removes, a list replaces."""
    result = dict(old)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(result[key] if isinstance(result.get(key), dict) else {}, value)
        else:
            result[key] = value
    return result


def without(obj: Object, before: Object, now: Object) -> Object:
    """`obj` less the fields that `before` has and `now` has not."""
    result = {key: value for key, value in obj.items() if key not in before or key in now}
    for key, value in result.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict) and isinstance(now.get(key), dict):
            result[key] = without(value, before[key], now[key])
    return result


def now() -> str:
    """The time as objects have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _desired(obj: Object) -> Object:
    return {key: value for key, value in obj.items() if key not in ("metadata", "status")}


def _content(obj: Object) -> Object:
    ours = ("resourceVersion", "generation", "managedFields")
    return obj | {"metadata": {key: value for key, value in obj["metadata"].items() if key not in ours}}


def matches(labels: dict[str, str], selector: str) -> bool:
    """Whether labels fit a label selector by equality, inequality, sets or existence. Raises `ApiError` for others."""
    return all(_fits(labels, term) for term in _terms(selector))


def _terms(selector: str) -> Iterator[str]:
    yield from (term.strip() for term in re.split(r",(?![^(]*\))", selector) if term.strip())


def _fits(labels: dict[str, str], term: str) -> bool:
    match = re.fullmatch(r"(!?)([\w./-]+)(?:\s*(==?|!=|\bin\b|\bnotin\b)\s*(.*))?", term)
    if match is None:
        raise ApiError(400, "BadRequest", f"the selector term {term!r} is not known here")
    absent, key, operator, values = match.groups()
    if operator is None:
        return (key in labels) is not bool(absent)
    wanted = [value.strip() for value in values.strip("()").split(",")]
    return (labels.get(key) in wanted) is (operator in ("=", "==", "in"))
