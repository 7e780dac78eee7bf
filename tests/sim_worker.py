"""A real worker over a simulated engine core: `python -m tests.sim_worker --sim-directory DIR ... WORKER FLAGS`.

What it publishes is also written down, one JSON line an event, in `DIRECTORY/<pid>.events`.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests import sim_core
from worker import backend
from worker.backend import Surroundings
from worker.publish import EventRelay
from worker.serve import main


def relay_to(path: Path) -> type[EventRelay]:
    """An `EventRelay` that also writes down what Dynamo's publisher has taken."""

    class Recorded(EventRelay):
        def _publish(self, publisher: Any, event: Any) -> None:
            super()._publish(publisher, event)
            with path.open("a") as file:
                file.write(json.dumps([type(event).__name__, event.hashes]) + "\n")

    return Recorded


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    sim_core.add_options(parser)
    options, flags = parser.parse_known_args(argv)
    words = [word for key, value in vars(options).items() for word in (f"--{key.replace('_', '-')}", str(value))]
    backend.EventRelay = relay_to(Path(options.sim_directory) / f"{os.getpid()}.events")
    return main(flags, Surroundings(core_command=(sys.executable, "-m", "tests.sim_core", *words)))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
