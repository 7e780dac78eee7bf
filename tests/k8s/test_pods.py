"""The chart's pods, started with their own commands: they serve a chat, and each probe answers as it must.

Once plainly, and once as a pod runs: read-only, as user 65532, without capabilities, each command as process 1.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from helm.image.sandbox import reason_against
from tests.helm.chart import EXAMPLES, Render, pod
from tests.k8s.pods import Identity, Pod, resolve
from tests.k8s.pods_run import RunningPod, Site, Watch, site
from tests.stack import Client, eventually

pytestmark = [pytest.mark.k8s, pytest.mark.faults]

MODEL = "smollm2-135m-instruct"
DRAIN_S = 90
"""On a machine with much else to do, the stream below does not end within the 20 s of the CPU demo."""


def rendered(*sets: str, mode: str = "plain", values: Path = EXAMPLES / "cpu-demo.yaml") -> list[dict[str, Any]]:
    """The objects of the CPU demo."""
    return Render(values=(values,), sets=sets, mode=mode).objects()


def resolved(objects: list[dict[str, Any]], component: str, name: str) -> Pod:
    return resolve(pod(objects, component), objects, Identity(name=name))


@dataclass
class Deployed:
    """A frontend and a worker of the chart."""

    site: Site
    frontend: RunningPod
    worker: RunningPod

    def client(self, http: httpx.AsyncClient) -> Client:
        return Client(self.frontend.url("http"), MODEL, http)


@pytest.fixture(params=["plain", "sandboxed"])
def deployed(request: pytest.FixtureRequest) -> Iterator[Deployed]:
    sandboxed = request.param == "sandboxed"
    reason = reason_against() if sandboxed else None
    if reason:
        pytest.skip(f"pods cannot run read-only and without rights here: {reason}")
    objects = rendered(f"worker.config.drain_timeout_s={DRAIN_S}")
    with site(sandboxed=sandboxed) as place:
        frontend = place.start(resolved(objects, "frontend", "frontend-0"), "frontend-0")
        worker = place.start(resolved(objects, "worker", "worker-0"), "worker-0")
        yield Deployed(place, frontend, worker)


def status_of(pod: RunningPod) -> dict[str, str]:
    """What the kernel says of a container's first process."""
    lines = Path(f"/proc/{pod.pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


async def listed(api: httpx.AsyncClient, url: str) -> list[str]:
    answer = await api.get(f"{url}/v1/models")
    return [model["id"] for model in answer.json()["data"]]


async def test_the_charts_pods_serve_a_chat_and_answer_their_probes(deployed: Deployed) -> None:
    frontend, worker = deployed.frontend, deployed.worker
    with Watch(worker) as seen:
        frontend.wait_for("startup", True, 30)
        assert frontend.look(frontend.pod.main.probes["readiness"]).status == 200, "a frontend without a model is ready"
        worker.wait_for("startup", True, 120)
        for kind in ("liveness", "readiness"):
            for each in (frontend, worker):
                assert each.look(each.pod.main.probes[kind]).status == 200
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            found = await eventually(lambda: listed(http, frontend.url("http")), bool, 20)
            assert found == [MODEL]
            api = deployed.client(http)
            reply = await api.chat("What is the capital of France?", max_tokens=16)
            assert "Paris" in reply.text
            if deployed.site.sandboxed:
                check_rights(frontend, worker)
            running = asyncio.create_task(api.chat("Count to a hundred.", True, max_tokens=32, ignore_eos=True))
            await asyncio.sleep(0.5)
            stopped = time.monotonic()
            code = await asyncio.to_thread(worker.stop)
            reply = await running
            assert (reply.status, reply.finish_reason, reply.error) == (200, "length", "")
        assert code == 0
    first = [answer.status for answer in seen.answers["/live"]]
    assert set(first[: first.index(200)]) <= {0, 503}, "refused, then loading: the startup probe waits"
    started = next(answer.at for answer in seen.answers["/live"] if answer.status == 200)
    for path in ("/live", "/health"):
        served = {answer.status for answer in seen.between(path, started + 0.2, stopped)}
        assert served == {200}, path
        leaving = {answer.status for answer in seen.between(path, stopped + worker.pod.main.pre_stop_s + 0.5, 1e12)}
        assert leaving <= {503, 0}, path
        assert leaving, path
    assert frontend.look(frontend.pod.main.probes["readiness"]).status == 200, "it stays in its Service"
    assert await asyncio.to_thread(frontend.stop) == 0


def check_rights(*pods: RunningPod) -> None:
    """As the manifest asks, so the processes are."""
    for each in pods:
        status = status_of(each)
        assert status["Uid"].split() == ["65532"] * 4
        assert status["Gid"].split() == ["65532"] * 4
        assert [status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")] == ["0" * 16] * 5
        assert status["NoNewPrivs"] == "1"
        assert status["NSpid"].split()[-1] == "1"
        root = next(
            line for line in Path(f"/proc/{each.pid}/mounts").read_text().splitlines() if line.split()[1] == "/"
        )
        assert root.split()[3].startswith("ro,"), root
