"""What Dynamo's router hears from this worker: which blocks it holds, and how full it is."""

import logging
from collections.abc import Callable
from typing import Protocol

from dynamo.common.backend.publisher import ComponentSnapshot

from engine.messages import Stats
from kv.events import Removed, Stored
from kv.hashing import unpack_tokens

RANK = 0
"""The data-parallel rank: a worker runs one lane."""

logger = logging.getLogger("pagelane.publish")


class EventPublisher(Protocol):
    """The part of Dynamo's `KvEventPublisher` that is used."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        *,
        parent_hash: int | None,
        cache_salt: str | None,
    ) -> None:
        """Announce consecutive blocks after `parent_hash`."""
        ...

    def publish_removed(self, block_hashes: list[int]) -> None:
        """Withdraw blocks."""
        ...


class SnapshotPublisher(Protocol):
    """The part of Dynamo's `SnapshotPublisher` that is used."""

    def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
        """Report the load of a rank."""
        ...


class EventRelay:
    """Passes the lane's KV events to Dynamo in the order they happened.

    Events that come before Dynamo has handed over its publisher are kept: losing one would leave the router with
    children of unknown parents. If there will be none (`enabled` false), nothing is kept.
    """

    def __init__(self, page_size: int, enabled: bool) -> None:
        self.stored_blocks = 0
        """Blocks announced so far."""
        self.removed_blocks = 0
        """Blocks withdrawn so far."""
        self.errors = 0
        """Events that Dynamo's publisher did not take."""
        self._page_size = page_size
        self._enabled = enabled
        self._publisher: EventPublisher | None = None
        self._early: list[Stored | Removed] = []

    def attach(self, publisher: EventPublisher) -> None:
        """Publish to `publisher` from now on, and what was kept first."""
        self._publisher = publisher
        early, self._early = self._early, []
        self.publish(early)

    def publish(self, events: list[Stored | Removed]) -> None:
        """Pass on `events`. An error of Dynamo's publisher is logged and counted, not raised: serving goes on."""
        if not self._enabled:
            return
        if self._publisher is None:
            self._early.extend(events)
            return
        for event in events:
            try:
                self._publish(self._publisher, event)
            except Exception:
                self.errors += 1
                logger.exception("a KV event was not taken: the router's view of this worker is incomplete")

    def _publish(self, publisher: EventPublisher, event: Stored | Removed) -> None:
        if isinstance(event, Removed):
            publisher.publish_removed(event.hashes)
            self.removed_blocks += len(event.hashes)
            return
        publisher.publish_stored(
            unpack_tokens(event.tokens),
            [self._page_size] * len(event.hashes),
            event.hashes,
            parent_hash=event.parent,
            cache_salt=event.cache_salt,
        )
        self.stored_blocks += len(event.hashes)


class LoadReporter:
    """Reports the lane's load: at once when it changes, and again at the latest every `interval_s`.

    The load is the number of referenced pages. Cached pages count as free, since they are evicted on demand: counting
    them would make an idle worker with a warm cache look full.
    """

    def __init__(self, usable_pages: int, interval_s: float, clock: Callable[[], float]) -> None:
        self._usable_pages = usable_pages
        self._interval_s = interval_s
        self._clock = clock
        self._publisher: SnapshotPublisher | None = None
        self._reported: tuple[int, float | None] | None = None
        self._reported_at = 0.0

    def attach(self, publisher: SnapshotPublisher) -> None:
        """Report to `publisher` from now on."""
        self._publisher = publisher

    def report(self, stats: Stats) -> None:
        """Report the load that `stats` shows, unless the same was reported less than an interval ago."""
        if self._publisher is None:
            return
        load = (stats.referenced_pages, hit_rate(stats))
        now = self._clock()
        if load == self._reported and now - self._reported_at < self._interval_s:
            return
        used, rate = load
        snapshot = ComponentSnapshot(
            kv_used_blocks=used,
            kv_total_blocks=self._usable_pages,
            gpu_cache_usage=used / self._usable_pages,
            kv_cache_hit_rate=rate,
            dp_rank=RANK,
        )
        try:
            self._publisher.publish(RANK, snapshot)
        except Exception:
            logger.exception("a load report was not taken")
        self._reported, self._reported_at = load, now


def hit_rate(stats: Stats) -> float | None:
    """Share of admitted prompt tokens that came from the prefix cache; None before the first, which is not 0."""
    return stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else None
