"""Runs commands as a container would run them, without a container engine: `Sandbox(...).command(argv)`.

The root is an overlay over this machine's own, so that interpreter and system libraries are at hand and nothing that is
written reaches the machine. Mounts, /proc, /dev and process ids are the sandbox's own, so that the command is process 1
as in a pod; the network is the machine's. Needs root, overlayfs and util-linux (`unshare`, `setpriv`): `reason_against`
says what is missing.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

SPARE = Path("/media")
"""A folder that every system has, hidden in the sandbox's namespace alone: one of its own would stay behind."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the sandbox that is not the overlay's."""

    target: str
    """Absolute path in the sandbox; it is made if it is not there."""
    source: str | None = None
    """Absolute path on this machine; None is a new file system in memory."""
    read_only: bool = False
    group: int | None = None
    """Of memory: the group that may write as well as the user (a pod's fsGroup). None lets everybody write."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What a command finds around it."""

    uid: int = 65532
    gid: int = 65532
    groups: Sequence[int] = ()
    mounts: Sequence[Mount] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """All of it: nothing is inherited."""
    workdir: str = "/"
    read_only: bool = True
    """The root cannot be written, whoever tries."""
    layer: str | None = None
    """Folder, outside this machine's root file system, that holds what was written over the root before and takes what
    is written now; None is an empty one in memory that goes with the command."""
    reachable: Sequence[str] = ()
    """Paths whose parent folders anybody may pass in the sandbox, whatever they allow on this machine."""
    privileged: bool = False
    """Keeps root's capabilities: for commands of an image's build."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` in the sandbox; it ends as `argv` does.

        Signals must be sent to the child of the process that this starts: `unshare` waits for it and passes none on.
        It kills the child when it ends itself.
        """
        space = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=SIGKILL"]
        spec = json.dumps(asdict(self))
        return [*space, "--", sys.executable, "-I", str(Path(__file__).resolve()), spec, *argv]


def inner(pid: int) -> int:
    """Process id, on this machine, of the command that a sandbox runs whose `command` was started as process `pid`.

    Raises `ProcessLookupError` if there is none yet or any more.
    """
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        children = []
    if not children:
        raise ProcessLookupError(f"process {pid} runs no sandbox")
    return int(children[0])


def reason_against() -> str | None:
    """Why no sandbox can be made here, or None."""
    for tool in ("unshare", "setpriv", "mount"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (util-linux)"
    if os.geteuid() != 0:
        return f"making mounts needs root, and this process is user {os.geteuid()}"
    trial = subprocess.run(
        Sandbox(reachable=(sys.executable,)).command(["true"]), capture_output=True, text=True, check=False
    )
    return f"a trial failed: {trial.stderr.strip()[-300:]}" if trial.returncode else None


def enter(spec: Mapping[str, object], argv: Sequence[str]) -> None:
    """Make the sandbox's root in this process's namespaces, go there and become `argv`. Does not return."""
    sandbox = Sandbox(**(dict(spec) | {"mounts": [Mount(**mount) for mount in spec["mounts"]]}))  # type: ignore[arg-type, attr-defined]
    root = _overlay(sandbox.layer)
    for path in sandbox.reachable:
        _open_way(root, Path(path))
    _system(root)
    for mount in sandbox.mounts:
        _mount(root, mount, sandbox.uid)
    if sandbox.read_only:
        _run("mount", "-o", "remount,ro", str(root))
    os.chroot(root)
    os.chdir(sandbox.workdir)
    groups = ["--groups", ",".join(map(str, sandbox.groups))] if sandbox.groups else ["--clear-groups"]
    # The kernel forgets the signal of `unshare --kill-child` when the user changes.
    become = ["setpriv", "--pdeathsig", "KILL", "--reuid", str(sandbox.uid), "--regid", str(sandbox.gid), *groups]
    if not sandbox.privileged:
        become += ["--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs"]
    setpriv = shutil.which("setpriv") or "setpriv"
    os.execve(setpriv, [*become, "--", *argv], dict(sandbox.environment) or {"PATH": os.defpath})


def _overlay(layer: str | None) -> Path:
    """Mount the root, with a file system in memory above this machine's where `layer` names none."""
    above = Path(layer) if layer else SPARE
    if not layer:
        _run("mount", "-t", "tmpfs", "-o", "mode=0755", "sandbox", str(above))
    for name in ("upper", "work", "root"):
        (above / name).mkdir(exist_ok=True)
    layers = f"lowerdir=/,upperdir={above / 'upper'},workdir={above / 'work'}"
    _run("mount", "-t", "overlay", "-o", layers, "sandbox", str(above / "root"))
    return above / "root"


def _open_way(root: Path, path: Path) -> None:
    """Let anybody pass the parents of `path`, and of what it links to, in the overlay."""
    for place in {path, path.resolve()}:
        for parent in reversed(place.parents):
            inside = root / parent.relative_to("/")
            if inside.is_dir():
                inside.chmod(inside.stat().st_mode | 0o011)


def _system(root: Path) -> None:
    """/proc of the sandbox's own processes, and the devices that a container has."""
    _run("mount", "-t", "proc", "-o", "nosuid,nodev,noexec", "proc", str(root / "proc"))
    dev = root / "dev"
    _run("mount", "-t", "tmpfs", "-o", "mode=0755,nosuid", "dev", str(dev))
    for name in DEVICES:
        (dev / name).touch()
        _run("mount", "--bind", f"/dev/{name}", str(dev / name))
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (dev / name).symlink_to(f"/proc/self/fd{target}")
    (dev / "shm").mkdir()
    _run("mount", "-t", "tmpfs", "-o", "mode=1777,size=64m,nosuid,nodev,noexec", "shm", str(dev / "shm"))


def _mount(root: Path, mount: Mount, uid: int) -> None:
    target = root / mount.target.lstrip("/")
    if mount.source is not None and Path(mount.source).is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    else:
        target.mkdir(parents=True, exist_ok=True)
    if mount.source is None:
        owner = "mode=1777" if mount.group is None else f"mode=2770,uid={uid},gid={mount.group}"
        _run("mount", "-t", "tmpfs", "-o", f"{owner},nosuid,nodev", "memory", str(target))
    else:
        _run("mount", "--bind", mount.source, str(target))
    if mount.read_only:
        _run("mount", "-o", "remount,bind,ro", str(target))


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"sandbox: {' '.join(words)}: {done.stderr.strip()}")


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]), sys.argv[2:])
