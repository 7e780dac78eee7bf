"""`python -m worker.resolve MODEL LOAD_FORMAT`: find a model, and import it if it is a GGUF file.

A process of its own, because an import takes minutes and nothing can stop a thread in the middle of it: SIGTERM ends
this process within one tensor, and takes the half-written directory with it.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from engine.models.resolve import resolve_model
from worker.process import REASON


class ImportProgress:
    """Says how far the import of a model has come, in quarters."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._quarter = -1

    def __call__(self, done: int, total: int) -> None:
        """Bytes written so far, of how many."""
        quarter = 4 * done // max(total, 1)
        if quarter > self._quarter:
            self._quarter = quarter
            self._say(f"importing the model: {25 * quarter} % of {total >> 20} MiB")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, or 1 after one line with the reason."""
    signal.signal(signal.SIGTERM, _unwind)
    model, load_format = argv
    try:
        resolve_model(model, load_format, ImportProgress(_say))
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
