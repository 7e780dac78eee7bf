"""A kubelet: starts the pods that a store has as processes here, asks their probes, ends them when they are deleted."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tests.k8s.api_store import CLAIMS, PODS, ApiError, Object, Resource, Store, now
from tests.k8s.cluster_control import condition
from tests.k8s.pods import Container, Identity, PodError, Probe, resolve
from tests.k8s.pods_probes import succeeds
from tests.k8s.pods_run import RunningPod, Site, look

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
TICK_S = 0.05


@dataclass
class Health:
    """What a kubelet concludes from the answers of a container's probes."""

    container: Container
    started: bool = False
    ready: bool = False
    failed: str = ""
    """Why the container must be started anew."""
    _due: dict[str, float] = field(default_factory=dict)
    _row: dict[str, int] = field(default_factory=dict)
    """Answers in a row that speak against what is believed."""

    def __post_init__(self) -> None:
        self.started = "startup" not in self.container.probes
        self.ready = "readiness" not in self.container.probes

    def step(self, at: float) -> None:
        """Ask the probes that are due."""
        for kind in ("readiness", "liveness") if self.started else ("startup",):
            probe = self.container.probes.get(kind)
            if probe and at >= self._due.setdefault(kind, at + probe.initial_delay):
                self._due[kind] = at + probe.period
                self._take(kind, probe, succeeds(look(probe), probe))

    def _take(self, kind: str, probe: Probe, good: bool) -> None:
        believed = {"startup": self.started, "readiness": self.ready, "liveness": True}[kind]
        self._row[kind] = 0 if good == believed and kind != "startup" else self._row.get(kind, 0) + 1
        if good and kind == "startup":
            self.started = True
        elif good and kind == "readiness" and self._row[kind] >= probe.successes:
            self.ready = True
        elif not good and self._row[kind] >= probe.failures:
            if kind == "readiness":
                self.ready = False
            else:
                self.failed = f"{kind} failed {probe.failures} times"


@dataclass(frozen=True)
class Ended:
    """A container that has ended."""

    pod: str
    code: int
    """Its exit code, negative for a signal."""
    why: str
    """`deleted`, `by itself`, or a probe's failure."""


@dataclass
class Kubelet:
    """Runs all pods of a store, each on a thread of its own."""

    store: Store
    site: Site
    variables: Callable[[Object], dict[str, str]]
    """What a pod's account gives it."""
    restart_s: float = 1.0
    """Between a container's end and its next start; Kubernetes waits 10 s, and longer each time."""
    over: threading.Event = field(default_factory=threading.Event)
    running: dict[str, RunningPod] = field(default_factory=dict)
    """By the pods' names."""
    ended: list[Ended] = field(default_factory=list)
    _threads: dict[str, threading.Thread] = field(default_factory=dict)

    def reconcile(self) -> None:
        """Take up the pods that are new."""
        for pod in self.store.all(PODS):
            uid = pod["metadata"]["uid"]
            if uid not in self._threads:
                self._threads[uid] = threading.Thread(target=self._run, args=(pod,), daemon=True)
                self._threads[uid].start()

    def stop(self) -> None:
        """Kill everything and wait for the threads."""
        self.over.set()
        for pod in self.site.pods:
            pod.kill()
        for thread in self._threads.values():
            thread.join()

    def _run(self, pod: Object) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        restarts = 0
        while not self._leaving(namespace, name):
            try:
                running = self._start(pod)
            except PodError as error:
                self._report(pod, Health(_NONE), restarts, {"waiting": {"message": str(error)}})
                self.over.wait(self.restart_s)
                continue
            self.running[name] = running
            self._attend(pod, running, restarts)
            del self.running[name]
            restarts += 1
            self.over.wait(self.restart_s * (not self._leaving(namespace, name)))
        with suppress(ApiError):
            self.store.remove(PODS, namespace, name)

    def _leaving(self, namespace: str, name: str) -> bool:
        pod = self.store.find(PODS, namespace, name)
        return self.over.is_set() or pod is None or "deletionTimestamp" in pod["metadata"]

    def _start(self, pod: Object) -> RunningPod:
        metadata = pod["metadata"]
        identity = Identity(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])
        objects = self.store.all(CONFIG_MAPS, metadata["namespace"])
        for claim in self.store.all(CLAIMS, metadata["namespace"]):
            folder = self.site.directory / "claims" / claim["metadata"]["name"]
            folder.mkdir(parents=True, exist_ok=True)
            self.site.claims = {**self.site.claims, claim["metadata"]["name"]: folder}
        return self.site.start(resolve(pod, objects, identity), metadata["name"], self.variables(pod))

    def _attend(self, pod: Object, running: RunningPod, restarts: int) -> None:
        """Until the container has ended."""
        health = Health(running.pod.main)
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        why = "by itself"
        while running.alive:
            if self._leaving(namespace, name) or health.failed:
                why = health.failed or "deleted"
                self._end(running)
                break
            health.step(time.monotonic())
            self._report(pod, health, restarts, {"running": {}})
            self.over.wait(TICK_S)
        if not self.over.is_set():
            self.ended.append(Ended(name, running.process.wait(), why))
            self._report(pod, Health(_NONE), restarts, {"terminated": {"exitCode": running.process.returncode}})

    def _end(self, running: RunningPod) -> None:
        """The preStop hook, SIGTERM, and SIGKILL when the grace period is over."""
        began, main = time.monotonic(), running.pod.main
        signalled = False
        while running.alive and not self.over.wait(TICK_S):
            after = time.monotonic() - began
            if not signalled and after >= main.pre_stop_s:
                signalled = True
                with suppress(ProcessLookupError):
                    os.kill(running.pid, signal.SIGTERM)
            if after >= running.pod.grace_s:
                break
        running.kill()

    def _report(self, pod: Object, health: Health, restarts: int, state: Object) -> None:
        """Write the pod's status, unless the pod is gone."""
        metadata = pod["metadata"]
        with self.store.changed:
            current = self.store.find(PODS, metadata["namespace"], metadata["name"])
            if current is None:
                return
            ready = "True" if health.ready and health.started else "False"
            before = condition(current, "Ready")
            since = before["lastTransitionTime"] if before.get("status") == ready else now()
            container = {"name": "main", "started": health.started, "ready": ready == "True", "state": state}
            status = {
                "phase": "Running" if "running" in state or restarts else "Pending",
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": since}],
                "containerStatuses": [{**container, "restartCount": restarts}],
            }
            self.store.merge(PODS, metadata["namespace"], metadata["name"], {"status": status})


_NONE = Container(
    name="",
    command=(),
    environment={},
    mounts=(),
    ports={},
    probes={"startup": Probe("", 0), "readiness": Probe("", 0)},
    security={},
)
"""Of a container that does not run: neither started nor ready."""
