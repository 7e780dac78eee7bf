"""KV events: what the prefix index gained and lost, in order, as Dynamo's router wants to hear it.

The blocks that the stream says are live are closed under prefixes at any moment: a block is stored only after its
parent and removed only before it. That is not a courtesy: a router drops a stored event whose parent it does not know,
and a block whose parent is gone can never be matched. The pool upholds it (see kv/pool.py) and `replay` checks it.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Consecutive blocks of one sequence that can now be shared, as signed 64-bit hashes."""

    hashes: list[int]
    parent: int | None
    """The block before the first one; None if a sequence begins here."""
    tokens: bytes
    """Token ids of the blocks, little-endian int32."""
    cache_salt: str | None = None


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Blocks that the pool no longer holds."""

    hashes: list[int]


class EventStream:
    """Collects events between two drains: a run of blocks of one chain becomes one `Stored`, removals one `Removed`."""

    def __init__(self) -> None:
        self.stored_blocks = 0
        """Blocks stored so far, drained or not."""
        self.removed_blocks = 0
        """Blocks removed so far, drained or not."""
        self._closed: list[Stored | Removed] = []
        # At most one of the two runs is open; the closed events are older.
        self._removed: list[int] = []
        self._stored: list[int] = []
        self._tokens: list[bytes] = []
        self._parent: int | None = None
        self._salt: str | None = None

    def stored(self, block: int, parent: int | None, tokens: bytes, cache_salt: str | None) -> None:
        """One block can be shared now; `parent` is None for the first of a sequence."""
        self.stored_blocks += 1
        run = self._stored
        if not run or parent is None or parent != run[-1] or cache_salt != self._salt:
            self._close()
            run = self._stored
            self._parent = parent
            self._salt = cache_salt
        run.append(block)
        self._tokens.append(tokens)

    def removed(self, blocks: list[int]) -> None:
        """Blocks are gone, in this order."""
        self.removed_blocks += len(blocks)
        if self._stored:
            self._close()
        self._removed += blocks

    def drain(self) -> list[Stored | Removed]:
        """All events since the last drain, in order."""
        self._close()
        events, self._closed = self._closed, []
        return events

    def _close(self) -> None:
        if self._stored:
            self._closed.append(Stored(self._stored, self._parent, b"".join(self._tokens), self._salt))
            self._stored = []
            self._tokens = []
        elif self._removed:
            self._closed.append(Removed(self._removed))
            self._removed = []


class ReplayError(ValueError):
    """An event contradicts the events before it."""


class _Replay:
    """The index as a router would rebuild it."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.children: Counter[int] = Counter()

    def store(self, block: int, parent: int | None) -> None:
        if block in self.parents:
            raise ReplayError(f"block {block} is stored, but it is live already")
        if parent is not None and parent not in self.parents:
            raise ReplayError(f"block {block} is stored, but its parent {parent} is not live")
        self.parents[block] = parent
        if parent is not None:
            self.children[parent] += 1

    def remove(self, block: int) -> None:
        if block not in self.parents:
            raise ReplayError(f"block {block} is removed, but it is not live")
        if self.children[block]:
            raise ReplayError(f"block {block} is removed before {self.children[block]} live blocks that follow it")
        parent = self.parents.pop(block)
        if parent is not None:
            self.children[parent] -= 1


def replay(events: Iterable[Stored | Removed]) -> set[int]:
    """Hashes of the blocks that are live after `events`, which begin with an empty index.

    Raises `ReplayError` if a block is stored twice, removed while not live, stored while its parent is not live, or
    removed while a block that follows it is live.
    """
    state = _Replay()
    for event in events:
        if isinstance(event, Removed):
            for block in event.hashes:
                state.remove(block)
            continue
        parent = event.parent
        for block in event.hashes:
            state.store(block, parent)
            parent = block
    return set(state.parents)
