"""Checks the image without a container engine: `python -m helm.image.check [--static]` in the repository's root.

The Dockerfile is read and judged, the pins of the GPU image are resolved, and the image of the demo is built by the
Dockerfile's own commands and started, read-only and as its user: it must answer a question. What cannot be done here
is said, and why.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helm.image.build import BuildConfig, BuildError, Built, build
from helm.image.dockerfile import Dockerfile, parse, problems, read_ignore
from helm.image.sandbox import SPARE, inner, reason_against

ROOT = Path(__file__).parents[2]
PREFIX = "/opt/pagelane"
DEVELOPERS = ("pytest", "mypy", "ruff", "hypothesis", "pip", "uv")
"""Packages that no worker needs."""
LONGEST_START_S = 300.0
INSIDE = "PAGELANE_IMAGE_CHECK"


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 if anything is wrong."""
    parser = argparse.ArgumentParser("helm.image.check", description=__doc__)
    parser.add_argument("--static", action="store_true", help="read the files and install nothing")
    parser.add_argument(
        "--python", default=getattr(sys, "_base_executable", sys.executable), help="stands for the base's"
    )
    options = parser.parse_args(argv)
    file, ignore = parse((ROOT / "helm/image/Dockerfile").read_text()), read_ignore(ROOT / ".dockerignore")
    found = problems(file, ROOT, ignore)
    say("Dockerfile", f"{len(file.stages)} stages", found)
    if not options.static:
        found += resolved()
        found += built_and_started(file, ignore, options.python)
    return 1 if found else 0


def say(what: str, how: str, wrong: list[str] | None = None) -> None:
    """One line about a part of the check, and one for each thing that is wrong with it."""
    lines = [f"{what}: {'WRONG' if wrong else 'ok'}, {how}", *(f"  {line}" for line in wrong or [])]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def resolved() -> list[str]:
    """The GPU image's pins must be all there is to install, and be there."""
    search = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    command = [str(ROOT / "helm/image/install.sh"), "resolve", "cuda"]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ) | {"PATH": search}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        wrong = done.stderr.strip().splitlines()[-5:]
        say("pins of the GPU image", "they do not resolve", wrong)
        return wrong
    pins = {*(ROOT / ".ci/constraints.txt").read_text().split(), *(ROOT / "helm/image/cuda.txt").read_text().split()}
    packages = re.findall(r"^\S+==\S+", done.stdout, re.MULTILINE)
    loose = [f"{package} is not pinned in helm/image/cuda.txt" for package in packages if package not in pins]
    say("pins of the GPU image", f"{len(packages)} packages", loose)
    return loose


def built_and_started(file: Dockerfile, ignore: list[str], python: str) -> list[str]:
    """Build the CPU image and look at it, as far as this machine allows."""
    reason = reason_against()
    if reason:
        say("image of the demo", f"NOT built and started: {reason}")
        return []
    ground = Path(tempfile.mkdtemp(dir=SPARE))
    reachable = (python, str(Path(python).resolve()))
    config = BuildConfig(file, ROOT, ignore, ground, python, reachable)
    began = time.monotonic()
    try:
        image = build(config, "cpu")
    except BuildError as error:
        say("image of the demo", "it does not build", [str(error)])
        return [str(error)]
    installed = image.files(PREFIX)
    wrong = list(contents(installed))
    say("image of the demo", f"built in {time.monotonic() - began:.0f} s, {size_mb(installed):.0f} MB", wrong)
    wrong += started(image, reachable)
    say("GPU image", "NOT built: its base with nvcc cannot stand on this machine's root")
    return wrong


