"""`python -m engine ADDRESS`: the engine core's process. The worker starts it, sends `Start` and gets `Ready`."""

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import CoreConfig
from engine.core import Channel, Core
from engine.messages import Failed, Ready, Start, Stop
from engine.recorder import FlightRecorder

if TYPE_CHECKING:
    from engine.build import BuiltLane

PR_SET_PDEATHSIG = 1
START_S = 30.0
"""How long the worker may take to send `Start`."""


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, whatever the parent dies of (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_briefly() -> None:
    """Have OpenMP's threads spin for microseconds before they sleep; takes effect because torch is not loaded yet.

    By default they spin for milliseconds, and where another process wants a core whole time slices are lost at every
    barrier. SmolLM2 on 2 cores, one stream: beside one busy process a step takes 272 ms in the median and 2.3 s at p90,
    against 27 ms alone. Tokens a second beside one busy process: 2 by default, 11 with 6000 spins, 13 with 2000; alone,
    8 streams are 5 % faster with 6000 than with 2000.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "6000")


def dump_stacks_on_signal() -> None:
    """Have SIGUSR1 write the stacks of all threads to stderr, from C: also while a thread holds the interpreter lock
    for ever. The worker sends it to a core that makes no steps, before it kills it. Crashes write theirs, too.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def configure_logging() -> None:
    """One readable line per record on stderr, in the worker's format."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )


def build(config: CoreConfig) -> "BuiltLane":
    """The lane that `config` describes. Imported late: an address and a `Start` are checked without torch."""
    from engine.build import build_lane

    return build_lane(config, Path(config.model), time.monotonic)


def await_start(channel: Channel, clock: Callable[[], float]) -> Start | Stop | None:
    """What the worker starts this core with; `Stop` if it wants it to end at once; None, and a log line, if neither
    comes within `START_S`. Nothing else may come before `Ready`.
    """
    start: Start | None = None
    deadline = clock() + START_S
    while start is None and (left := deadline - clock()) > 0:
        for message in channel.receive(left):
            if isinstance(message, Stop):
                return message
            if isinstance(message, Start) and start is None:
                start = message
            else:
                channel.drop(f"{type(message).__name__} came before the core was ready")
    if start is None:
        logging.error("no Start message came within %g s; the engine core ends", START_S)
    return start


def serve(channel: Channel, build: Callable[[CoreConfig], "BuiltLane"] = build) -> int:
    """Wait for `Start`, build the lane, serve. Returns the exit code."""
    start = await_start(channel, time.monotonic)
    if start is None:
        return 1
    if isinstance(start, Stop):
        return 0
    began = time.monotonic()
    try:
        built = build(start.config)
    except Exception as error:
        logging.debug("start failed", exc_info=True)
        channel.send(Failed(f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"))
        return 1
    seconds = {**built.seconds, "total": time.monotonic() - began}
    logging.info("started in %s", ", ".join(f"{phase} {passed:.1f} s" for phase, passed in seconds.items()))
    gc.collect()
    gc.freeze()
    channel.send(
        Ready(
            usable_pages=built.capacity.usable_pages,
            page_size=built.capacity.page_size,
            servable_length=built.servable_length,
            hasher=built.lane.scheduler.hasher.fingerprint,
            vocab_size=built.vocab_size,
            load_line=built.load_line,
            memory=built.memory,
            seconds=seconds,
            parameters=tuple(sorted(built.parameters)),
            step_costs=built.step_costs,
        )
    )
    try:
        if start.recorder >= 0:
            built.lane.recorder = FlightRecorder(start.recorder, time.monotonic)
        Core(built.lane, channel).run()
    except Exception as error:
        logging.exception("the engine core cannot go on")
        channel.send(Failed(f"{error}"))
        return 1
    return 0


def main(build: Callable[[CoreConfig], "BuiltLane"] = build) -> int:
    """Entry point. Interrupts and terminations are the worker's business: it drains first and then sends `Stop`."""
    end_with_parent()
    wait_briefly()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dump_stacks_on_signal()
    configure_logging()
    channel = Channel(sys.argv[1])
    try:
        return serve(channel, build)
    finally:
        channel.close()


if __name__ == "__main__":
    sys.exit(main())
