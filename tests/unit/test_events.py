"""KV events: a frozen stream, merging, and what a replay refuses."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kv.budget import KvCapacity
from kv.events import EventStream, Removed, ReplayError, Stored, replay
from kv.hashing import Blake2bHasher, pack_tokens
from kv.pool import PagePool, SealedBlock

GOLDEN = json.loads((Path(__file__).parent / "golden" / "event_stream.json").read_text())


class Requests:
    """Runs the steps of the golden file against a pool."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.hasher = Blake2bHasher(page_size)
        self.pool = PagePool(KvCapacity(GOLDEN["usable_pages"], page_size))
        self.pages: dict[str, list[int]] = {}

    def compute(self, name: str, salt: str | None, symbols: list[int]) -> None:
        """Compute a prompt without a look at the cache."""
        tokens = [pack_tokens([symbol] * self.page_size) for symbol in symbols]
        digests = self.hasher.chain(b"".join(tokens), salt)
        self.pages[name] = self.pool.allocate(len(symbols)).pages
        blocks = map(SealedBlock, digests, [None, *digests], tokens, [salt] * len(symbols))
        for page, block in zip(self.pages[name], blocks, strict=True):
            self.pool.seal(page, block)

    def finish(self, name: str) -> None:
        self.pool.release(self.pages.pop(name))


def event(written: dict[str, Any], page_size: int) -> Stored | Removed:
    if written["type"] == "r":
        return Removed(written["hashes"])
    tokens = b"".join(pack_tokens([symbol] * page_size) for symbol in written["symbols"])
    return Stored(written["hashes"], written["parent"], tokens, written["cache_salt"])


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["page_size"]))
def test_golden_stream(case: dict[str, Any]) -> None:
    requests = Requests(case["page_size"])
    drained = []
    for name, *arguments in GOLDEN["steps"]:
        if name == "drain":
            drained.append(requests.pool.events.drain())
        else:
            getattr(requests, name)(*arguments)
    assert drained == [[event(written, case["page_size"]) for written in events] for events in case["drained"]]
    everything = [each for events in drained for each in events]
    assert replay(everything) == set(case["live"])
    stream = requests.pool.events
    assert stream.stored_blocks == sum(len(each.hashes) for each in everything if isinstance(each, Stored))
    assert stream.removed_blocks == sum(len(each.hashes) for each in everything if isinstance(each, Removed))


def test_events_keep_their_form_on_the_wire() -> None:
    events: list[Stored | Removed] = [Stored([-1, 2], 7, b"\1\0\0\0", "salt"), Removed([-1])]
    packed = msgspec.msgpack.encode(events)
    assert msgspec.msgpack.decode(packed) == [["s", [-1, 2], 7, b"\1\0\0\0", "salt"], ["r", [-1]]]
    assert msgspec.msgpack.decode(packed, type=list[Stored | Removed]) == events


def test_a_chain_is_one_event_and_another_chain_is_another() -> None:
    stream = EventStream()
    stream.stored(1, None, b"a", None)
    stream.stored(2, 1, b"b", None)
    stream.stored(10, None, b"x", None)
    stream.stored(3, 2, b"c", None)
    assert stream.drain() == [Stored([1, 2], None, b"ab"), Stored([10], None, b"x"), Stored([3], 2, b"c")]


def test_blocks_of_two_tenants_are_not_merged() -> None:
    stream = EventStream()
    stream.stored(1, None, b"a", "one")
    stream.stored(2, 1, b"b", "two")
    assert stream.drain() == [Stored([1], None, b"a", "one"), Stored([2], 1, b"b", "two")]


def test_merging_keeps_the_order_of_stores_and_removals() -> None:
    stream = EventStream()
    stream.removed([8])
    stream.removed([9])
    stream.stored(1, None, b"a", None)
    stream.removed([1])
    stream.stored(1, None, b"a", None)
    expected = [Removed([8, 9]), Stored([1], None, b"a"), Removed([1]), Stored([1], None, b"a")]
    assert stream.drain() == expected
    assert stream.drain() == []


def test_a_drained_event_does_not_change_when_its_chain_goes_on() -> None:
    stream = EventStream()
    stream.stored(1, None, b"a", None)
    first = stream.drain()
    stream.stored(2, 1, b"b", None)
    assert first == [Stored([1], None, b"a")]
    assert stream.drain() == [Stored([2], 1, b"b")]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Removed([1])], "block 1 is removed, but it is not live"),
        ([Stored([1], None, b""), Removed([1]), Removed([1])], "block 1 is removed, but it is not live"),
        ([Stored([1], None, b""), Stored([1], None, b"")], "block 1 is stored, but it is live already"),
        ([Stored([2], 1, b"")], "block 2 is stored, but its parent 1 is not live"),
        ([Stored([1, 2, 3], None, b""), Removed([3, 1])], "block 1 is removed before 1 live blocks"),
    ],
)
def test_replay_refuses_a_contradiction(events: list[Stored | Removed], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        replay(events)


def test_replay_of_a_tree_that_is_taken_down_from_its_leaves() -> None:
    grown: list[Stored | Removed] = [Stored([1, 2], None, b""), Stored([3], 1, b""), Removed([2])]
    assert replay(grown) == {1, 3}
    assert replay([*grown, Removed([3, 1])]) == set()
