"""What the fault tests share."""

from pathlib import Path

import pytest

from tests.models import tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "faults" in item.path.parts:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model: the frontend uses its tokenizer, the simulated cores nothing of it."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")
