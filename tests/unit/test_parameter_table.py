"""docs/parameters.md says what the code does."""

import re
from pathlib import Path

import pytest

from engine.step import OPTIONAL_PARAMETERS
from worker.parameter_table import OPENAI, render, renewed
from worker.parameters import GROUPS

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"


def test_the_page_has_the_table_of_the_code():
    page = PAGE.read_text()
    assert page == renewed(page), "run: python -m worker.parameter_table docs/parameters.md"


def test_every_known_parameter_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \|", render(), re.MULTILINE)
    for group in GROUPS:
        assert group.known <= set(rows)


def test_every_optional_parameter_is_one_that_is_honoured():
    honoured = {name for group in GROUPS for name in group.honoured}
    assert honoured >= OPTIONAL_PARAMETERS


@pytest.mark.parametrize("row", OPENAI.values())
def test_a_row_says_who_and_how(row):
    assert all(row)


def test_a_table_that_has_changed_is_noticed():
    page = PAGE.read_text()
    assert renewed(page.replace("| honoured |", "| refused |", 1)) == page
