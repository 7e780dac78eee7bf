"""The probe timeline: at each stage of a worker's life its probes answer as they must. By the chart's thresholds and
the Dynamo operator's no busy worker is ever killed, and a wedged one is.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.faults.harness import Load, prompt
from tests.helm.chart import EXAMPLES, Render, pod
from tests.k8s.pods import Identity, Pod, resolve
from tests.k8s.pods_probes import OPERATORS_LIVENESS, Answer, earliest_verdict, latest_verdict, succeeds
from tests.k8s.pods_run import RunningPod, Watch
from tests.k8s.pods_sim import core_of, simulated_pods
from tests.k8s.served import client
from tests.stack import Client, eventually, metrics

pytestmark = [pytest.mark.k8s, pytest.mark.faults]

ROWS, QUEUE = 64, 16
PATHS = ("/live", "/health")
LOAD_S = 2.0
STEP_TIMEOUT_S = 3.0
LOOP_LIMIT_S = 2.0
GRACE_S = 1
NOTICE_S = 2.0
"""What a loaded machine may add to a time that a worker keeps by itself."""


def rendered(values: str, mode: str = "plain") -> Pod:
    """The worker's pod of an example."""
    objects = Render(values=(EXAMPLES / values,), mode=mode).objects()
    return resolve(pod(objects, "worker"), objects, Identity(name="worker-0"))


async def requests(worker: RunningPod, state: str) -> float:
    """How many of a worker's requests are in a state."""
    return (await metrics(worker.url("system"))).total("pagelane_requests", state=state)


async def reaches(worker: RunningPod, state: str, wanted: int) -> None:
    """Wait until so many requests are in a state."""
    found = await eventually(lambda: requests(worker, state), lambda now: now >= wanted, 20)
    assert found >= wanted, state


def ask(api: Client, count: int, max_tokens: int, stream: bool = True) -> Load:
    """So many requests at once."""
    load = Load()
    for number in range(count):
        load.ask(api, prompt(number), max_tokens, stream)
    return load


def statuses(answers: Sequence[Answer]) -> set[int]:
    """What was answered, at least a few times."""
    assert len(answers) > 10
    return {answer.status for answer in answers}


async def test_each_probe_answers_as_it_must_from_start_to_drain(tiny: Path, tmp_path: Path) -> None:
    values = {"max_bucket": ROWS, "max_queue": QUEUE, "drain_timeout_s": 10}
    config = {f"worker__config__{key}": value for key, value in values.items()}
    sim = ("--sim-load-s", str(LOAD_S), "--sim-step-s", "0.02")
    times: dict[str, tuple[float, float]] = {}

    async def stage(name: str, seconds: float) -> None:
        began = time.monotonic()
        await asyncio.sleep(seconds)
        times[name] = (began, time.monotonic())

    with simulated_pods(tiny, tmp_path, *sim, worker__gracePeriodSeconds=GRACE_S, **config) as pods:
        frontend, worker = pods.start("frontend", "frontend-0"), pods.start("worker", "worker-0")
        with Watch(worker, 0.03) as seen, Watch(frontend, 0.1) as of_frontend:
            await asyncio.to_thread(frontend.wait_for, "startup", True, 30)
            ready = time.monotonic()
            await asyncio.to_thread(worker.wait_for, "startup", True, 60)
            await asyncio.sleep(0.5)
            await stage("idle", 1.5)
            async with client(frontend) as api:
                load = ask(api, ROWS, 1000)
                await reaches(worker, "active", ROWS)
                await stage("busy", 3)
                more = ask(api, QUEUE, 1)
                await reaches(worker, "waiting", QUEUE)
                refused = await asyncio.gather(*ask(api, 3, 1, stream=False).tasks)
                assert [reply.status for reply in refused] == [503] * 3, "the queue is full"
                await stage("full queue", 3)
                assert await requests(worker, "waiting") >= QUEUE
                await more.drop()
                await load.drop()
                last = ask(api, 8, 150)
                await reaches(worker, "active", 8)
                ending = asyncio.create_task(asyncio.to_thread(worker.stop))
                await asyncio.sleep(worker.pod.main.pre_stop_s)
                signalled = time.monotonic()
                assert await last.lost() == []
                times["drain"] = (signalled + 0.5, time.monotonic())
                assert await ending == 0
            ended = time.monotonic()
        probes = worker.pod.main.probes
        for path in PATHS:
            answers = seen.answers[path]
            started = next(answer.at for answer in answers if answer.status == 200)
            loading = [answer for answer in answers if answer.at < started]
            assert statuses(loading) == {0, 503}, "refused, then loading"
            assert earliest_verdict(loading, probes["startup"]) is None
            assert earliest_verdict(answers, probes["startup"], good=True) == started
            for name in ("idle", "busy", "full queue"):
                assert statuses(seen.between(path, *times[name])) == {200}, (path, name)
            assert statuses(seen.between(path, *times["drain"])) == {503}, path
            serving = seen.between(path, started, signalled)
            assert all(succeeds(answer, OPERATORS_LIVENESS) for answer in serving), path
            for probe in (probes["liveness"], probes["readiness"], OPERATORS_LIVENESS):
                assert earliest_verdict(serving, probe) is None, (path, probe)
            assert statuses(of_frontend.between(path, ready, ended)) == {200}, "it stays in its Service"


