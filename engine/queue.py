"""The waiting requests of a lane: priority classes, first come first served within a class, ageing between classes."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from engine.request import Request


class WaitingQueue:
    """Requests that wait for a row. Every operation costs the same however many wait.

    A request's rank is its class plus one for every `aging_s` seconds since its arrival, so that a low class waits
    longer but not for ever. Within a class ranks fall from head to tail, which makes the next request the best of at
    most 33 heads.
    """

    def __init__(self, aging_s: float | None) -> None:
        self._aging_s = aging_s
        self._classes: dict[int, OrderedDict[int, Request]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, request: Request) -> None:
        """Queue a new request at the tail of its class."""
        self._queue(request)[request.key] = request
        self._length += 1

    def return_to_head(self, request: Request) -> None:
        """Queue a preempted request at the head of its class."""
        queue = self._queue(request)
        queue[request.key] = request
        queue.move_to_end(request.key, last=False)
        self._length += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._classes[request.priority_class][request.key]
        self._length -= 1

    def first(self, count: int, now: float) -> list[Request]:
        """The next `count` requests in the order in which they should be admitted."""
        heads = [self._ranked(queue, now) for queue in self._classes.values() if queue]
        if len(heads) == 1:
            return [request for _, request in islice(heads[0], count)]
        return [request for _, request in islice(heapq.merge(*heads, key=lambda pair: pair[0]), count)]

    def oldest_arrival(self) -> float | None:
        """Arrival time of the request that has waited longest, None if none waits."""
        heads = [next(iter(queue.values())) for queue in self._classes.values() if queue]
        return min((request.arrival for request in heads), default=None)

    def late(self, deadline: float) -> list[Request]:
        """Requests that arrived before `deadline` and have never run, in no promised order."""
        found = []
        for queue in self._classes.values():
            for request in queue.values():
                if request.preemptions:
                    continue
                if request.arrival >= deadline:
                    break
                found.append(request)
        return found

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, class by class. Walks the queue: for tests."""
        for queue in self._classes.values():
            yield from queue.values()

    def _queue(self, request: Request) -> OrderedDict[int, Request]:
        return self._classes.setdefault(request.priority_class, OrderedDict())

    def _ranked(self, queue: OrderedDict[int, Request], now: float) -> Iterator[tuple[tuple[int, int], Request]]:
        for request in queue.values():
            risen = int((now - request.arrival) / self._aging_s) if self._aging_s else 0
            yield (-request.priority_class - risen, request.order), request
