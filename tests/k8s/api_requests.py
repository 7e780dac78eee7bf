"""Requests to a stand-in Kubernetes API server, and what is done about them."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import yaml

from tests.helm.chart import LOADER
from tests.k8s.api_protobuf import secret
from tests.k8s.api_store import ApiError, Event, Object, Resource, Store, matches

WATCH_S = 300.0


@dataclass(frozen=True)
class Request:
    """A call that has been read."""

    verb: str
    resource: Resource
    namespace: str
    name: str
    query: dict[str, str]
    body: Object
    content_type: str

    def keeps(self, obj: Object) -> bool:
        """Whether a list or watch that asks so shows the object."""
        metadata = obj["metadata"]
        fields = {"metadata.name": metadata["name"], "metadata.namespace": metadata.get("namespace", "")}
        return (
            self.namespace in ("", metadata.get("namespace", ""))
            and matches(metadata.get("labels", {}), self.query.get("labelSelector", ""))
            and matches(fields, self.query.get("fieldSelector", ""))
        )


def decode(content_type: str, body: bytes) -> Object:
    """A body as an object. Raises `ApiError`."""
    if content_type.split(";", maxsplit=1)[0].endswith(("json", "yaml")):
        content: Object = yaml.load(body, Loader=LOADER) if "yaml" in content_type else json.loads(body)
        return content
    if content_type == "application/vnd.kubernetes.protobuf":
        return secret(body)
    raise ApiError(415, "UnsupportedMediaType", f"a body of type {content_type} is not known here")


def perform(store: Store, request: Request) -> tuple[int, Object]:
    """Do what is asked for. Returns the HTTP status and the answer; raises `ApiError`."""
    resource, namespace, name = request.resource, request.namespace, request.name
    match request.verb:
        case "list":
            with store.changed:
                items = [obj for obj in store.all(resource) if request.keeps(obj)]
                metadata = {"resourceVersion": str(store.version)}
            kind = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
            return 200, {**kind, "metadata": metadata, "items": items}
        case "get":
            return 200, store.get(resource, namespace, name)
        case "create":
            return 201, store.create(resource, namespace, request.body)
        case "update":
            return 200, store.update(resource, namespace, request.body)
        case "delete":
            return 200, store.delete(resource, namespace, name)
    if "apply-patch" in request.content_type:
        manager = request.query.get("fieldManager")
        if not manager:
            raise ApiError(422, "Invalid", "fieldManager: Required value: is required for apply patch")
        return 200, store.apply(resource, namespace, name, request.body, manager)
    if "merge-patch" in request.content_type:
        return 200, store.merge(resource, namespace, name, request.body)
    raise ApiError(415, "UnsupportedMediaType", f"a patch of type {request.content_type} is not known here")


def watch(store: Store, request: Request, send: Callable[[str, Object], None], over: Callable[[], bool]) -> None:
    """Send what changes, as Kubernetes does, until the request's time is up."""
    end = time.monotonic() + float(request.query.get("timeoutSeconds") or WATCH_S)
    since = int(request.query.get("resourceVersion") or 0)
    marked = {"apiVersion": request.resource.api_version, "kind": request.resource.kind}
    if since == 0 or request.query.get("sendInitialEvents") == "true":
        with store.changed:
            since, first = store.version, [obj for obj in store.all(request.resource) if request.keeps(obj)]
        for obj in first:
            send("ADDED", obj)
        if request.query.get("sendInitialEvents") == "true":
            annotations = {"k8s.io/initial-events-end": "true"}
            send("BOOKMARK", {**marked, "metadata": {"resourceVersion": str(since), "annotations": annotations}})
    seen = 0
    while not over() and time.monotonic() < end:
        with store.changed:
            if len(store.events) == seen:
                store.changed.wait(min(1.0, end - time.monotonic()))
            events, seen = store.events[seen:], len(store.events)
        for event in events:
            if not over() and event.version > since and event.resource == request.resource:
                _send(request, event, send)


def _send(request: Request, event: Event, send: Callable[[str, Object], None]) -> None:
    """An object that comes into a selection is added to it, one that leaves is deleted from it."""
    old = event.old if event.old is not None and request.keeps(event.old) else None
    new = event.new if event.new is not None and request.keeps(event.new) else None
    if new is not None:
        send("MODIFIED" if old is not None else "ADDED", new)
    elif old is not None:
        send("DELETED", old | {"metadata": old["metadata"] | {"resourceVersion": str(event.version)}})
