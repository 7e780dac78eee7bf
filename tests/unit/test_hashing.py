"""Block hashes: frozen vectors, and what makes two prefixes the same."""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from kv.geometry import PAGE_SIZES, PageSizeError
from kv.hashing import (
    Blake2bHasher,
    BlockHasher,
    HashInputError,
    event_hash,
    pack_tokens,
    split_digests,
    unpack_tokens,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "hash_chain.json").read_text())


@pytest.fixture(params=PAGE_SIZES)
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def hasher(page_size: int) -> BlockHasher:
    return Blake2bHasher(page_size)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['page_size']}-{case['name']}")
def test_golden_chain(case: dict[str, Any]) -> None:
    hasher = Blake2bHasher(case["page_size"])
    digests = hasher.chain(pack_tokens(GOLDEN["tokens"]), case["cache_salt"], case["adapter"])
    assert hasher.root(case["cache_salt"], case["adapter"]).hex() == case["root"]
    assert [digest.hex() for digest in digests] == case["digests"]
    assert [event_hash(digest) for digest in digests] == case["event_hashes"]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_golden_fingerprint(page_size: int) -> None:
    assert Blake2bHasher(page_size).fingerprint == GOLDEN["fingerprints"][str(page_size)]


def test_a_digest_is_blake2b_of_parent_and_tokens(hasher: BlockHasher, page_size: int) -> None:
    parent, tokens = bytes(range(16)), pack_tokens(range(page_size))
    expected = blake2b(parent + tokens, digest_size=16, person=b"pagelane block").digest()
    assert hasher.extend(parent, tokens) == expected


def test_chain_is_extend_from_the_root_and_ignores_the_tail(hasher: BlockHasher, page_size: int) -> None:
    tokens = pack_tokens(range(2 * page_size + page_size - 1))
    first = hasher.extend(hasher.root("salt"), tokens[: page_size * 4])
    second = hasher.extend(first, tokens[page_size * 4 : page_size * 8])
    assert hasher.chain(tokens, "salt") == [first, second]
    assert hasher.chain(tokens[: page_size * 4 - 4]) == []


def test_equal_blocks_differ_after_different_prefixes(hasher: BlockHasher, page_size: int) -> None:
    one = hasher.chain(pack_tokens([1] * page_size + [3] * page_size))
    two = hasher.chain(pack_tokens([2] * page_size + [3] * page_size))
    assert not set(one) & set(two)


def test_salt_and_adapter_cannot_be_shifted_into_each_other(hasher: BlockHasher) -> None:
    pairs = [
        (None, None), ("", None), (None, ""), ("", ""), ("ab", None), (None, "ab"), ("ab", ""), ("", "ab"), ("a", "b"),
        ("a", "ab"), ("aa", "b"), ("a\0", "b"), ("a", "\0b"), ("\0", None),
    ]  # fmt: skip
    assert len({hasher.root(*pair) for pair in pairs}) == len(pairs)


def test_page_sizes_have_their_own_roots_and_fingerprints() -> None:
    hashers = [Blake2bHasher(page_size) for page_size in PAGE_SIZES]
    assert len({hasher.root(None) for hasher in hashers}) == len(PAGE_SIZES)
    assert len({hasher.fingerprint for hasher in hashers}) == len(PAGE_SIZES)
    assert all(hasher.fingerprint.isprintable() and len(hasher.fingerprint) < 64 for hasher in hashers)


def test_lengths_are_checked(hasher: BlockHasher, page_size: int) -> None:
    root = hasher.root(None)
    with pytest.raises(
        HashInputError, match=rf"of {page_size} tokens has {page_size * 4} bytes, but {page_size * 4 - 4}"
    ):
        hasher.extend(root, bytes(page_size * 4 - 4))
    with pytest.raises(HashInputError, match="parent digest has 16 bytes, but 8"):
        hasher.extend(root[:8], bytes(page_size * 4))
    with pytest.raises(HashInputError, match="7 bytes of token ids"):
        hasher.chain(bytes(7))
    with pytest.raises(PageSizeError, match="16 or 64"):
        Blake2bHasher(32)


def test_split_digests(hasher: BlockHasher, page_size: int) -> None:
    digests = hasher.chain(pack_tokens(range(3 * page_size)))
    assert split_digests(b"".join(digests), hasher.digest_size) == digests
    assert split_digests(b"", 16) == []
    with pytest.raises(HashInputError, match=r"17 bytes .* 16 bytes"):
        split_digests(bytes(17), 16)


def test_event_hash_is_signed_and_ignores_the_rest() -> None:
    assert event_hash(b"\x01" + bytes(15)) == 1
    assert event_hash(b"\xff" * 8 + bytes(8)) == -1
    assert event_hash(bytes(7) + b"\x80" + b"\x55" * 8) == -(2**63)


def test_tokens_are_little_endian_int32() -> None:
    assert pack_tokens([1, 258, -1]) == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff"
    assert unpack_tokens(pack_tokens([0, 151_935, 2**31 - 1])) == [0, 151_935, 2**31 - 1]
