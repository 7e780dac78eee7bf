"""The repository as it is shipped: its make targets, its pins, its configurations, and that it names no machine."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from worker.flags import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def tracked_files() -> list[Path]:
    """Files of the repository; of a tree that is no git checkout, everything but hidden folders and caches."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    else:
        skipped = re.compile(r"/(\.(?!ci|git)|__pycache__|build/|[^/]*\.egg-info)")
        paths = [path for path in ROOT.rglob("*") if not skipped.search("/" + str(path.relative_to(ROOT)))]
    return [path for path in paths if path.is_file()]


def package_name(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.mark.parametrize("target", ["setup", "up", "test", "lint", "bench", "clean"])
def test_make_knows_the_target(target: str) -> None:
    result = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_direct_dependency_is_pinned_except_torch_and_its_triton() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {package_name(line) for line in [*project["dependencies"], *extras["demo"], *extras["dev"]]}
    lines = (ROOT / ".ci/constraints.txt").read_text().split()
    pinned = {package_name(line) for line in lines if re.fullmatch(r"[\w.-]+==[\w.+-]+", line)}
    assert len(pinned) == len(lines), "every line pins one package"
    # A build of torch for GPUs demands the triton that it was made with.
    assert wanted - pinned == {"torch", "triton"}
    assert not [name for name in pinned if name == "torch" or name.startswith(("nvidia-", "triton"))]


def test_no_file_names_a_registry_or_a_path_of_a_machine() -> None:
    registries = (
        r"pypi\.org",
        r"pythonhosted",
        r"download\.pytorch\.org",
        r"files\.pythonhosted",
        r"artifactory",
        r"huggingface\.co",
        r"\bhf\.co",
    )
    paths = ("/work" + "/", "/home" + "/", "/Users" + "/", "/opt" + "/wheels")
    pattern = re.compile("|".join([*registries, *map(re.escape, paths)]))
    found = []
    for path in tracked_files():
        if path == Path(__file__):
            continue
        text = path.read_bytes().decode(errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_demo_configuration_is_the_one_that_make_up_takes() -> None:
    default = re.search(r"^CONFIG \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert default is not None
    assert ROOT / default[1] in CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_loads_and_explains_each_key(path: Path) -> None:
    load_config(["--config", str(path), "--model", "unused"], {})
    lines = path.read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"\w+:", line)]
    assert keys
    bare = [lines[number] for number in keys if "#" not in lines[number] and not lines[number - 1].startswith("#")]
    assert bare == []


def test_the_ci_script_can_be_run() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
