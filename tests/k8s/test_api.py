"""The stand-in API server keeps Kubernetes' rules where the other tests lean on them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helm.chart import Render, find
from tests.k8s.api_protobuf import secret
from tests.k8s.api_requests import Request, watch
from tests.k8s.api_rules import Account
from tests.k8s.api_server import ApiServer
from tests.k8s.api_store import (
    ACCOUNTS,
    BINDINGS,
    DEFINITIONS,
    PODS,
    ROLES,
    SERVICES,
    ApiError,
    Object,
    Resource,
    Store,
    matches,
)
from tests.k8s.cluster import reconcile
from tests.k8s.cluster_control import Count, sizes

pytestmark = pytest.mark.k8s

METADATA = Resource("nvidia.com", "v1alpha1", "dynamoworkermetadatas", "DynamoWorkerMetadata")
READER = Account("prod", "reader")


@pytest.fixture
def store() -> Store:
    return Store()


def named(name: str, labels: dict[str, str] | None = None, **more: Any) -> Object:
    return {"metadata": {"name": name, "labels": labels or {}}, **more}


def test_an_apply_takes_back_what_its_manager_no_longer_says_and_nothing_else(store: Store) -> None:
    store.apply(SERVICES, "prod", "s", named("s", {"a": "1", "b": "2"}, spec={"x": 1, "y": 2}), "helm")
    store.merge(SERVICES, "prod", "s", {"metadata": {"labels": {"hand": "made"}}, "status": {"ok": True}})
    after = store.apply(SERVICES, "prod", "s", named("s", {"a": "1"}, spec={"y": 3}), "helm")
    assert after["metadata"]["labels"] == {"a": "1", "hand": "made"}
    assert (after["spec"], after["status"]) == ({"y": 3}, {"ok": True})


def test_generations_count_changes_of_what_is_wanted_and_no_change_is_no_event(store: Store) -> None:
    first = store.create(SERVICES, "prod", named("s", spec={"x": 1}))
    assert store.merge(SERVICES, "prod", "s", {"spec": {"x": 1}}) is first
    status = store.merge(SERVICES, "prod", "s", {"status": {"ok": True}})
    wanted = store.merge(SERVICES, "prod", "s", {"spec": {"x": 2}})
    assert [one["metadata"]["generation"] for one in (first, status, wanted)] == [1, 1, 2]
    assert len(store.events) == 3
    with pytest.raises(ApiError, match="modified since"):
        store.update(SERVICES, "prod", first)


def test_what_a_pod_owns_goes_with_it_and_it_goes_when_its_kubelet_says(store: Store) -> None:
    pod = store.create(PODS, "prod", named("p"))
    owner = {"kind": "Pod", "name": "p", "uid": pod["metadata"]["uid"]}
    store.create(SERVICES, "prod", {"metadata": {"name": "owned", "ownerReferences": [owner]}})
    store.delete(PODS, "prod", "p")
    assert "deletionTimestamp" in store.get(PODS, "prod", "p")["metadata"]
    assert store.find(SERVICES, "prod", "owned")
    store.remove(PODS, "prod", "p")
    assert not store.find(SERVICES, "prod", "owned")


def test_a_custom_resource_is_served_and_checked_as_its_definition_says(store: Store) -> None:
    definition = find(Render().objects(), "CustomResourceDefinition")
    assert METADATA not in store.resources()
    store.create(DEFINITIONS, "", definition)
    assert METADATA in store.resources()
    store.apply(METADATA, "prod", "p", named("p", spec={"data": {"any": ["thing"]}}), "dynamo")
    for spec in ({}, {"data": 1}, {"data": {}, "other": 1}):
        with pytest.raises(ApiError, match="invalid"):
            store.apply(METADATA, "prod", "q", named("q", spec=spec), "dynamo")


def test_a_watch_adds_and_deletes_what_comes_into_and_leaves_its_selection(store: Store) -> None:
    store.create(SERVICES, "prod", named("s", {"on": "1"}))
    request = Request("watch", SERVICES, "prod", "", {"labelSelector": "on=1", "timeoutSeconds": "0.05"}, {}, "")
    seen: list[tuple[str, str]] = []

    def look(since: int) -> None:
        seen.clear()
        query = request.query | {"resourceVersion": str(since)}
        asked = Request("watch", SERVICES, request.namespace, "", query, {}, "")
        watch(store, asked, lambda kind, obj: seen.append((kind, obj["metadata"]["name"])), lambda: False)

    look(0)
    assert seen == [("ADDED", "s")]
    since = store.version
    store.merge(SERVICES, "prod", "s", {"metadata": {"labels": {"on": None}}})
    store.create(SERVICES, "prod", named("t", {"on": "1"}))
    store.create(SERVICES, "other", named("u", {"on": "1"}))
    store.merge(SERVICES, "prod", "t", {"spec": {}})
    store.delete(SERVICES, "prod", "t")
    look(since)
    assert seen == [("DELETED", "s"), ("ADDED", "t"), ("MODIFIED", "t"), ("DELETED", "t")]


@pytest.mark.parametrize(
    ("selector", "fits"),
    [("a=1", True), ("a==2", False), ("a!=2", True), ("a", True), ("!a", False), ("!b,a in (1, 3)", True), ("", True)],
)
def test_label_selectors(selector: str, fits: bool) -> None:
    assert matches({"a": "1"}, selector) is fits


@pytest.fixture
def api(store: Store) -> Iterator[ApiServer]:
    with ApiServer(store) as server:
        yield server


def test_an_account_may_do_what_a_role_of_its_namespace_says_and_no_more(api: ApiServer) -> None:
    rules = [{"apiGroups": [""], "resources": ["services"], "verbs": ["list", "patch"]}]
    api.store.create(ROLES, "prod", named("r") | {"rules": rules})
    subject = {"kind": "ServiceAccount", "name": READER.name, "namespace": READER.namespace}
    api.store.create(BINDINGS, "prod", named("b") | {"roleRef": {"name": "r"}, "subjects": [subject]})
    api.store.create(SERVICES, "prod", named("s"))
    http = httpx.Client(base_url=api.url, trust_env=False)

    def ask(method: str, path: str, token: str, body: Object | None = None) -> int:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
        return http.request(method, f"/api/v1/{path}", headers=headers, content=json.dumps(body)).status_code

    token, other = api.token(READER), api.token(Account("other", "reader"))
    services = "namespaces/prod/services"
    assert ask("GET", services, token) == 200
    assert ask("GET", services, other) == ask("GET", services, "nobody") == ask("GET", f"{services}/s", token) == 403
    assert ask("GET", "namespaces/other/services", token) == ask("GET", "services", token) == 403
    assert ask("PATCH", f"{services}/s", token, {"spec": {}}) == 200
    assert ask("PATCH", f"{services}/new", token, {"spec": {}}) == 403, "an apply that makes it is a create"
    assert ask("GET", "namespaces/prod/gateways", api.admin_token) == 404
    http.close()
    calls = [(call.account, call.verb, call.code) for call in api.calls[:3]]
    assert calls == [("reader", "list", 200), ("reader", "list", 403), ("", "list", 403)]


def test_a_secret_by_protocol_buffers() -> None:
    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    entry = field(1, b"owner") + field(2, b"helm")
    metadata = field(1, b"release") + field(3, b"prod") + bytes([7 << 3, 5]) + field(11, entry)
    raw = field(1, metadata) + field(2, field(1, b"release") + field(2, b"\x00\xff")) + field(3, b"helm.sh/release.v1")
    envelope = field(1, field(1, b"v1") + field(2, b"Secret")) + field(2, raw)
    assert secret(b"k8s\x00" + envelope) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "release", "namespace": "prod", "labels": {"owner": "helm"}},
        "type": "helm.sh/release.v1",
        "data": {"release": "AP8="},
    }


def test_a_pod_waits_for_its_account(store: Store) -> None:
    template = {"metadata": {"labels": {"a": "1"}}, "spec": {"serviceAccountName": "w"}}
    spec = {"replicas": 2, "selector": {"matchLabels": {"a": "1"}}, "template": template}
    deployments = Resource("apps", "v1", "deployments", "Deployment")
    store.create(deployments, "prod", named("d", spec=spec))
    reconcile(store)
    assert store.all(PODS) == []
    store.create(ACCOUNTS, "prod", named("w"))
    reconcile(store)
    assert len(store.all(PODS)) == 2


@pytest.mark.parametrize(
    ("surge", "unavailable", "new", "old", "then"),
    [
        (1, 0, Count(0, 0), Count(2, 2), (1, 2)),
        (1, 0, Count(1, 0), Count(2, 2), (1, 2)),
        (1, 0, Count(1, 1), Count(2, 2), (1, 1)),
        (1, 0, Count(1, 1), Count(1, 1), (2, 1)),
        (1, 0, Count(2, 2), Count(1, 1), (2, 0)),
        (0, 1, Count(0, 0), Count(2, 2), (0, 1)),
        (0, 1, Count(0, 0), Count(1, 1), (1, 1)),
        (0, 1, Count(1, 0), Count(1, 1), (1, 1)),
        (1, 0, Count(1, 0), Count(2, 1), (1, 2)),
        (0, 1, Count(0, 0), Count(2, 1), (0, 1)),
    ],
)
def test_a_rolling_update_keeps_its_bounds(
    surge: int, unavailable: int, new: Count, old: Count, then: tuple[int, int]
) -> None:
    grown, (left,) = sizes(2, surge, unavailable, new, [old])
    assert (grown, left) == then
