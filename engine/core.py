"""The engine core's loop: messages in, a step, one message out. One process, one thread, no asyncio."""

import logging
import os
import time
from array import array
from collections.abc import Callable

import msgspec
import zmq

from engine.lane import Lane
from engine.messages import MAX_MESSAGE_BYTES, Drain, Dropped, FromCore, Heartbeat, Requests, StepOutput, Stop, ToCore
from engine.scheduling import DuplicateKey, Effects

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""Longest silence of a core that is not inside a step."""


class Channel:
    """The core's end of the socket to its worker (ZMQ PAIR, MessagePack)."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)

    def send(self, message: FromCore) -> None:
        """Send without waiting: the worker reads everything it is sent, so the queue has no bound."""
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_s: float) -> list[ToCore]:
        """Everything that has arrived and can be read; waits up to `timeout_s` for the first message."""
        messages: list[ToCore] = []
        if self._socket.poll(int(timeout_s * 1000)):
            while True:
                try:
                    frame = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    messages.append(self._decode(frame))
                except (ValueError, RecursionError, MemoryError) as error:
                    self.drop(f"it has {len(frame)} bytes and cannot be read: {error}")
        return messages

    def _decode(self, frame: bytes) -> ToCore:
        if len(frame) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has at most {MAX_MESSAGE_BYTES} bytes")
        return self._decoder.decode(frame)

    def drop(self, reason: str) -> None:
        """Go on without a message, and say so: the worker ends the requests that may have stood in it."""
        reason = " ".join(reason.split())
        log.error("a message from the worker is dropped: %s", reason)
        self.send(Dropped(reason))

    def close(self) -> None:
        """Close the socket; messages still unsent get a second to leave."""
        self._socket.close()
        self._context.term()


class Core:
    """Serves one lane to one worker until it is told to stop or the worker is gone."""

    def __init__(self, lane: Lane, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self.lane = lane
        self.channel = channel
        self.clock = clock
        self._parent = os.getppid()
        self._last_sent = clock()

    def run(self) -> None:
        """The loop. Returns on `Stop` or when the parent process has died."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Take what has come, do a step, report. False if this core is to end."""
        for message in self.channel.receive(HEARTBEAT_S if self.lane.idle else 0.0):
            if isinstance(message, Stop):
                return False
            if isinstance(message, Requests):
                self._take(message)
            elif isinstance(message, Drain):
                self.lane.scheduler.close()
            else:
                log.error("a message from the worker is dropped: the core has started already")
        if os.getppid() != self._parent:
            log.warning("the worker process is gone; the engine core ends")
            return False
        self._report(self.lane.advance())
        return True

    def _take(self, message: Requests) -> None:
        now = self.clock()
        for submit in message.submits:
            try:
                self.lane.scheduler.submit(submit, now)
            except DuplicateKey as error:  # ending it would end the other: they have one name
                log.error("a request is dropped: %s", error)
        for key in message.cancels:
            self.lane.scheduler.cancel(key)

    def _report(self, effects: Effects) -> None:
        """One message for whatever a turn has brought; a heartbeat if it brought nothing for a while."""
        events = self.lane.scheduler.pool.events.drain()
        now = self.clock()
        if effects.keys or effects.finished or effects.prompt_logprobs or effects.cached or events:
            self.channel.send(
                StepOutput(
                    keys=effects.keys,
                    tokens=array("i", effects.tokens).tobytes(),
                    finished=effects.finished,
                    events=events,
                    stats=self.lane.stats(),
                    cached=effects.cached,
                    logprobs=effects.logprobs,
                    prompt_logprobs=effects.prompt_logprobs,
                )
            )
        elif now - self._last_sent >= HEARTBEAT_S:
            self.channel.send(Heartbeat(self.lane.stats(), now - self.lane.last_step))
        else:
            return
        self._last_sent = now
