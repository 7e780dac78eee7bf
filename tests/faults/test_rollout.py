"""Upgrades of the chart under steady streams: a new image, another page size and back. No request may fail.

The real helm against a stand-in cluster, whose Deployment controller starts and ends the rendered pods as processes.
Clients take a frontend that its Service's EndpointSlice had as ready a second ago, as behind a proxy that hears of it
late.
"""

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.harness import applied_statuses, prompt
from tests.k8s.api_store import CLAIMS, PODS, SLICES
from tests.k8s.cluster import SIMULATED, Cluster, networked_cluster
from tests.k8s.helm_client import MODEL, NAMESPACE, RELEASE, sim_values
from tests.k8s.pods_run import Replacement
from tests.k8s.served import METADATA, wait_for_workers
from tests.sim_core import expected_text
from tests.stack import Client, metrics

CLIENTS = 8
LATE_S = 1.0
WAIT = ("--wait", "--timeout", "100s")
SLOWER = Replacement(SIMULATED.words, (*SIMULATED.by, "--sim-step-s", "0.01"))


@dataclass
class Steady:
    """Clients that ask one request after another, and what is seen meanwhile."""

    found: Cluster
    served: int = 0
    failed: list[str] = field(default_factory=list)
    sizes: set[tuple[str, int]] = field(default_factory=set)
    """Dynamo namespace and page size of every worker that was published."""
    together: set[frozenset[str]] = field(default_factory=set)
    """Namespaces that were published at one moment."""
    over: bool = False
    _ready: deque[tuple[float, list[str]]] = field(default_factory=deque)

    async def look(self) -> None:
        """What the cluster says, until it is over."""
        while not self.over:
            now = time.monotonic()
            self._ready.append((now, self._frontends()))
            while len(self._ready) > 1 and self._ready[1][0] <= now - LATE_S:
                self._ready.popleft()
            published = set(_published(self.found))
            self.sizes |= published
            self.together.add(frozenset(namespace for namespace, _ in published))
            await asyncio.sleep(0.05)

    def _frontends(self) -> list[str]:
        """URLs of the frontends that their Service has as ready."""
        slices = self.found.store.all(SLICES, NAMESPACE)
        (mine,) = (one for one in slices if one["metadata"]["name"].startswith("demo-pagelane-frontend"))
        names = [one["targetRef"]["name"] for one in mine["endpoints"] if one["conditions"]["ready"]]
        return [self.found.kubelet.running[name].url("http") for name in names if name in self.found.kubelet.running]

    async def ask(self, numbers: Iterator[int]) -> None:
        """One request after another until it is over, each by a connection of its own."""
        async with httpx.AsyncClient(timeout=60, trust_env=False, limits=httpx.Limits(max_connections=1)) as http:
            for number in numbers:
                if self.over:
                    return
                tokens, length = prompt(number % 50, 24 + number % 100), 50 + number % 150
                url = random.choice(self._ready[0][1])
                wrong = await _wrong(Client(url, MODEL, http), tokens, length, number % 4 > 0)
                self.served += not wrong
                self.failed += [f"{number} by {url}: {wrong}"] if wrong else []


async def _wrong(api: Client, tokens: list[int], length: int, stream: bool) -> str:
    """What is wrong with the answer to a request; empty if it is the whole, right text."""
    try:
        reply = await api.complete(tokens, stream, max_tokens=length, ignore_eos=True)
    except httpx.HTTPError as error:
        return repr(error)
    right = reply.status == 200 and not reply.error and reply.text == expected_text(tokens, length)
    return "" if right else f"{reply.status} {reply.error or reply.text}"


def _published(found: Cluster) -> Iterator[tuple[str, int]]:
    """Dynamo namespace, without its hash, and page size of the workers that stand in discovery."""
    for obj in found.store.all(METADATA, NAMESPACE) if METADATA in found.store.resources() else ():
        for card in obj["spec"]["data"]["model_cards"].values():
            yield card["namespace"].rpartition("-")[0], card["card_json"]["kv_cache_block_size"]


@asynccontextmanager
async def steady_streams(found: Cluster) -> AsyncIterator[Steady]:
    """Clients at work while the context lasts; afterwards none of their requests may have failed."""
    load, numbers = Steady(found), itertools.count()
    looking = asyncio.create_task(load.look())
    await asyncio.sleep(0.1)
    clients = [asyncio.create_task(load.ask(numbers)) for _ in range(CLIENTS)]
    try:
        await asyncio.sleep(1)
        yield load
        await asyncio.sleep(1)
    finally:
        load.over = True
        await asyncio.gather(looking, *clients)
    assert load.failed == []


