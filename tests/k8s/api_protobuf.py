"""Reads the Secrets in which helm keeps its releases: Go's typed clients send Protocol Buffers, and take JSON back."""

import base64
from collections.abc import Iterator

from tests.k8s.api_store import Object

MAGIC = b"k8s\x00"
_VARINT, _BYTES = 0, 2


def secret(body: bytes) -> Object:
    """A Secret as JSON would have it, with the fields that helm sets. Raises `ValueError` for another body."""
    if not body.startswith(MAGIC):
        raise ValueError(f"a body of Kubernetes begins with {MAGIC!r}, not with {body[:4]!r}")
    envelope = dict(fields(body[len(MAGIC) :]))
    kind = dict(fields(envelope[1]))[2].decode()
    if kind != "Secret":
        raise ValueError(f"a {kind} as Protocol Buffers is not known here")
    found, data = Object(), {}
    for number, value in fields(envelope[2]):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif number == 2:
            key, content = _entry(value)
            data[key] = base64.b64encode(content).decode()
        elif number == 3:
            found["type"] = value.decode()
    return {"apiVersion": "v1", "kind": "Secret", **found, "data": data}


def _metadata(message: bytes) -> Object:
    names = {1: "name", 3: "namespace", 6: "resourceVersion"}
    found: Object = {"labels": {}}
    for number, value in fields(message):
        if number in names and value:
            found[names[number]] = value.decode()
        elif number == 11:
            key, content = _entry(value)
            found["labels"][key] = content.decode()
    return found


def _entry(message: bytes) -> tuple[str, bytes]:
    """A pair of a map."""
    pair = dict(fields(message))
    return pair[1].decode(), pair.get(2, b"")


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field that is a text, bytes or a message; numbers are skipped."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        size, at = _varint(message, at)
        if tag & 7 == _VARINT:
            continue
        if tag & 7 != _BYTES:
            raise ValueError(f"wire type {tag & 7} is not known here")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
