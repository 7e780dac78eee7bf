"""What every GPU script shares: result lines with their provenance, and parts that fail alone."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.gpu.rehearsal import rehearsed


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _shown(argument: str) -> str:
    """An argument of the command; of a path, the file's name alone."""
    return Path(argument).name if "/" in argument else argument


def _card() -> str:
    """The card's name, asked without a context of this process: scripts that measure memory start others."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "none: a rehearsal"


def provenance() -> dict[str, Any]:
    """Commit, dirty flag, versions, card and command of this run.

    A machine that got the files without their history is told the first two: PAGELANE_COMMIT and PAGELANE_DIRTY.
    """
    commit = os.environ.get("PAGELANE_COMMIT") or _git("rev-parse", "HEAD")
    dirty = os.environ.get("PAGELANE_DIRTY") or str(bool(_git("status", "--porcelain", "--untracked-files=no")))
    packages = ("torch", "triton", "flashinfer-python", "transformers", "numpy")
    return {
        "commit": commit,
        "dirty": dirty.lower() not in ("", "0", "false"),
        "command": " ".join(["python", "-m", f"tests.gpu.{Path(sys.argv[0]).stem}", *map(_shown, sys.argv[1:])]),
        "card": _card(),
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


class Results:
    """A file of JSON lines: provenance first, then one line a result, each printed too."""

    def __init__(self, name: str) -> None:
        default = tempfile.gettempdir() if rehearsed() else Path(__file__).parent / "results"
        folder = Path(os.environ.get("OUT") or default)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{name}.jsonl").open("w", encoding="utf-8")
        self._began = time.perf_counter()
        self.failed = 0
        self.emit("provenance", **provenance())

    def emit(self, check: str, **values: Any) -> None:
        """Write one result; `ok=False` counts as a failure."""
        self.failed += values.get("ok") is False
        line = {"check": check, "at_s": round(time.perf_counter() - self._began, 1), **values}
        text = json.dumps({name: _rounded(value) for name, value in line.items()})
        self._file.write(text + "\n")
        self._file.flush()
        print(text, flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part whose failure must not stop the others."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            lines = traceback.format_exc().splitlines()
            print("\n".join(lines[-25:]), flush=True)
            self.emit(name, ok=False, error=f"{type(error).__name__}: {error}"[:600])
        else:
            self.emit(name, part_s=time.perf_counter() - began)


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
