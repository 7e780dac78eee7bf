"""The waiting requests of a lane: priority classes, first come first served within a class, ageing between classes."""

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from engine.request import Request


class WaitingQueue:
    """Requests that wait for a row. The cost of an operation does not grow with their number.

    A request's rank is its class plus one for every `aging_s` seconds since its arrival, so that a low class waits
    longer but not for ever. Within a class requests stand in the order of their submission, and so of their rank; a
    preempted one returns to the place that it had.
    """

    def __init__(self, aging_s: float | None) -> None:
        self._aging_s = aging_s
        self._fresh: dict[int, OrderedDict[int, Request]] = {}
        # Preempted requests, by submission; never more than there are rows.
        self._returned: dict[int, list[Request]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, request: Request) -> None:
        """Queue a new request at the tail of its class."""
        self._fresh.setdefault(request.priority_class, OrderedDict())[request.key] = request
        self._length += 1

    def put_back(self, request: Request) -> None:
        """Queue a preempted request ahead of all that were submitted after it."""
        insort(self._returned.setdefault(request.priority_class, []), request, key=lambda other: other.order)
        self._length += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        if request.preemptions:
            self._returned[request.priority_class].remove(request)
        else:
            del self._fresh[request.priority_class][request.key]
        self._length -= 1

    def first(self, count: int, now: float) -> list[Request]:
        """The next `count` requests in the order in which they should be admitted."""
        ranked = [self._ranked(queue, now) for queue in self._queues()]
        if len(ranked) == 1:
            return [request for _, request in islice(ranked[0], count)]
        return [request for _, request in islice(heapq.merge(*ranked, key=lambda pair: pair[0]), count)]

    def oldest_arrival(self) -> float | None:
        """Arrival time of the request that has waited longest, None if none waits."""
        return min((next(queue).arrival for queue in self._queues()), default=None)

    def late(self, deadline: float) -> list[Request]:
        """Requests that arrived before `deadline` and have never run, class by class."""
        found = []
        for queue in self._fresh.values():
            for request in queue.values():
                if request.arrival >= deadline:
                    break
                found.append(request)
        return found

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no promised order. Walks the queue: for tests."""
        for queue in self._queues():
            yield from queue

    def _queues(self) -> list[Iterator[Request]]:
        """Every queue that is not empty, each in the order of submission."""
        fresh = [iter(queue.values()) for queue in self._fresh.values() if queue]
        return fresh + [iter(queue) for queue in self._returned.values() if queue]

    def _ranked(self, queue: Iterator[Request], now: float) -> Iterator[tuple[tuple[int, int], Request]]:
        for request in queue:
            risen = int((now - request.arrival) / self._aging_s) if self._aging_s else 0
            yield (-request.priority_class - risen, request.order), request
