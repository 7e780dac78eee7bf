"""Models and stacks that the contract tests share. Each stack is started once, by the first test that asks for it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.models import tiny_model
from tests.stack import Client, Stack, client

CONTEXT = 768
"""Context limit of the shared tiny stack, in tokens."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "contract" in item.path.parts:
            item.add_marker(pytest.mark.contract)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def tiny_flags(model: Path, **settings: object) -> list[str]:
    """Worker flags for a tiny model on one thread."""
    values = {"model": model, "threads": 1, "kv_cache_memory": "2MiB", **settings}
    return [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@pytest.fixture(scope="session")
def stack(tiny: Path) -> Iterator[Stack]:
    """One worker with a tiny model."""
    with Stack(*tiny_flags(tiny, context_limit=CONTEXT)) as running:
        yield running


@pytest_asyncio.fixture
async def api(stack: Stack) -> AsyncIterator[Client]:
    """Requests to the shared stack."""
    async with client(stack) as requests:
        yield requests
