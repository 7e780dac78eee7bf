"""Starts resolved pods on this machine: their own commands, with the image's environment, nothing of this process's.

Two ways. Plain: paths of mounts lead to temporary folders, and the image's /opt/pagelane is this environment, since the
image's PATH begins with its `bin` and commands are found by name. Sandboxed (`helm/image/sandbox.py`): the mounts lie
at their own paths, this environment is mounted at /opt/pagelane, and the command is process 1, read-only and as the
pod's user. In both, everything listens on loopback at free ports, and discovery is by files in place of the cluster's
API, unless a site has one.
"""

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from helm.image.dockerfile import assignments, parse
from helm.image.sandbox import Mount, Sandbox, inner
from tests.k8s.pods import Container, Pod, PodError, Probe, VolumeMount, containers, moved
from tests.k8s.pods_probes import Answer
from worker.broker import EventBroker
from worker.local import LOOPBACK, PORTS, free_port

ROOT = Path(__file__).parents[2]
PREFIX = "/opt/pagelane"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
INIT_S = 120.0


def image_environment(target: str = "cpu") -> dict[str, str]:
    """What the image's ENV sets, its PATH before the system's."""
    stage = parse((ROOT / "helm/image/Dockerfile").read_text()).stage(target)
    found = {key: value for one in stage.body if one.word == "ENV" for key, value in assignments(one).items()}
    return found | {"PATH": found["PATH"].replace("$PATH", SYSTEM_PATH)}


@dataclass(frozen=True)
class Replacement:
    """A program of the image that tests run another one for, and what that needs."""

    words: Sequence[str]
    by: Sequence[str]
    """In the sandbox, `{python}` and `{shared}` are where the interpreter and the shared folder lie there."""


