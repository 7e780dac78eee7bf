"""The image's Dockerfile, as far as it can be read without building it. `make image-check` builds and starts it."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from engine.config import CoreConfig
from engine.cuda.prebuild import needs_of
from engine.models.config import load_model_config
from helm.image.dockerfile import DockerfileError, context_files, ignored, parse, problems, read_ignore

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "helm/image"
TEXT = (IMAGE / "Dockerfile").read_text()
PATTERNS = read_ignore(ROOT / ".dockerignore")


def test_nothing_is_wrong_with_the_file() -> None:
    file = parse(TEXT)
    assert problems(file, ROOT, PATTERNS) == []
    assert [stage.name for stage in file.finals()] == ["cpu", "cuda"]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("USER 65532:65532", "USER root", "USER is root, but must be numbers other than 0"),
        ("USER 65532:65532", "USER pagelane", "USER is pagelane, but must be numbers"),
        ("USER 65532:65532", "USER 0:0", "USER is 0:0, but must be numbers"),
        ("USER 65532:65532", "", "USER is root"),
        ("COPY kv kv", "COPY kvv kv", "takes kvv, which is not in the build context"),
        ("COPY kv kv", "COPY tests tests", "takes tests, of which .dockerignore leaves nothing"),
        ("COPY pyproject.toml ./", "COPY pyproject.toml README.md here", "its target here must end in /"),
        ("--from=build-cpu", "--from=built", "takes from built, and no stage before has that name"),
        ("ARG VERSION=0.1.0", "ARG VERSION", "ARG VERSION has no default"),
        ("ARG REVISION=unknown", "", "LABEL uses REVISION, which is not declared in its stage"),
        ("ARG CPU_BASE=", "ARG OTHER_BASE=", "FROM uses CPU_BASE, which no ARG before the first FROM declares"),
        ("FROM ${CPU_BASE} AS cpu", "FROM python:3.12 AS cpu", "the base python:3.12 is fixed"),
        ("=python:3.12-slim-bookworm", "=python", "python has neither a version nor a digest"),
        ("=python:3.12-slim-bookworm", "=python:latest", "python:latest has neither a version nor a digest"),
        ("=python:3.12-slim-bookworm", "=a.example/python:3.12", "names a registry's host"),
        ('ENTRYPOINT ["pagelane"]', "ENTRYPOINT pagelane", "ENTRYPOINT must be a list: a shell would take the signals"),
        ('ENTRYPOINT ["pagelane"]', "", "there is no ENTRYPOINT"),
        ("WORKDIR /tmp", "WORKDIR /tmp\nCOPY kv kv", "COPY into the final stage cpu from the build context"),
        ("COPY helm/image/install.sh", "COPY", "RUN starts helm/image/install.sh, which its stage has not copied"),
        ("gcc libc6-dev \\\n    && rm -rf /var/lib/apt/lists/*", "gcc libc6-dev", "the package lists stay in a layer"),
    ],
)
def test_a_planted_fault_is_found(old: str, new: str, complaint: str) -> None:
    assert old in TEXT
    found = problems(parse(TEXT.replace(old, new)), ROOT, PATTERNS)
    assert any(complaint in line for line in found), found


def test_make_checks_the_image() -> None:
    done = subprocess.run(["make", "-n", "image-check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "-m helm.image.check" in done.stdout


@pytest.mark.parametrize("text", ["ADD a b", "FROM a", "RUN a", "ARG A=1\nFROM a AS b\nRUN a \\"])
def test_what_the_reader_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(DockerfileError, match=r"line \d"):
        parse(text)


def test_a_digest_pins_a_base() -> None:
    pinned = TEXT.replace("=python:3.12-slim-bookworm", f"=python@sha256:{'0' * 64}")
    assert problems(parse(pinned), ROOT, PATTERNS) == []


def test_the_ignore_file_lets_in_what_is_copied_and_nothing_else(tmp_path: Path) -> None:
    for path in (".git/config", ".venv/bin/python", "tests/unit/test_image.py", "kv/__pycache__/pool.cpython-311.pyc"):
        assert ignored(path, PATTERNS), path
    for path in ("kv/pool.py", "engine/cuda/measured.json", ".ci/constraints.txt", "helm/image/install.sh"):
        assert not ignored(path, PATTERNS), path
    names = ["a/x.py", "a/b/x.py", "a/b/x.pyc"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def left(*patterns: str) -> list[str]:
        return [str(path) for path in context_files(tmp_path, "a", patterns)]

    assert left("*") == []
    assert left("*", "!a") == ["a/b/x.py", "a/b/x.pyc", "a/x.py"]
    assert left("**/*.pyc") == ["a/b/x.py", "a/x.py"]
    assert left("a/*.py") == ["a/b/x.py", "a/b/x.pyc"]
    assert left("a/b", "!a/b/x.py") == ["a/b/x.py", "a/x.py"]


def test_every_module_that_is_imported_is_packaged() -> None:
    """The image has what pyproject packages, not the source tree."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    wanted = {name.removesuffix("*") for name in setup["packages"]["find"]["include"]}
    copied = {line.split()[1] for line in TEXT.splitlines() if re.fullmatch(r"COPY (\w+) \1", line)}
    assert wanted | {"configs"} == copied
    data = {path for path in (ROOT / "engine").rglob("*") if path.suffix in (".json", ".txt", ".cu", ".jinja")}
    packaged = {
        ROOT / package.replace(".", "/") / name for package, names in setup["package-data"].items() for name in names
    }
    assert data <= packaged


def test_shapes_are_served_and_need_every_kind_of_module() -> None:
    shapes = sorted(path.parent for path in IMAGE.glob("shapes/*/config.json"))
    needs = {
        needs_of(load_model_config(shape), CoreConfig(model=str(shape), kv_page_size=page), "9.0a")
        for shape in shapes
        for page in (16, 64)
    }
    assert {(need.head_dim, need.group, need.page_size) for need in needs} == {
        (128, group, page) for group in (4, 5) for page in (16, 64)
    }
    assert all(need.sm90 and need.xqa for need in needs)


def test_pins_are_pins_and_do_not_contradict_each_other() -> None:
    common = dict(line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().split())
    for name in ("cpu", "cuda"):
        own = dict(line.split("==") for line in (IMAGE / f"{name}.txt").read_text().split())
        assert "torch" in own
        assert {key: value for key, value in own.items() if common.get(key, value) != value} == {}
    cuda = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda"]
    assert set(cuda) <= set((IMAGE / "cuda.txt").read_text().split())


def test_the_install_script_names_what_it_was_given_wrongly(tmp_path: Path) -> None:
    script = str(IMAGE / "install.sh")
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    for words, cwd, said in (
        (["deps", "gpu", "/p"], ROOT, "VARIANT is gpu, but must be cpu or cuda"),
        (["dep", "cpu", "/p"], ROOT, "STEP is dep, but must be tools, deps"),
        (["deps", "cpu", "/p"], tmp_path, "run it in the source tree's root"),
    ):
        done = subprocess.run([script, *words], cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert said in done.stderr
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", "--exclude=SC2086", script], check=False).returncode == 0
