"""`python -m worker.resolve MODEL LOAD_FORMAT [REVISION]`: find a model, import a GGUF file, download from a hub.

A process of its own, because this takes minutes and nothing can stop a thread in the middle of it: SIGTERM ends this
process within one tensor, and takes a half-written import with it; a download goes on later where it stopped.
"""

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from engine.models.resolve import resolve_model
from worker.process import REASON


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, or 1 after one line with the reason."""
    signal.signal(signal.SIGTERM, _unwind)
    model, load_format, *revision = argv
    try:
        resolve_model(model, load_format, revision=revision[0] if revision else None, say=_say)
    except (ValueError, OSError) as error:
        _say(f"{REASON}{' '.join(str(error).split())}")
        return 1
    return 0


def _unwind(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