def hang_core(worker: RunningPod) -> None:
    """Its process stands still."""
    os.kill(core_of(worker), signal.SIGSTOP)


def hang_loop(worker: RunningPod) -> None:
    """The worker's event loop sleeps."""
    os.kill(worker.pid, signal.SIGUSR1)


def hang_interpreter(worker: RunningPod) -> None:
    """The worker's event loop never gives the interpreter's lock back."""
    os.kill(worker.pid, signal.SIGUSR2)


HANGS: dict[str, tuple[Callable[[RunningPod], None], float]] = {
    "core": (hang_core, STEP_TIMEOUT_S),
    "loop": (hang_loop, LOOP_LIMIT_S),
    "interpreter": (hang_interpreter, LOOP_LIMIT_S),
}
"""What is made to hang, and how long that may last."""


async def test_whatever_hangs_turns_the_probes_red_in_time_and_the_worker_ends(tiny: Path, tmp_path: Path) -> None:
    values = {"worker__config__step_timeout_s": STEP_TIMEOUT_S, "worker__config__drain_timeout_s": 1}
    sim = ("--sim-loop-limit-s", str(LOOP_LIMIT_S))
    with simulated_pods(tiny, tmp_path, *sim, worker__gracePeriodSeconds=GRACE_S, **values) as pods:
        workers = {name: pods.start("worker", name) for name in HANGS}
        for worker in workers.values():
            await asyncio.to_thread(worker.wait_for, "startup", True, 60)
        await asyncio.gather(*(wedged(workers[name], *HANGS[name]) for name in HANGS))
        assert "has said nothing for" in workers["core"].log()
        assert "event loop stood still for" in workers["loop"].log()


async def wedged(worker: RunningPod, hang: Callable[[RunningPod], None], limit_s: float) -> None:
    """Make a worker hang, and hold its answers and its end against what is promised."""
    deadline_s = int(worker.pod.main.environment["DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"])
    with Watch(worker, 0.05) as seen:
        await asyncio.sleep(1)
        began = time.monotonic()
        hang(worker)
        code = await asyncio.to_thread(worker.process.wait, limit_s + deadline_s + 10)
        took = time.monotonic() - began
        await asyncio.sleep(OPERATORS_LIVENESS.period)
    assert code != 0
    assert took < limit_s + GRACE_S + deadline_s + NOTICE_S
    for path in PATHS:
        red = next(answer.at for answer in seen.between(path, began, 1e12) if answer.status != 200)
        assert limit_s * 0.7 < red - began < limit_s + NOTICE_S, path
        assert statuses(seen.between(path, red, 1e12)) <= {503, 0}, "it stays red"
        killed = latest_verdict(seen.answers[path], OPERATORS_LIVENESS)
        assert killed is not None
        assert killed - red <= OPERATORS_LIVENESS.period + NOTICE_S


@pytest.mark.parametrize("mode", ["plain", "dynamo"])
def test_the_startup_probe_gives_a_big_model_half_an_hour(mode: str) -> None:
    probes = rendered("single-gpu.yaml", mode).main.probes
    loading = [Answer(at, 503, 0.001) for at in range(1795)]
    assert earliest_verdict(loading, probes["startup"]) is None
    assert latest_verdict([Answer(at, 503, 0.001) for at in range(1900)], probes["startup"]) is not None
    assert probes["liveness"].period * probes["liveness"].failures == 30
    assert probes == rendered("single-gpu.yaml").main.probes, "the same in both modes"
