"""Block hashes: the name of `page_size` tokens together with everything that stands before them.

A prefix-cache hit crosses requests and tenants, so a collision would hand one user's KV to another: the hash is
cryptographic. Token ids travel as little-endian int32 bytes.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from kv.geometry import check_page_size

TOKEN_BYTES = 4
"""Bytes of one packed token id."""

_EVENT_HASH = struct.Struct("<q")

_VERSION = 1
_DIGEST_BYTES = 16
# BLAKE2's personalisation (at most 16 bytes) keeps roots and blocks apart even where their input bytes are equal.
_ROOT = b"pagelane root"
_BLOCK = b"pagelane block"


class HashInputError(ValueError):
    """Bytes given to a hasher do not have the length of what they are said to be."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes; `struct.error` if one does not fit."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpack_tokens(packed: bytes) -> list[int]:
    """Inverse of `pack_tokens`."""
    return list(struct.unpack(f"<{len(packed) // TOKEN_BYTES}i", packed))


def split_digests(packed: bytes, size: int) -> list[bytes]:
    """Cut concatenated digests of `size` bytes each apart; `HashInputError` if the length is no multiple of it."""
    if len(packed) % size:
        raise HashInputError(f"{len(packed)} bytes of block hashes are no multiple of the digest size, {size} bytes")
    return [packed[start : start + size] for start in range(0, len(packed), size)]


def event_hash(digest: bytes) -> int:
    """The block's hash in KV events: the first 8 bytes of its digest, little-endian, as a signed 64-bit integer."""
    value: int = _EVENT_HASH.unpack_from(digest)[0]
    return value


class BlockHasher(Protocol):
    """Names blocks by a chain: a block's digest covers its tokens and, through its parent's digest, its whole prefix.

    Every digest has `digest_size` bytes. Two processes may exchange digests only if their `fingerprint`s are equal.
    """

    @property
    def digest_size(self) -> int:
        """Bytes of a digest, at least the 8 that `event_hash` reads."""
        ...

    @property
    def fingerprint(self) -> str:
        """Short and printable; differs wherever algorithm, version or page size do."""
        ...

    def root(self, cache_salt: str | None, adapter: str | None = None) -> bytes:
        """Parent digest of a first block. Only requests with the same salt and the same adapter share a root."""
        ...

    def extend(self, parent: bytes, tokens: bytes) -> bytes:
        """Digest of the block of `tokens` (one page of packed ids) after the block or root `parent`."""
        ...

    def chain(self, tokens: bytes, cache_salt: str | None = None, adapter: str | None = None) -> list[bytes]:
        """Digests of all full blocks of a sequence of packed ids, in order; a tail shorter than a page has none."""
        ...


class Blake2bHasher:
    """BLAKE2b with 128-bit digests over parent digest and packed token ids (RFC 7693; `hashlib.blake2b`)."""

    def __init__(self, page_size: int) -> None:
        """`PageSizeError` unless `page_size` is served."""
        self._page_size = check_page_size(page_size)
        self._block_bytes = page_size * TOKEN_BYTES
        # Copying a state takes 0.2 us less than making one (0.5 us with the block of a 16-token page).
        self._empty = blake2b(digest_size=_DIGEST_BYTES, person=_BLOCK)
        # The probe is part of the name, so that a change of the algorithm shows even if _VERSION was forgotten.
        probe = self.chain(pack_tokens(range(2 * page_size)), "salt", "adapter")[-1]
        self._fingerprint = f"blake2b128.v{_VERSION}.page{page_size}.{probe[:4].hex()}"

    @property
    def digest_size(self) -> int:
        """16 bytes."""
        return _DIGEST_BYTES

    @property
    def fingerprint(self) -> str:
        """Algorithm, version, page size and the start of a probe's digest."""
        return self._fingerprint

    def root(self, cache_salt: str | None, adapter: str | None = None) -> bytes:
        """Parent digest of a first block.

        Each part is written with its length, and an absent one differs from an empty one: no two pairs look alike.
        """
        parts = [self._page_size.to_bytes(4, "little")]
        for part in (cache_salt, adapter):
            encoded = b"" if part is None else part.encode()
            parts.append(struct.pack("<?Q", part is not None, len(encoded)) + encoded)
        return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES, person=_ROOT).digest()

    def extend(self, parent: bytes, tokens: bytes) -> bytes:
        """Digest of one block; `HashInputError` unless `tokens` is exactly one page and `parent` one digest."""
        if len(tokens) != self._block_bytes:
            raise HashInputError(
                f"a block of {self._page_size} tokens has {self._block_bytes} bytes, but {len(tokens)} were given: "
                "hash full pages of little-endian int32 ids"
            )
        if len(parent) != _DIGEST_BYTES:
            raise HashInputError(
                f"a parent digest has {_DIGEST_BYTES} bytes, but {len(parent)} were given: start at root()"
            )
        return self._digest(parent, tokens)

    def chain(self, tokens: bytes, cache_salt: str | None = None, adapter: str | None = None) -> list[bytes]:
        """Digests of all full blocks; `HashInputError` if `tokens` is not a whole number of ids."""
        if len(tokens) % TOKEN_BYTES:
            raise HashInputError(
                f"{len(tokens)} bytes of token ids are no multiple of {TOKEN_BYTES}: pack them as int32"
            )
        step = self._block_bytes
        digest = self.root(cache_salt, adapter)
        digests = []
        for end in range(step, len(tokens) + 1, step):
            digest = self._digest(digest, tokens[end - step : end])
            digests.append(digest)
        return digests

    def _digest(self, parent: bytes, tokens: bytes) -> bytes:
        state = self._empty.copy()
        state.update(parent + tokens)
        return state.digest()
