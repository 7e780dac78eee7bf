"""`pagelane prebuild`: a worker's configuration, and for which cards and where to compile its FlashInfer modules."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from worker.config import ConfigError
from worker.flags import HelpRequested, load_config

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
        own, rest = _own_flags(list(argv))
        config = load_config(rest, os.environ)
    except HelpRequested:
        sys.stdout.write(f"{USAGE}\n")
        return 0
    except ConfigError as error:
        return _fail(error, 2)
    from engine.cuda.prebuild import PrebuildConfig, prebuild

    out = Path(own["--out"]) if "--out" in own else None
    try:
        prebuild(PrebuildConfig(config.core(), own.get("--arch", "9.0a"), out), os.environ, _say)
    except (ValueError, OSError, RuntimeError) as error:
        return _fail(error, 1)
    return 0


def _own_flags(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split off --arch and --out."""
    own: dict[str, str] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        flag, equals, text = word.partition("=")
        if flag not in ("--arch", "--out"):
            rest.append(word)
            continue
        value = text if equals else next(left, "")
        if not value:
            raise ConfigError(f"{flag} needs a value")
        own[flag] = value
    return own, rest


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"pagelane: error: {' '.join(str(error).split())}\n")
    return code
