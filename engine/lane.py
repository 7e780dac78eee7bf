"""A lane: one scheduler, its page pool and its executor, stepped together."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from engine.messages import Stats
from engine.scheduler import Scheduler
from engine.scheduling import Effects
from engine.step import Executor

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""So many failed steps in a row take the lane out of service: the fault is not in one request."""


class LaneBroken(RuntimeError):
    """The lane cannot go on; its reason is for the operator."""


class Lane:
    """Launches steps ahead as far as `pipeline_depth` allows and resolves them in order."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.step_seconds = 0.0
        self.last_step = clock()
        self._handles: deque[object] = deque()
        self._failed_in_a_row = 0

    @property
    def idle(self) -> bool:
        """True if there is nothing to compute."""
        return self.scheduler.idle and not self._handles

    def advance(self) -> Effects:
        """One turn: launch the next step if one can be planned, then resolve the oldest one if no more fit in flight
        (or if there was nothing to launch). Returns everything that the requests' owners must be told.
        """
        began = self.clock()
        plan = self.scheduler.plan(began)
        if plan is not None:
            try:
                self._handles.append(self.executor.launch(plan))
            except Exception as error:
                self._handles.append(error)
        if not self._handles:
            self.last_step = began
            return self.scheduler.take_effects()
        if plan is not None and len(self._handles) < self.scheduler.config.max_in_flight:
            return self.scheduler.take_effects()
        effects = self._resolve(self._handles.popleft())
        self.last_step = self.clock()
        self.step_seconds += self.last_step - began
        return effects

    def _resolve(self, handle: object) -> Effects:
        try:
            if isinstance(handle, Exception):
                raise handle
            result = self.executor.collect(handle)
        except Exception as error:
            self._failed_in_a_row += 1
            log.exception("step failed (%d in a row)", self._failed_in_a_row)
            if self._failed_in_a_row >= MAX_FAILED_STEPS:
                raise LaneBroken(f"{MAX_FAILED_STEPS} steps in a row failed, the last with: {error}") from error
            return self.scheduler.fail(f"the step that computed this request failed: {error}")
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
            step_seconds=self.step_seconds,
            **asdict(scheduler.counters),
        )
