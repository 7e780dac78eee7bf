"""A lane: one scheduler, its page pool and its executor, stepped together."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from engine.messages import Stats
from engine.recorder import FlightRecorder
from engine.scheduler import Scheduler
from engine.scheduling import Effects
from engine.step import DeviceCounters, Executor

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""So many failed steps in a row take the lane out of service: the fault is not in one request."""


class LaneBroken(RuntimeError):
    """The lane cannot go on; its reason is for the operator."""


class Lane:
    """Launches steps ahead as far as `pipeline_depth` allows and resolves them in order."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        device: Callable[[], DeviceCounters] = DeviceCounters,
    ) -> None:
        """`device` tells what the executor's device has done since its warm-up."""
        self._device = device
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.step_seconds = {"decode": 0.0, "unified": 0.0}
        """Seconds that steps took to plan, launch and resolve, by their kind."""
        self.last_step = clock()
        self.recorder = FlightRecorder(-1, clock)
        """Where the steps are written down. A core replaces it by one whose memory its worker can read."""
        self._handles: deque[tuple[str, object]] = deque()
        """Steps in flight: their kind, and what `launch` gave or raised."""
        self._failed_in_a_row = 0
        self._launch_failed = False

    @property
    def idle(self) -> bool:
        """True if there is nothing to compute."""
        return self.scheduler.idle and not self._handles

    def advance(self) -> Effects:
        """One turn: launch the next step if one can be planned, then resolve the oldest one if no more fit in flight
        (or if there was nothing to launch). Returns everything that the requests' owners must be told.
        """
        began = self.clock()
        if self.scheduler.idle:
            self.last_step = began  # only time with work counts
        if not self._launch_failed and self._launch(began):
            launched = self.clock()
            self.step_seconds[self._handles[-1][0]] += launched - began
            if len(self._handles) < self.scheduler.config.max_in_flight:
                return self.scheduler.take_effects()
            began = launched
        if not self._handles:
            return self.scheduler.take_effects()
        kind, handle = self._handles.popleft()
        effects = self._resolve(handle)
        self.last_step = self.clock()
        self.step_seconds[kind] += self.last_step - began
        return effects

    def _launch(self, now: float) -> bool:
        """Launch the next step, if one can be planned.

        The device never hears of a step whose launch fails: its row starts and table updates are lost. So nothing is
        launched behind it until it has resolved and its requests are gone; a later step of theirs would write through a
        stale table.
        """
        plan = self.scheduler.plan(now)
        if plan is None:
            return False
        self.recorder.planned(plan, self.scheduler)
        kind = "unified" if plan.chunks else "decode"
        try:
            self._handles.append((kind, self.executor.launch(plan)))
        except Exception as error:
            self._handles.append((kind, error))
            self._launch_failed = True
        self.recorder.launched()
        return True

    def _resolve(self, handle: object) -> Effects:
        try:
            if isinstance(handle, Exception):
                self._launch_failed = False
                raise handle
            result = self.executor.collect(handle)
        except Exception as error:
            self.recorder.resolved(f"{type(error).__name__}: {error}")
            self._failed_in_a_row += 1
            log.exception("step failed (%d in a row)", self._failed_in_a_row)
            if self._failed_in_a_row >= MAX_FAILED_STEPS:
                raise LaneBroken(f"{MAX_FAILED_STEPS} steps in a row failed, the last with: {error}") from error
            return self.scheduler.fail(f"the step that computed this request failed: {error}")
        self.recorder.resolved()
        self._failed_in_a_row = 0
        return self.scheduler.resolve(result)

    def stats(self) -> Stats:
        """Gauges and counters as of now."""
        scheduler, pool, now = self.scheduler, self.scheduler.pool, self.clock()
        return Stats(
            waiting=len(scheduler.waiting),
            prefilling=len(scheduler.rows.prefilling),
            active=len(scheduler.rows.active),
            draining=len(scheduler.rows.draining),
            free_pages=pool.free_pages,
            cached_pages=pool.cached_pages,
            referenced_pages=pool.referenced_pages,
            stored_blocks=pool.events.stored_blocks,
            removed_blocks=pool.events.removed_blocks,
            queue_age_s=scheduler.queue_age(now),
            decode_step_seconds=self.step_seconds["decode"],
            unified_step_seconds=self.step_seconds["unified"],
            **self._device()._asdict(),
            **asdict(scheduler.counters),
        )
