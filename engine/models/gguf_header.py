"""Walks the head of a GGUF file and holds every count in it against the file's size. No torch.

gguf-py believes the counts: an array of 2^40 numbers in a file of 100 bytes keeps it busy, and growing, without end.
"""

import struct
from pathlib import Path
from typing import BinaryIO

from engine.models.files import ModelError

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type's number; strings and arrays have none."""
_STRING, _ARRAY = 8, 9
_LEAST_PAIR = 8 + 1 + 4 + 1
"""Bytes of the smallest pair of key and value: length and one letter of the key, type, a byte."""
_LEAST_TENSOR = 8 + 1 + 4 + 4 + 8
"""The same for the description of a tensor: name, dimensions, type, offset."""
_MOST_DIMENSIONS = 4


def check_header(path: Path) -> None:
    """Raise `ModelError` that names `path` and the key where a count is more than the file can hold.

    Reads keys, values and descriptions of tensors (llama.cpp's docs: gguf.md), little-endian, versions 2 and 3.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            _Walk(path, file, size).run()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


class _Walk:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._left = size
        self._at = "the head"

    def run(self) -> None:
        if self._read(4) != b"GGUF":
            raise self._error("it does not begin with GGUF")
        version = self._number("<I")
        if version not in (2, 3):
            raise self._error(f"its version is {version}; supported: 2 and 3, little-endian")
        tensors = self._count("tensors", _LEAST_TENSOR)
        for _ in range(self._count("keys", _LEAST_PAIR)):
            key = self._text("a key")
            self._at = f"key {key[:80].decode(errors='replace')!r}"
            self._value(self._number("<I"))
        for _ in range(tensors):
            self._at = "the description of a tensor"
            self._text("its name")
            dimensions = self._number("<I")
            if dimensions > _MOST_DIMENSIONS:
                raise self._error(f"it has {dimensions} dimensions, but at most {_MOST_DIMENSIONS} are possible")
            self._skip(8 * dimensions + 4 + 8, "it")

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text("its text")
        elif kind == _ARRAY:
            inner = self._number("<I")
            if inner == _STRING:
                for _ in range(self._count("texts", 8)):
                    self._text("a text")
            else:
                width = self._width(inner)
                self._skip(width * self._count("values", width), "its values")
        else:
            self._skip(self._width(kind), "its value")

    def _width(self, kind: int) -> int:
        if kind not in _WIDTHS:
            raise self._error(f"a value is of type {kind}; supported: numbers, texts, and lists of these")
        return _WIDTHS[kind]

    def _count(self, what: str, least: int) -> int:
        count = self._number("<Q")
        if count * least > self._left:
            raise self._error(f"{count} {what} are announced, but only {self._left} bytes are left")
        return count

    def _text(self, what: str) -> bytes:
        length = self._number("<Q")
        if length > self._left:
            raise self._error(f"{what} has {length} bytes, but only {self._left} are left")
        return self._read(length)

    def _skip(self, count: int, what: str) -> None:
        if count > self._left:
            raise self._error(f"{what} has {count} bytes, but only {self._left} are left")
        self._left -= count
        self._file.seek(count, 1)

    def _number(self, form: str) -> int:
        content = self._read(struct.calcsize(form))
        if len(content) < struct.calcsize(form):
            raise self._error("the file ends there")
        return int(struct.unpack(form, content)[0])

    def _read(self, count: int) -> bytes:
        content = self._file.read(count)
        self._left -= len(content)
        return content

    def _error(self, what: str) -> ModelError:
        return ModelError(
            f"{self._path}: not a complete GGUF file ({self._size} bytes): at {self._at}: {what}; download it again"
        )