def size_mb(folder: Path) -> float:
    """Size of a folder's files in MB."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 1e6


def contents(prefix: Path) -> Iterator[str]:
    """What should not be among the installed files, or is missing."""
    (packages,) = prefix.glob("lib/python3*/site-packages")
    for name in DEVELOPERS:
        if (packages / name).exists():
            yield f"{name} is installed"
    for path in packages.rglob("*"):
        if path.is_symlink():
            continue
        if path.stat().st_mode & 0o6002:
            yield f"{path.relative_to(prefix)} is writable by all, or set-id"
        is_module = path.suffix == ".py" and path.parts[len(packages.parts)] in ("worker", "engine", "kv")
        if is_module and not list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc")):
            yield f"{path.relative_to(prefix)} is not compiled, and a read-only root keeps no cache"
    if not list((prefix / "configs").glob("*.yaml")):
        yield "configs/ is missing"


def started(image: Built, reachable: tuple[str, ...]) -> list[str]:
    """Run the image's commands as its containers would."""
    container, wrong = image.container(reachable), []
    lone = "import sys, worker, engine, kv; print(*(m.__path__[0] for m in (worker, engine, kv)), *sys.path)"
    for name, command in {
        "its entry point": [*image.entrypoint, "--help"],
        "a worker's help": ["python", "-m", "worker", "--help"],
        "the frontend's help": ["python", "-m", "dynamo.frontend", "--help"],
        "its imports": ["python", "-c", lone],
        "writing beside /tmp": ["sh", "-c", f"! touch {PREFIX}/x /x 2>/dev/null && touch /tmp/x"],
    }.items():
        done = subprocess.run(
            container.command(command), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        bad = (done.stderr.strip().splitlines() or ["it said nothing"])[-5:] if done.returncode else []
        if name == "its imports":
            bad += [f"{path} is not in the image" for path in done.stdout.split()[:3] if not path.startswith(PREFIX)]
            bad += [f"sys.path has {path}" for path in done.stdout.split()[3:] if str(ROOT) in path]
        say(name, " ".join(command)[:60], bad)
        wrong += bad
    return wrong + served(image, reachable)


def served(image: Built, reachable: tuple[str, ...]) -> list[str]:
    """Run what the image runs by default, on loopback, and ask it something."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The demo listens on every address, in a network of its own; here there is only this machine's.
    words = [word.replace("0.0.0.0", "127.0.0.1") for word in (*image.entrypoint, *image.arguments)]
    command = image.container(reachable).command([*words, "--port", str(port)])
    began, answer, wrong = time.monotonic(), "", []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    )
    try:
        while process.poll() is None and not answer and time.monotonic() - began < LONGEST_START_S:
            time.sleep(0.5)
            answer = ask(port)
        ready = time.monotonic() - began
        if process.poll() is None:
            os.kill(inner(process.pid), signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    if "Paris" not in answer:
        wrong.append(f"it answered {answer!r} after {ready:.0f} s; its log ends: {said[-1500:]}")
    if process.returncode:
        wrong.append(f"it ended with code {process.returncode} on SIGTERM: {said[-500:]}")
    say("its default command", f"answered {answer[:40]!r} {ready:.0f} s after its start, as process 1", wrong)
    return wrong


def ask(port: int) -> str:
    """The answer of what serves at `port`, "" if nothing does yet."""
    models = fetch(f"http://127.0.0.1:{port}/v1/models", None)
    if not models or not models["data"]:
        return ""
    body = {
        "model": models["data"][0]["id"],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    reply = fetch(f"http://127.0.0.1:{port}/v1/chat/completions", body)
    return str(reply["choices"][0]["message"]["content"]) if reply else ""


def fetch(url: str, body: object) -> Any:
    """The JSON that `url` answers a GET with, or a POST of `body`; None if it does not."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
            return json.load(response)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def in_a_namespace(argv: list[str]) -> int:
    """`main` where it may mount memory to build in, which goes with the process."""
    if "--static" in argv or reason_against() or os.environ.get(INSIDE):
        if os.environ.get(INSIDE):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "image", str(SPARE)], check=True)
        return main(argv)
    unshare = shutil.which("unshare") or "unshare"
    command = [unshare, "--mount", "--propagation", "private", "--", sys.executable, "-m", "helm.image.check", *argv]
    return subprocess.run(command, env=dict(os.environ) | {INSIDE: "1"}, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(in_a_namespace(sys.argv[1:]))
