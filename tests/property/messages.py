"""Bytes for the socket between worker and core: valid messages, damaged ones, and such as were never any."""

import os
from typing import Any

import msgspec
from hypothesis import strategies as st

from engine.messages import Requests, Sampling, Start, Stop, Submit
from kv.hashing import Blake2bHasher, pack_tokens

LONG = bool(os.environ.get("PAGELANE_LONG_PROPERTY_TESTS"))
"""Set by `make property` and `make fuzz`: many more examples, drawn anew each time."""

VOCAB = 50
PAGE_SIZE = 16

encode = msgspec.msgpack.encode


def request(key: int, prompt: list[int], max_tokens: int = 4, **sampling: Any) -> Submit:
    """A request as the worker sends it."""
    packed = pack_tokens(prompt)
    hashes = b"".join(Blake2bHasher(PAGE_SIZE).chain(packed))
    return Submit(key, f"r{key}", packed, hashes, max_tokens, (), Sampling(**sampling))


def plain(message: Any) -> Any:
    """A message as lists and dicts, to be changed at will."""
    return msgspec.msgpack.decode(encode(message))


KEYS = st.integers(1, 12)
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70)
SUBMITS = st.builds(request, KEYS, PROMPTS, st.integers(1, 30))
VALID = st.builds(Requests, st.lists(SUBMITS, max_size=3), st.lists(KEYS, max_size=3))

INTEGERS = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, -1, 2**31, 2**31 - 1, 2**63, -(2**63)])
LEAVES = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=True) | st.text(max_size=8) | st.binary(max_size=24)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
"""Anything that MessagePack can say."""


@st.composite
def odd_fields(draw: st.DrawFn, messages: st.SearchStrategy[Any] = VALID) -> bytes:
    """A message in which a field, at any depth, holds something else."""
    message = plain(draw(messages))
    place: Any = message
    key: Any = draw(st.sampled_from(sorted(message)))
    while isinstance(place[key], list) and place[key] and draw(st.integers(0, 3)):
        place = place[key]
        key = draw(st.integers(0, len(place) - 1))
    place[key] = draw(OBJECTS)
    return encode(message)


@st.composite
def damaged(draw: st.DrawFn, messages: st.SearchStrategy[Any] = VALID) -> bytes:
    """A valid message with bits turned, bytes cut out or put in."""
    frame = bytearray(encode(draw(messages)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "drop"])):
            case "flip" if frame:
                frame[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del frame[at:]
            case "insert":
                frame[at:at] = draw(st.binary(max_size=8))
            case _:
                del frame[at : at + draw(st.integers(1, 8))]
    return bytes(frame)


@st.composite
def shuffled_hashes(draw: st.DrawFn) -> bytes:
    """A request whose block hashes are those of other blocks: a prefix hit that never was one."""
    submit = draw(SUBMITS)
    digests = [bytes([draw(st.integers(0, 3))]) * 16 for _ in range(len(submit.block_hashes) // 16)]
    return encode(Requests([msgspec.structs.replace(submit, block_hashes=b"".join(digests))], []))


EXTREMES = {
    "empty": b"",
    "reserved byte": b"\xc1",
    "deep array": b"\x91" * 100_000,
    "deep array where nothing is looked for": b"\x82\xa4type\xa8requests\xa1x" + b"\x91" * 100_000 + b"\x00",
    "4 G of submits": b"\x82\xa4type\xa8requests\xa7submits\xdd\xff\xff\xff\xff",
    "4 G of cancels": b"\x82\xa4type\xa8requests\xa7cancels\xdd\xff\xff\xff\xff\x01",
    "4 GiB of bytes": b"\xc6\xff\xff\xff\xff",
    "4 GiB of text": b"\xdb\xff\xff\xff\xfe" + b"a" * 100,
    "a long id": encode({"type": "requests", "submits": [[1, "x" * 10**6, b"", b"", 1, [], []]], "cancels": []}),
    "many stop tokens": encode({"type": "requests", "submits": [[2, "", b"\1\0\0\0", b"", 1, [*range(10**5)], []]]}),
    "many cancels": encode({"type": "requests", "submits": [], "cancels": list(range(10**5))}),
    "a list as type": encode({"type": ["requests"]}),
    "no submits": encode({"type": "requests", "submits": None}),
    "1 MB of zeros": bytes(10**6),
}
"""Too long to be printed when they are part of a failure: tests draw their names."""


def named(frame: str | bytes) -> bytes:
    """The bytes of an extreme, or `frame` itself."""
    return EXTREMES[frame] if isinstance(frame, str) else frame


FRAMES = (
    VALID.map(encode)
    | damaged()
    | odd_fields()
    | shuffled_hashes()
    | OBJECTS.map(encode)
    | st.binary(max_size=200)
    | st.sampled_from(sorted(EXTREMES))
)


def stops(frame: bytes) -> bool:
    """True for a message that rightly ends a core."""
    try:
        return isinstance(msgspec.msgpack.decode(frame, type=Start | Requests | Stop), Stop)
    except (ValueError, RecursionError):
        return False
