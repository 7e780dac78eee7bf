"""The checker of custom resources, against what an API server is known to do."""

from typing import Any

import pytest

from tests.helm.chart import MORE_VALUES, Object, Render, find
from tests.helm.crds import problems, schema_of

pytestmark = pytest.mark.helm


@pytest.fixture
def deployment() -> Object:
    objects = Render(values=(MORE_VALUES / "everything.yaml",), mode="dynamo").objects()
    return find(objects, "DynamoGraphDeployment")


def schema(obj: Object) -> dict[str, Any]:
    found = schema_of(obj)
    assert found is not None
    return found


def worker(obj: Object) -> Any:
    return obj["spec"]["components"][1]


def test_good(deployment: Object) -> None:
    assert problems(schema(deployment), deployment) == []


def test_unknown_field(deployment: Object) -> None:
    worker(deployment)["podTemplate"]["spec"]["containers"][0]["livenesProbe"] = {}
    (problem,) = problems(schema(deployment), deployment)
    assert problem.startswith("spec.components.1.podTemplate.spec.containers.0: ")
    assert "'livenesProbe' was unexpected" in problem


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda w: w.update(type="backend"), "spec.components.1.type: 'backend' is not one of"),
        (lambda w: w.update(replicas="2"), "spec.components.1.replicas: '2' is not of type 'integer'"),
        (lambda w: w.update(replicas=2**31), "spec.components.1.replicas: 2147483648 is greater than the maximum"),
        (lambda w: w.update(sharedMemorySize="1 Gi"), "spec.components.1.sharedMemorySize: '1 Gi' does not match"),
        (lambda w: w.pop("name"), "spec.components.1: 'name' is a required property"),
        (lambda w: w.update(sharedMemorySize=True), "spec.components.1.sharedMemorySize: True is not valid under any"),
    ],
)
def test_wrong(deployment: Object, change: Any, place: str) -> None:
    change(worker(deployment))
    assert any(problem.startswith(place) for problem in problems(schema(deployment), deployment))


def test_quantities_may_be_numbers(deployment: Object) -> None:
    worker(deployment)["sharedMemorySize"] = 1 << 30
    assert problems(schema(deployment), deployment) == []


def test_preserved_fields_stay_open() -> None:
    obj = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoWorkerMetadata", "metadata": {"name": "a"}}
    assert problems(schema(obj), {**obj, "spec": {"data": {"anything": {"at": ["all"]}}}}) == []
    assert problems(schema(obj), {**obj, "spec": {}}) != []


def test_unknown_kind_has_no_schema() -> None:
    assert schema_of({"apiVersion": "example.com/v1", "kind": "Thing"}) is None
    assert schema_of({"apiVersion": "v1", "kind": "Service"}) is None
