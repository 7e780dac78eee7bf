"""Follows a Dockerfile's instructions without a container engine, over this machine's root instead of the bases.

What that shows: the very commands of the file work, in its order, on what its COPYs bring, and the result starts. What
it does not: the bases themselves, and what `apt-get` would install.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from helm.image.dockerfile import (
    Dockerfile,
    Instruction,
    Stage,
    argument,
    assignments,
    context_files,
    copied,
    expand,
)
from helm.image.sandbox import Mount, Sandbox

SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NETWORK = ("PIP_", "UV_", "SSL_", "REQUESTS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http", "no_proxy")
"""Beginnings of variables that say how this machine reaches packages; a container's builder is told otherwise."""


class BuildError(Exception):
    """A command failed; the text has its instruction and the end of what it said."""


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """What is built, of what, and where."""

    file: Dockerfile
    context: Path
    ignore: Sequence[str]
    """Patterns of the .dockerignore."""
    ground: Path
    """Folder outside the machine's root file system for what stages write."""
    python: str
    """Interpreter that stands for the base's."""
    reachable: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(slots=True)
class Built:
    """A stage after its last instruction: what it wrote, and how its containers run."""

    layer: Path
    environment: dict[str, str]
    workdir: str = "/"
    uid: int = 0
    gid: int = 0
    entrypoint: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def files(self, path: str) -> Path:
        """Where what the stage wrote at an absolute `path` lies on this machine."""
        return self.layer / "upper" / path.lstrip("/")

    def container(self, reachable: Sequence[str]) -> Sandbox:
        """A container of it: read-only, with its user, and memory at /tmp."""
        return Sandbox(
            uid=self.uid,
            gid=self.gid,
            mounts=(Mount("/tmp"),),
            environment=self.environment,
            workdir=self.workdir,
            layer=str(self.layer),
            reachable=reachable,
        )


def build(config: BuildConfig, target: str) -> Built:
    """Build a stage and those that it copies from. Raises `BuildError` and `DockerfileError`."""
    stage = config.file.stage(target)
    layer = config.ground / target
    layer.mkdir()
    (layer / "upper").mkdir()
    built = Built(layer, {"PATH": SEARCH, "HOME": "/root"})
    defaults = {key: value or "" for key, value in config.file.arguments.items()}
    arguments: dict[str, str] = {}
    for one in stage.body:
        values = arguments | built.environment
        match one.word:
            case "ARG":
                arguments |= {name: value or defaults.get(name, "") for name, value in argument(one).items()}
            case "ENV":
                built.environment |= {key: expand(value, values) for key, value in assignments(one).items()}
            case "WORKDIR":
                built.workdir = expand(one.text, values)
                built.files(built.workdir).mkdir(parents=True, exist_ok=True)
            case "USER":
                built.uid, built.gid = map(int, one.text.split(":"))
            case "COPY":
                _copy(config, built, one)
            case "RUN":
                _run(config, built, one, values)
            case "ENTRYPOINT":
                built.entrypoint = one.exec_form or []
            case "CMD":
                built.arguments = one.exec_form or []
    return built


def _copy(config: BuildConfig, built: Built, one: Instruction) -> None:
    stage, sources, target = copied(one)
    place = built.files(os.path.join(built.workdir, target))
    if stage:
        other = build(config, stage)
        (source,) = sources
        if not other.files(source).is_dir():
            raise BuildError(f"line {one.line}: stage {stage} has not made {source}")
        place.parent.mkdir(parents=True, exist_ok=True)
        # Nobody else reads the other stage.
        other.files(source).rename(place)
        shutil.rmtree(other.layer)
        return
    for source in sources:
        root = config.context / source if (config.context / source).is_dir() else None
        for path in context_files(config.context, source, config.ignore):
            under = path.relative_to(source) if root else Path(path.name) if target.endswith("/") else Path()
            (place / under).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(config.context / path, place / under)


def _run(config: BuildConfig, built: Built, one: Instruction, values: Mapping[str, str]) -> None:
    network = {key: value for key, value in config.environ.items() if key.startswith(NETWORK)}
    sandbox = replace(
        built.container(config.reachable),
        environment=network | dict(values) | {"PYTHON": config.python},
        read_only=False,
        privileged=True,
    )
    done = subprocess.run(
        sandbox.command(["/bin/sh", "-c", one.text]),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BuildError(f"line {one.line}: RUN {one.text} ended with code {done.returncode}:\n{said}")


def needs_a_machine(stage: Stage) -> bool:
    """True if a stage changes the base itself, which cannot be followed here."""
    return any(one.word == "RUN" and "apt-get" in one.text for one in stage.body)
