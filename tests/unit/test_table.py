"""Block tables: the device is told every entry that it needs, once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.table import PageTables, TableUpdate

ROWS = 3


def test_begin_and_growth_are_told_once() -> None:
    tables = PageTables(ROWS)
    tables.begin(1, [7, 8])
    tables.append(1, 9)
    assert tables.drain() == [TableUpdate(1, 0, 7), TableUpdate(1, 1, 8), TableUpdate(1, 2, 9)]
    assert tables.drain() == []
    tables.append(1, 4)
    assert tables.drain() == [TableUpdate(1, 3, 4)]
    assert tables.pages(1) == [7, 8, 9, 4]


def test_a_row_that_left_before_the_drain_is_not_told() -> None:
    tables = PageTables(ROWS)
    tables.begin(0, [1, 2])
    tables.clear(0)
    tables.begin(0, [3])
    assert tables.drain() == [TableUpdate(0, 0, 3)]


def test_a_row_that_is_taken_cannot_begin() -> None:
    tables = PageTables(ROWS)
    tables.begin(2, [1, 2])
    with pytest.raises(ValueError, match="row 2 still holds 2 pages"):
        tables.begin(2, [3])


def test_callers_lists_stay_theirs() -> None:
    tables = PageTables(ROWS)
    pages = [1]
    tables.begin(0, pages)
    pages.append(2)
    tables.pages(0).append(3)
    assert tables.pages(0) == [1]


OPERATIONS = st.tuples(
    st.sampled_from(["begin", "append", "clear", "drain"]), st.integers(0, ROWS - 1), st.integers(0, 3)
)


@given(st.lists(OPERATIONS, max_size=40))
def test_a_device_that_applies_the_differences_agrees(operations: list[tuple[str, int, int]]) -> None:
    tables = PageTables(ROWS)
    device = [[0] * 200 for _ in range(ROWS)]
    news = 0
    page = 0
    for name, row, count in [*operations, ("drain", 0, 0)]:
        page += 10
        if name == "begin":
            tables.clear(row)
            tables.begin(row, range(page, page + count))
            news += count
        elif name == "append":
            tables.append(row, page)
            news += 1
        elif name == "clear":
            tables.clear(row)
        else:
            updates = tables.drain()
            assert len(updates) <= news
            news = 0
            for update in updates:
                device[update.row][update.index] = update.page
            for each in range(ROWS):
                pages = tables.pages(each)
                assert device[each][: len(pages)] == pages