@dataclass
class Site:
    """Where pods run: one discovery, and folders for their volumes."""

    directory: Path
    sandboxed: bool = False
    claims: Mapping[str, Path] = field(default_factory=dict)
    """Folders that stand for PersistentVolumeClaims."""
    replacements: Sequence[Replacement] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of every pod, over its own."""
    pods: list["RunningPod"] = field(default_factory=list)
    broker_url: str = ""
    by_files: bool = True
    """Pods find each other by files. Otherwise as they say themselves, with what `start` is given for it."""

    @property
    def shared(self) -> Path:
        """A folder that every pod sees: discovery, and what tests leave for their programs."""
        return self.directory / "shared"

    def start(self, pod: Pod, name: str, variables: Mapping[str, str] | None = None) -> "RunningPod":
        """Run the init containers, then start the main one; its folder is named `name`. `variables` win over others."""
        for container in containers(pod):
            _refuse_unsafe(container)
        place = _Place(self, self.directory / name)
        ports = {number: free_port(PORTS) for number in pod.main.ports.values()}
        paths = {} if self.sandboxed else place.folders(pod)
        pod = moved(pod, ports, paths, self._variables(place) | dict(variables or {}))
        for container in pod.init:
            place.run_init(container)
        running = RunningPod(name, pod, place.popen(pod.main), place)
        self.pods.append(running)
        return running

    def _variables(self, place: "_Place") -> dict[str, str]:
        shared = "/shared" if self.sandboxed else str(self.shared)
        return {
            **({"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": f"{shared}/discovery"} if self.by_files else {}),
            # Servers that the chart lets listen on every address of the pod.
            "DYN_SYSTEM_HOST": LOOPBACK,
            "DYN_HTTP_HOST": LOOPBACK,
            **({"DYN_ZMQ_BROKER_URL": self.broker_url} if self.broker_url else {}),
            **({} if self.sandboxed else {"TMPDIR": str(place.folder("/tmp"))}),
            **self.variables,
        }


@contextmanager
def site(*, with_broker: bool = True, **options: Any) -> Iterator[Site]:
    """A site whose pods and folder go with the context. Without a broker, events go over sockets on every address."""
    broker = EventBroker(LOOPBACK) if with_broker else None
    # Not pytest's folder, whose long path the engine's socket would be in: it has at most 107 bytes.
    place = Site(Path(tempfile.mkdtemp(prefix="pods-")), broker_url=broker.url if broker else "", **options)
    (place.shared / "discovery").mkdir(parents=True)
    for folder in (place.shared, place.shared / "discovery"):
        folder.chmod(0o777)
    try:
        yield place
    except BaseException as error:
        for pod in place.pods:
            error.add_note(f"--- {pod.name}\n{pod.log()[-3000:]}")
        raise
    finally:
        for pod in place.pods:
            pod.kill()
        if broker:
            broker.close()
        shutil.rmtree(place.directory)


def _refuse_unsafe(container: Container) -> None:
    """What the sandbox does anyway must be what the pod asks for."""
    wanted = {
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    for key, value in wanted.items():
        if container.security.get(key) != value:
            raise PodError(f"container {container.name}: {key} is {container.security.get(key)}, but must be {value}")
    if not container.security.get("runAsUser"):
        raise PodError(f"container {container.name}: runAsUser must be a number other than 0")


@dataclass
class _Place:
    """A pod's folders and processes on this machine."""

    site: Site
    root: Path

    def folder(self, path: str) -> Path:
        """The folder that stands for a path of the pod's containers."""
        found = self.root / "mounts" / path.lstrip("/")
        found.mkdir(parents=True, exist_ok=True)
        return found

    def folders(self, pod: Pod) -> dict[str, str]:
        """Filled folders for every mount, by the mounts' paths. /dev/shm is this machine's."""
        mounts = {mount.path: mount for container in containers(pod) for mount in container.mounts}
        return {path: str(self.filled(mount)) for path, mount in mounts.items() if path != "/dev/shm"}

    def filled(self, mount: VolumeMount) -> Path:
        """The folder for a mount, with its files."""
        volume = mount.volume
        if volume.kind == "claim":
            if volume.name not in self.site.claims:
                raise PodError(f"the claim {volume.name} has no stand-in")
            return self.site.claims[volume.name] / mount.sub_path
        folder = self.folder(mount.path)
        for name, text in volume.files.items():
            (folder / name).write_text(text)
        return folder

    def run_init(self, container: Container) -> None:
        """Run an init container to its end."""
        process = self.popen(container)
        if process.wait(INIT_S):
            raise PodError(f"{container.name} ended with {process.returncode}: {self.log(container.name)[-2000:]}")

    def popen(self, container: Container) -> subprocess.Popen[bytes]:
        """Start a container; what it writes goes to a file."""
        self.root.mkdir(parents=True, exist_ok=True)
        command, environment = self._command(container)
        with (self.root / f"{container.name}.log").open("ab") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return subprocess.Popen(command, env=environment, cwd="/", start_new_session=True, **pipes)

    def _command(self, container: Container) -> tuple[list[str], dict[str, str]]:
        environment = image_environment() | dict(container.environment)
        if self.site.sandboxed:
            command = self._replaced(container.command, f"{PREFIX}/bin/python", "/shared")
            return self._sandbox(container, environment).command(command), dict(os.environ)
        environment["PATH"] = environment["PATH"].replace(PREFIX, sys.prefix)
        return self._replaced(container.command, sys.executable, str(self.site.shared)), environment

    def _replaced(self, command: Sequence[str], python: str, shared: str) -> list[str]:
        for replacement in self.site.replacements:
            size = len(replacement.words)
            if list(command[:size]) == list(replacement.words):
                by = [word.format(python=python, shared=shared) for word in replacement.by]
                return [*by, *command[size:]]
        return list(command)

    def _sandbox(self, container: Container, environment: dict[str, str]) -> Sandbox:
        group = int(container.security["fsGroup"])
        mounts = [
            Mount(PREFIX, sys.prefix, read_only=True),
            # What this environment consists of beside itself, where a mount of the pod may hide it.
            *(Mount(path, path, read_only=True) for path in (str(ROOT), sys.prefix, sys.base_prefix)),
            Mount("/shared", str(self.site.shared)),
        ]
        for mount in container.mounts:
            if mount.volume.kind == "memory":
                mounts.append(Mount(mount.path, group=group))
                continue
            folder = self.filled(mount)
            if mount.volume.kind == "empty":
                os.chown(folder, 0, group)
                folder.chmod(0o2777)
            mounts.append(Mount(mount.path, str(folder), mount.read_only))
        return Sandbox(
            uid=int(container.security["runAsUser"]),
            gid=int(container.security["runAsGroup"]),
            groups=(group,),
            mounts=sorted(mounts, key=lambda mount: mount.target.count("/")),
            environment=environment,
            workdir="/",
            reachable=(str(ROOT / "x"), f"{sys.prefix}/x", f"{sys.base_prefix}/x"),
        )

    def log(self, container: str) -> str:
        """All that a container has written so far."""
        return (self.root / f"{container}.log").read_text(errors="replace")