def pods(found: Cluster, *components: str) -> set[str]:
    """Names of the components' pods, of those too that are ending."""
    label = "app.kubernetes.io/component"
    return {p["metadata"]["name"] for p in found.store.all(PODS) if p["metadata"]["labels"][label] in components}


async def rolled(found: Cluster, components: tuple[str, ...], *command: Any, **options: Any) -> float:
    """Carry out a helm command, and wait until no pod that was there is left. Returns the seconds of the command."""
    before, began = pods(found, *components), time.monotonic()
    run, *arguments = command
    await asyncio.to_thread(run, *arguments, *WAIT, **options)
    took = time.monotonic() - began
    await asyncio.to_thread(found.wait, "old pods gone", lambda: not before & pods(found, *components), 60)
    assert {(one.code, one.why) for one in found.kubelet.ended} == {(0, "deleted")}
    return took


async def test_a_new_image_rolls_frontends_and_workers_with_no_request_failed(
    tiny: Path, figures: Callable[[str, float, str], None]
) -> None:
    # The chart's own times but for minReadySeconds of 10.
    times = {"worker__minReadySeconds": 5, "worker__preStopSeconds": 2, "worker__gracePeriodSeconds": 5}
    values = sim_values(tiny, frontend__replicas=2, worker__replicas=2, **times)
    with networked_cluster(replacements=(SLOWER,)) as found:
        found.helm.install(values, *WAIT)
        async with steady_streams(found) as load:
            changed = values | {"image": {"tag": "next"}}
            took = await rolled(found, ("frontend", "worker"), found.helm.upgrade, changed)
        figures("a rolling upgrade of 2 frontends and 2 workers took", took, "s")
        figures("and meanwhile there were served", load.served, "requests, none failed")


async def test_a_change_of_the_page_size_and_back_fails_no_request_and_sizes_never_meet(
    tiny: Path, figures: Callable[[str, float, str], None]
) -> None:
    # As where no GPU is spare: an old worker goes before a new one comes.
    spare = {"worker__replicas": 2, "worker__maxSurge": 0, "worker__maxUnavailable": 1}
    values = sim_values(tiny, **spare)
    sizes = [(f"demo-pagelane_page-{size}", size) for size in (16, 64)]
    with networked_cluster(replacements=(SLOWER,)) as found:
        found.helm.install(values, *WAIT)
        (frontend,) = found.running("frontend")
        async with steady_streams(found) as load:
            larger = sim_values(tiny, **spare, worker__config__kv_page_size=64)
            await rolled(found, ("worker",), found.helm.upgrade, larger)
            assert set(_published(found)) == {sizes[1]}
            await rolled(found, ("worker",), found.helm.run, "rollback", RELEASE, "1")
            assert set(_published(found)) == {sizes[0]}
        assert load.sizes == set(sizes)
        assert frozenset(name for name, _ in sizes) in load.together, "both sizes served side by side"
        assert found.running("frontend") == [frontend], "the frontend has not changed"
        assert applied_statuses(await metrics(frontend.url("http"))) == {"ok"}
        figures("during a page size of 16, 64, 16 there were served", load.served, "requests, none failed")


async def test_a_stateful_set_rolls_by_name_with_no_request_failed(tiny: Path) -> None:
    options = {"worker__kind": "StatefulSet", "worker__replicas": 2, "model__cache__perWorker": True}
    with networked_cluster(replacements=(SLOWER,)) as found:
        found.helm.install(sim_values(tiny, **options), *WAIT)
        before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found.pods("worker")}
        assert set(before) == {"demo-pagelane-worker-0", "demo-pagelane-worker-1"}
        async with steady_streams(found) as load:
            changed = sim_values(tiny, **options, worker__config__max_queue=100)
            await asyncio.to_thread(found.helm.upgrade, changed, *WAIT)
        after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found.pods("worker")}
        assert (set(after), set(after.values()) & set(before.values())) == (set(before), set())
        assert [one.pod for one in found.kubelet.ended] == ["demo-pagelane-worker-1", "demo-pagelane-worker-0"]
        (frontend,) = found.running("frontend")
        await wait_for_workers(frontend, 2)
        owners = {m["metadata"]["name"]: m["metadata"]["ownerReferences"][0]["uid"] for m in found.store.all(METADATA)}
        assert owners == after, "what the old pods had published went with them"
        claims = {claim["metadata"]["name"] for claim in found.store.all(CLAIMS)}
        assert claims == {f"cache-{name}" for name in before}
        assert load.served > 0
