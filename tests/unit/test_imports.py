"""Who may import whom: worker -> engine -> kv, never upwards; no torch in kv, scheduler and the worker's process."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {"kv": {"kv"}, "engine": {"engine", "kv"}, "worker": {"worker", "engine", "kv"}}
TENSOR_LIBRARIES = {"torch", "transformers", "flashinfer", "triton"}
SOURCES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def imported_modules(source: str, package: str = "") -> Iterator[str]:
    """Absolute names of all modules that `source`, in `package`, imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


def top_level(path: Path) -> set[str]:
    """First parts of the module names that a source file imports."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return {name.split(".")[0] for name in imported_modules(path.read_text(), package)}


def modules_of(pattern: str) -> list[str]:
    """Names of the modules that a path pattern under the root finds."""
    paths = sorted(ROOT.glob(pattern))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def test_the_walker_sees_every_form_of_import() -> None:
    source = "import a.b, c\ndef f():\n from d.e import g\n from . import h\n from ..i import j\n from .k import l"
    assert list(imported_modules(source, "worker.sub")) == ["a.b", "c", "d.e", "worker.sub", "worker.i", "worker.sub.k"]


def test_the_walker_finds_the_sources() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_import_downwards_only(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert top_level(path) & {*MAY_IMPORT, "tests"} <= MAY_IMPORT[package]


PURE = ["kv/*.py", "engine/schedul*.py"]


@pytest.mark.parametrize("pattern", PURE)
def test_bookkeeping_names_no_tensor_library(pattern: str) -> None:
    paths = list(ROOT.glob(pattern))
    assert paths
    assert {path.name for path in paths if top_level(path) & TENSOR_LIBRARIES} == set()


@pytest.mark.parametrize("pattern", [*PURE, "worker/*.py"])
def test_nothing_that_is_imported_loads_a_tensor_library(pattern: str) -> None:
    modules = [module for module in modules_of(pattern) if not module.endswith("__main__")]
    assert modules
    program = f"import sys, {', '.join(modules)}; print(*sorted({TENSOR_LIBRARIES!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
