"""docs/configuration.md says what the code takes."""

import re
from pathlib import Path

from worker.config import ENVIRONMENT, WorkerConfig
from worker.configuration_table import render, renewed

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text()
    assert page == renewed(page), "run: python -m worker.configuration_table docs/configuration.md"


def test_every_key_has_one_row_with_its_meaning_and_every_variable_is_named() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.{20,}) \|$", render(), re.MULTILINE)
    assert sorted(key for key, *_ in rows) == sorted(WorkerConfig.__struct_fields__)
    assert set(re.findall(r"Also by `(\w+)`", render())) == set(ENVIRONMENT.values())


def test_a_table_that_has_changed_is_noticed() -> None:
    page = PAGE.read_text()
    assert renewed(page.replace("| required |", "| `null` |", 1)) == page
    assert page.replace("| required |", "| `null` |", 1) != page
