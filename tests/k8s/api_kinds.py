"""What a stand-in API server says of the kinds that it serves, for clients that look before they ask."""

from collections.abc import Sequence

from tests.k8s.api_store import ApiError, Object, Resource

VERSION = {"major": "1", "minor": "37", "gitVersion": "v1.37.0", "platform": "linux/amd64"}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def describe(path: str, resources: Sequence[Resource]) -> Object:
    """The document at a path that is no object's. Raises `ApiError` if there is none."""
    groups: dict[str, set[str]] = {}
    for one in resources:
        groups.setdefault(one.group, set()).add(one.version)
    match path.strip("/").split("/"):
        case ["version"]:
            return VERSION
        case ["api"]:
            return {"kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"]}
        case ["apis"]:
            named = [_group(name, sorted(versions)) for name, versions in groups.items() if name]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}
        case ["api", version]:
            return _resources("", version, resources)
        case ["apis", group, version]:
            return _resources(group, version, resources)
    raise ApiError(404, "NotFound", "the server could not find the requested resource")


def _group(name: str, versions: Sequence[str]) -> Object:
    served = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": served, "preferredVersion": served[-1]}


def _resources(group: str, version: str, resources: Sequence[Resource]) -> Object:
    found = [one for one in resources if (one.group, one.version) == (group, version)]
    if not found:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    rows = [
        {
            "name": one.plural,
            "singularName": one.kind.lower(),
            "kind": one.kind,
            "namespaced": one.namespaced,
            "verbs": _VERBS,
        }
        for one in found
    ]
    api_version = found[0].api_version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": rows}
