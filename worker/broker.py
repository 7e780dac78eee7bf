"""A ZMQ broker on loopback for the events of one machine's stack.

Dynamo's own publishers bind every interface, whatever address they announce (ai-dynamo 1.6.1); told of a broker, they
connect to it and bind nothing. Events are not authenticated, so where they can be sent from matters.
"""

import contextlib
import threading

import zmq


class EventBroker:
    """XSUB and XPUB on two free ports of `host`, joined by a thread from the start until `close`."""

    def __init__(self, host: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = 0
        publishers, subscribers = self._context.socket(zmq.XSUB), self._context.socket(zmq.XPUB)
        self._sockets = (publishers, subscribers)
        for socket in self._sockets:
            socket.set_hwm(0)  # a lost event leaves the router with a wrong view for good
        ends = [f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}" for socket in self._sockets]
        self.url = f"xsub={ends[0]} , xpub={ends[1]}"
        """What DYN_ZMQ_BROKER_URL is to hold."""
        self._thread = threading.Thread(target=self._run, name="event-broker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            zmq.proxy(*self._sockets)
        for socket in self._sockets:
            socket.close()

    def close(self) -> None:
        """End it. Subscribers hear nothing more."""
        self._context.term()
        self._thread.join()
