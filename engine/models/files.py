"""Reads files of a model folder as what they are: bytes from a stranger. No torch.

Every file must lie in its folder, be a regular file and be no larger than its kind ever needs, before a byte is read.
"""

import stat
from pathlib import Path
from typing import TypeVar

import msgspec

MIB = 1 << 20
SIZE_LIMITS = {
    "config.json": MIB,
    "generation_config.json": MIB,
    "chat_template.jinja": MIB >> 2,
    "chat_template.json": MIB,
    "special_tokens_map.json": 4 * MIB,
    "added_tokens.json": 16 * MIB,
    "tokenizer_config.json": 16 * MIB,
    "model.safetensors.index.json": 16 * MIB,
    "tokenizer.json": 256 * MIB,
}
"""Most bytes of each file that is read whole: ten times what published models have, or more."""

_MESSAGE_LIMIT = 1500

T = TypeVar("T")


class ModelError(ValueError):
    """A model directory or file that cannot be served. One line that names the file, the field and the way out.

    What a message quotes from a file may break lines, steer a terminal or have megabytes: it is made printable and cut.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())
        if len(line) > _MESSAGE_LIMIT:
            half = _MESSAGE_LIMIT // 2
            line = f"{line[:half]} [{len(line) - 2 * half} characters left out] {line[-half:]}"
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in line))


def read_json(path: Path, kind: type[T]) -> T:
    """Decode `path` as JSON of type `kind`, or raise a `ModelError` that names the file and the field."""
    content = read_file(path)
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, msgspec.DecodeError) as error:  # ValueError: text that is no UTF-8, a number of 5000 digits
        raise ModelError(f"{path}: {error}") from None
    except RecursionError:
        raise ModelError(f"{path}: is nested too deeply; take the file from the model's publisher") from None


def read_file(path: Path) -> bytes:
    """The content of `path`, one of `SIZE_LIMITS` or a file of the same kind.

    Raises `ModelError` for a link that leads out of the folder, for what is no regular file (to open a named pipe would
    wait for ever), and for a file above its size limit.
    """
    check_inside(path)
    limit = SIZE_LIMITS.get(path.name, MIB)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ModelError(f"{path}: is no regular file; put the file itself there")
        if found.st_size > limit:
            raise ModelError(f"{path}: has {found.st_size} bytes, but at most {limit} are read; is it the right file?")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > limit:
        raise ModelError(f"{path}: has more than {limit} bytes, the most that are read; is it the right file?")
    return content


def check_inside(path: Path) -> None:
    """Refuse a link that leads out of the model's folder: whoever packed the folder would choose what is read.

    The links of a hub cache, from snapshots/REVISION to blobs/, are not out of it.
    """
    try:
        home, target = path.parent.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ModelError(f"{path}: cannot be read: {error}; put the file itself there") from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not target.is_relative_to(home) and not target.is_relative_to(blobs):
        raise ModelError(f"{path}: is a link to {target}, outside the model directory; put the file itself there")
