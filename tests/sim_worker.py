"""A real worker over a simulated engine core: `python -m tests.sim_worker --sim-directory DIR ... WORKER FLAGS`.

What it publishes is also written down, one JSON line an event, in `DIRECTORY/<pid>.events`. SIGUSR1 has its event loop
stand still; SIGUSR2, too, with the interpreter's lock held.
"""

import argparse
import json
import mmap
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from tests import sim_core
from worker import backend
from worker.backend import Surroundings
from worker.publish import EventRelay
from worker.registration import LEASE_S
from worker.serve import run as serve

LOG_BYTES = 1 << 25


class Log:
    """Lines in a mapped file of a fixed size, zeros behind them: it can be written while the disk is full."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(LOG_BYTES)
            self._memory = mmap.mmap(file.fileno(), LOG_BYTES)

    def add(self, line: str) -> None:
        self._memory.write(line.encode() + b"\n")


def relay_to(path: Path) -> type[EventRelay]:
    """An `EventRelay` that also writes down what Dynamo's publisher has taken."""
    log = Log(path)

    class Recorded(EventRelay):
        def _publish(self, publisher: Any, event: Any) -> None:
            super()._publish(publisher, event)
            log.add(json.dumps([type(event).__name__, event.hashes]))

    return Recorded


def run(argv: list[str]) -> NoReturn:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    sim_core.add_options(parser)
    parser.add_argument("--sim-full-disk", action="store_true", help="no file can be written from the start")
    parser.add_argument("--sim-loop-limit-s", type=float, default=LEASE_S, help="how long the loop may stand still")
    options, flags = parser.parse_known_args(argv)
    full_disk, loop_limit_s = (vars(options).pop(key) for key in ("sim_full_disk", "sim_loop_limit_s"))
    words = [word for key, value in vars(options).items() for word in (f"--{key.replace('_', '-')}", str(value))]
    backend.EventRelay = relay_to(Path(options.sim_directory) / f"{os.getpid()}.events")
    if full_disk:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
    signal.signal(signal.SIGUSR2, lambda *_: re.match("(a+)+b", "a" * 64))
    core_command = (sys.executable, "-m", "tests.sim_core", *words)
    serve(flags, Surroundings(core_command=core_command, loop_limit_s=loop_limit_s))


if __name__ == "__main__":
    run(sys.argv[1:])
