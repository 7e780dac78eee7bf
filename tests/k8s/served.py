"""What the frontends of a chart that a stand-in cluster serves say."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.k8s.api_store import Resource
from tests.k8s.helm_client import MODEL, RELEASE
from tests.k8s.network import reason_against
from tests.k8s.pods_run import RunningPod
from tests.stack import Client, eventually

METADATA = Resource("nvidia.com", "v1alpha1", "dynamoworkermetadatas", "DynamoWorkerMetadata")
NO_NETWORK = reason_against()
own_network = pytest.mark.skipif(bool(NO_NETWORK), reason=f"events go over a broker: {NO_NETWORK}")


@asynccontextmanager
async def client(frontend: RunningPod) -> AsyncIterator[Client]:
    """A client with connections of its own."""
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=httpx.Limits()) as http:
        yield Client(frontend.url("http"), MODEL, http)


async def found_workers(frontend: RunningPod) -> int:
    """How many workers of the release a frontend has found."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
        instances = (await http.get(f"{frontend.url('http')}/health")).json()["instances"]
    namespaces = [one["namespace"] for one in instances if one["endpoint"] == "generate"]
    return sum(namespace.startswith(f"{RELEASE}-pagelane_page-") for namespace in namespaces)


async def wait_for_workers(frontend: RunningPod, number: int, within_s: float = 10) -> None:
    """Wait until a frontend has found so many."""
    found = await eventually(lambda: found_workers(frontend), lambda now: now == number, within_s)
    assert found == number


async def models(frontend: RunningPod) -> list[str]:
    """What a frontend serves."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
        return [model["id"] for model in (await http.get(f"{frontend.url('http')}/v1/models")).json()["data"]]