@dataclass
class RunningPod:
    """A started main container."""

    name: str
    pod: Pod
    process: subprocess.Popen[bytes]
    place: _Place

    @property
    def pid(self) -> int:
        """The container's first process, as this machine counts."""
        return inner(self.process.pid) if self.place.site.sandboxed else self.process.pid

    @property
    def alive(self) -> bool:
        """False once the container has ended."""
        return self.process.poll() is None

    def url(self, port: str) -> str:
        """Base URL of a named port."""
        return f"http://{LOOPBACK}:{self.pod.main.ports[port]}"

    def log(self) -> str:
        """All that the main container has written so far."""
        return self.place.log(self.pod.main.name)

    def look(self, probe: Probe) -> Answer:
        """Ask a probe's URL as a kubelet does."""
        return look(probe)

    def wait_for(self, kind: str, wanted: bool, within_s: float) -> float:
        """Wait until a probe succeeds, or fails. Returns the seconds it took; raises `TimeoutError`."""
        began, probe = time.monotonic(), self.pod.main.probes[kind]
        while (200 <= look(probe).status < 400) is not wanted:
            if not self.alive and wanted:
                raise ChildProcessError(f"{self.name} ended with code {self.process.returncode}: {self.log()[-2000:]}")
            if time.monotonic() - began > within_s:
                raise TimeoutError(f"{self.name}: {kind} is not {wanted} after {within_s:g} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def terminate(self) -> None:
        """What a kubelet does first when the pod is deleted: the preStop hook, then SIGTERM."""
        time.sleep(self.pod.main.pre_stop_s)
        os.kill(self.pid, signal.SIGTERM)

    def stop(self) -> int:
        """Delete the pod. Returns the exit code; raises `TimeoutExpired` if the grace period would have ended it."""
        self.terminate()
        return self.process.wait(self.pod.grace_s - self.pod.main.pre_stop_s)

    def kill(self) -> None:
        """SIGKILL to all of it that is left."""
        if self.alive:
            self.process.kill()
            self.process.wait()


def look(probe: Probe) -> Answer:
    """Ask a probe's URL; the status is 0 if nothing answers within the probe's timeout."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(LOOPBACK, probe.port, timeout=probe.timeout)
    try:
        connection.request("GET", probe.path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        status = 0
    finally:
        connection.close()
    return Answer(began, status, time.monotonic() - began)


class Watch:
    """Looks at the probes of a pod all the time, each on a thread of its own, while the context lasts."""

    def __init__(self, pod: RunningPod, pause_s: float = 0.1) -> None:
        self.answers: dict[str, list[Answer]] = {}
        """By the probes' paths, in order."""
        self._over = threading.Event()
        probes = {probe.path: probe for probe in pod.pod.main.probes.values()}
        self._threads = [threading.Thread(target=self._look, args=(probe, pause_s)) for probe in probes.values()]

    def _look(self, probe: Probe, pause_s: float) -> None:
        mine = self.answers.setdefault(probe.path, [])
        patient = replace(probe, timeout=30)
        while not self._over.wait(pause_s):
            mine.append(look(patient))

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def between(self, path: str, start: float, end: float) -> list[Answer]:
        """Answers to questions of that time."""
        return [answer for answer in list(self.answers[path]) if start <= answer.at < end]
