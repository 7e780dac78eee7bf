"""Block tables: which pages each row's sequence lies on, and what the device has not been told yet."""

from collections.abc import Sequence
from typing import NamedTuple


class TableUpdate(NamedTuple):
    """The block table of `row` holds `page` at `index` from this step on (`index` counts pages of the sequence)."""

    row: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an update
    page: int


class PageTables:
    """The host's copy of the block tables of `rows` row slots.

    The device's table is only ever written through `drain`: entries past a row's pages are stale there, never read.
    """

    def __init__(self, rows: int) -> None:
        self._pages: list[list[int]] = [[] for _ in range(rows)]
        # First index of each row that has not been drained; rows without news are absent.
        self._news: dict[int, int] = {}

    def begin(self, row: int, pages: Sequence[int]) -> None:
        """A sequence that lies on `pages` takes the row slot; `ValueError` if another one still has it."""
        if self._pages[row]:
            raise ValueError(f"row {row} still holds {len(self._pages[row])} pages of another sequence: clear it first")
        self._pages[row] = list(pages)
        if pages:
            self._news[row] = 0

    def append(self, row: int, page: int) -> None:
        """The row's sequence goes on to `page`."""
        pages = self._pages[row]
        self._news.setdefault(row, len(pages))
        pages.append(page)

    def clear(self, row: int) -> None:
        """The row's sequence has left; what was not drained is dropped."""
        self._pages[row] = []
        self._news.pop(row, None)

    def pages(self, row: int) -> list[int]:
        """Pages of the row's sequence, in order (a copy)."""
        return list(self._pages[row])

    def drain(self) -> list[TableUpdate]:
        """Entries that are new since the last drain, row by row and in order of the sequence."""
        updates: list[TableUpdate] = []
        append = updates.append
        for row, first in self._news.items():
            pages = self._pages[row]
            for index in range(first, len(pages)):
                append(TableUpdate(row, index, pages[index]))
        self._news.clear()
        return updates
