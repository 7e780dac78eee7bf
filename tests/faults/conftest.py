"""What the fault tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models import tiny_model

pytest.register_assert_rewrite("tests.faults.harness")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "faults" in item.path.parts:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model: the frontend uses its tokenizer, the simulated cores nothing of it."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[Callable[[str, float, str], None]]:
    """Report a measured number. They are shown at the end of the run."""
    found: list[tuple[str, float, str]] = []
    yield lambda text, value, unit: found.append((text, value, unit))
    request.node.user_properties += [("figure", f"{text} {value:.3g} {unit}") for text, value, unit in found]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        text
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, text in report.user_properties
        if name == "figure"
    ]
    if lines:
        terminalreporter.write_line("")
        for line in lines:
            terminalreporter.write_line(line)
