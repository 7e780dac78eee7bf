"""`pagelane prebuild`: a worker's configuration, and for which cards and where to compile its FlashInfer modules."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from worker.config import ConfigError
from worker.flags import HelpRequested, load_config, split_flags
from worker.process import failed

USAGE = """usage: pagelane prebuild --config FILE [--arch 9.0a] [--out DIR]

Compile the FlashInfer modules that a worker of this configuration loads, so that its start compiles nothing. Needs the
extra `cuda` and nvcc, but no GPU.

  --config FILE, --model DIR, ...
      the worker's settings; model, dtype and kv_page_size decide what is compiled
  --arch ARCH
      CUDA architecture as nvcc names it: 8.0 (A100), 8.9 (L40), 9.0a (H100, H200; the default)
  --out DIR
      where to put the modules, to copy them to DIR/* -> <site-packages>/flashinfer/data/aot/ on another machine;
      by default that folder of the installed FlashInfer itself"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 if nothing can be compiled, 2 for a bad command line."""
    try:
        own, rest = split_flags(argv, ("--arch", "--out"))
        config = load_config(rest, os.environ)
    except HelpRequested:
        sys.stdout.write(f"{USAGE}\n")
        return 0
    except ConfigError as error:
        return failed(error, 2)
    from engine.cuda.prebuild import PrebuildConfig, prebuild

    out = Path(own["--out"]) if "--out" in own else None
    try:
        prebuild(PrebuildConfig(config.core(), own.get("--arch", "9.0a"), out), os.environ, _say)
    except (ValueError, OSError, RuntimeError) as error:
        return failed(error, 1)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
