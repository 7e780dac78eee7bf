"""What the worker has to tell its engine core and has not sent yet, packed into messages that the core will take."""

from collections.abc import Iterator
from typing import cast

import msgspec

from engine.messages import MAX_REQUEST_BYTES, Finished, Requests, Submit


class Outbox:
    """Requests and cancellations since the last message.

    A request is encoded when it comes, not when the message goes: one that cannot be, costs the others nothing.
    """

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Submit)
        self._submits: list[msgspec.Raw] = []
        self._sizes: list[int] = []
        self._cancels: list[int] = []

    def submit(self, submit: Submit) -> Finished | None:
        """Take a request; or return its end, if the core could not be sent it."""
        try:
            packed = self._encoder.encode(submit)
            self._decoder.decode(packed)  # the core would drop the whole message
        except (TypeError, ValueError, OverflowError) as error:
            return broken(submit.key, f"the request cannot be sent to the engine core: {error}")
        if len(packed) > MAX_REQUEST_BYTES:
            return broken(
                submit.key,
                f"the request has {len(packed)} bytes, but the engine core takes at most {MAX_REQUEST_BYTES}",
            )
        self._submits.append(msgspec.Raw(packed))
        self._sizes.append(len(packed))
        return None

    def cancel(self, key: int) -> None:
        """Have the core forget a request."""
        self._cancels.append(key)

    def take(self) -> Iterator[Requests]:
        """Everything, in as few messages as their size allows; the cancellations come last."""
        submits, sizes, cancels = self._submits, self._sizes, self._cancels
        self._submits, self._sizes, self._cancels = [], [], []
        begin = room = 0
        for end, size in enumerate(sizes):
            if size > room and end > begin:
                yield _requests(submits[begin:end], [])
                begin = end
            room = (room if end > begin else MAX_REQUEST_BYTES) - size
        yield _requests(submits[begin:], cancels)


def broken(key: int, message: str) -> Finished:
    """The end of a request that never reached the core, by a fault of ours."""
    return Finished(key, "error", 0, 0, 0, message)


def _requests(submits: list[msgspec.Raw], cancels: list[int]) -> Requests:
    """`submits` are encoded already: encoding the message embeds them as they are."""
    return Requests(cast("list[Submit]", submits), cancels)
