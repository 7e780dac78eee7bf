"""The chart's CPU demo word for word, by helm into a stand-in cluster: SmolLM2 on two workers, one of them lost.

Pods run as in a cluster: read-only, and with their paths, which frontends compare.
"""

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest

from helm.image.sandbox import reason_against
from tests.k8s.cluster import networked_cluster
from tests.k8s.pods_run import RunningPod
from tests.k8s.served import wait_for_workers
from tests.stack import Client, eventually, metrics

REQUESTS = "pagelane_requests"
MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France? Say it in one sentence, and then what else there is to see in that city."


async def generating(workers: list[RunningPod]) -> list[RunningPod]:
    """Those with a request of which tokens are being computed."""
    pages = [await metrics(worker.url("system")) for worker in workers]
    return [worker for worker, page in zip(workers, pages, strict=True) if page.total(REQUESTS, state="active")]


@pytest.mark.timeout(400)
async def test_the_demo_serves_a_stream_whose_worker_is_killed(figures: Callable[[str, float, str], None]) -> None:
    reason = reason_against()
    if reason:
        pytest.skip(f"pods cannot run read-only and with their paths here: {reason}")
    with networked_cluster(simulated=False, sandboxed=True) as found:
        began = time.monotonic()
        found.helm.install({}, "--wait", "--timeout", "140s")
        figures("the CPU demo was ready after", time.monotonic() - began, "s")
        (frontend,), workers = found.running("frontend"), found.running("worker")
        await wait_for_workers(frontend, 2)
        async with httpx.AsyncClient(timeout=200, trust_env=False) as http:
            api = Client(frontend.url("http"), MODEL, http)
            whole = await api.chat(QUESTION, True, max_tokens=48, ignore_eos=True)
            assert "Paris" in whole.text
            again = asyncio.create_task(api.chat(QUESTION, True, max_tokens=48, ignore_eos=True))
            (busy,) = await eventually(lambda: generating(workers), bool, 20)
            busy.kill()
            assert not again.done()
            reply = await again
            assert (reply.status, reply.error, reply.text) == (200, "", whole.text)
        assert (busy.name, -9, "by itself") in {(one.pod, one.code, one.why) for one in found.kubelet.ended}
