"""Manifests beside the files that were reviewed."""

from pathlib import Path

import pytest

from tests.helm.chart import cases
from tests.helm.golden import FOLDER, manifest

pytestmark = pytest.mark.helm

CASES = {name: (path, mode) for name, path, mode in cases()}


@pytest.mark.parametrize("name", CASES)
def test_manifest(name: str) -> None:
    path, mode = CASES[name]
    golden: Path = FOLDER / f"{name}.yaml"
    assert golden.exists(), "run python -m tests.helm.golden, and read what it writes"
    assert manifest(path, mode) == golden.read_text(), "run python -m tests.helm.golden, and read the diff"


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CASES)
