"""Any worker configuration, as YAML, flags or variables: settings, or one line that says what is wrong with which."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.messages import LONG
from worker.config import ENVIRONMENT, GRACE_PERIOD, SHUTDOWN_DEADLINE, ConfigError, WorkerConfig
from worker.flags import FIELDS, HelpRequested, load_config

FUZZ = settings(
    max_examples=5000 if LONG else 300,
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
SECONDS = 5.0
"""Longest that any file may take, on a busy machine."""

NUMBERS = st.sampled_from(
    (0, 1, -1, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, 0.0, 0.5, -0.5, 1e300, 1e-300, float("nan"), float("inf"))
)
ODD_WORDS = (
    *("", "null", "~", "nan", ".inf", "-.inf", "1e400", "0x10", "1_000", "true", "yes", "16", "64", "512MiB", "-1GiB"),
    *(
        "9" * 400,
        "1" + "0" * 5000 + "GiB",
        "🙂",
        "a\nb",
        "a\tb",
        "../..",
        "/dev/null",
        "auto",
        "cpu",
        "kv",
        "chat,,chat",
    ),
)
WORDS = st.text(max_size=8) | st.sampled_from(ODD_WORDS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(sorted(FIELDS)) | WORDS
SAFE_TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=40)


def outcome(argv: list[str], environ: Mapping[str, str] | None = None) -> str:
    """Load a configuration; "" if it is one, else the one line that says why not."""
    began = time.monotonic()
    try:
        config = load_config(argv, environ or {})
    except HelpRequested:
        return ""
    except ConfigError as error:
        text = str(error)
        assert "\n" not in text, text
        assert 0 < len(text) < 1000, len(text)
        assert text.isprintable(), repr(text)
        return text
    finally:
        assert time.monotonic() - began < SECONDS
    assert isinstance(config, WorkerConfig)
    msgspec.msgpack.encode(config)
    return ""


def printed(key: object) -> str:
    """The beginning of a key as a message shows it."""
    return repr(key)[1:-1][:20] if isinstance(key, str) else repr(key)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "worker.yaml"


@FUZZ
@given(document=st.dictionaries(KEYS, VALUES, max_size=5), model=st.booleans())
def test_any_mapping_is_loaded_or_refused_by_the_name_of_a_key(file, document, model):
    document |= {"model": "m"} if model else {}
    file.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8", errors="replace")
    text = outcome(["--config", str(file)])
    read = yaml.safe_load(file.read_text(encoding="utf-8"))  # YAML folds some white space in keys
    assert not text or any(printed(key) in text for key in ("model", "namespace", *(read or ()))), text


@FUZZ
@given(
    content=st.binary(max_size=80) | SAFE_TEXT.map(str.encode) | st.binary(max_size=30).map(lambda b: b"model: " + b)
)
def test_any_bytes_as_a_file_are_loaded_or_refused(file, content):
    file.write_bytes(content)
    outcome(["--config", str(file)])


@FUZZ
@given(flags=st.lists(st.tuples(KEYS, WORDS | NUMBERS.map(str)), max_size=4), model=st.booleans())
def test_any_flags_are_loaded_or_refused(flags, model):
    argv = ["--model=m"] if model else []
    text = outcome(argv + [f"--{key.replace('_', '-')}={value}" for key, value in flags])
    outcome([*argv, *(word for key, value in flags for word in (f"--{key}", value))])
    dashes = text.replace("-", "_")
    keys = [printed(key).replace("-", "_") for key in ("model", "config", *(key.partition("=")[0] for key, _ in flags))]
    assert not text or any(key in dashes for key in keys), text


@FUZZ
@given(
    variables=st.dictionaries(
        st.sampled_from((*ENVIRONMENT.values(), "DYN_NAMESPACE_WORKER_SUFFIX", SHUTDOWN_DEADLINE[0], GRACE_PERIOD[0])),
        WORDS | NUMBERS.map(str),
        max_size=4,
    )
)
def test_any_variables_are_loaded_or_refused_by_name(variables):
    text = outcome(["--model", "m"], variables)
    keys = [key for key, name in ENVIRONMENT.items() if name in variables]
    assert not text or any(name in text for name in (*variables, *keys, "namespace")), text


def bomb(levels: int = 12, width: int = 9) -> str:
    """Aliases of aliases: some hundred bytes that stand for width ** levels values."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


NESTED = 5000
FILES: Mapping[str, Any] = {
    "an alias bomb": bomb(),
    "an alias bomb under a key": "model: m\nmax_bucket:\n" + "\n".join(f"  {line}" for line in bomb().splitlines()),
    "an alias bomb as a key": f"? {{{', '.join(bomb().splitlines())}}}\n: 1",
    "a key that is its own value": "model: &m [*m]\n",
    "a mapping that holds itself": "&m\nmodel: *m\n",
    "merge keys": "base: &b {model: m}\n<<: *b\n",
    "a merge of a bomb": "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n<<: [*b, *b, *b]\nmodel: m\n",
    "10 MB of one value": "model: " + "x" * 10_000_000,
    "10 MB of keys": "".join(f"key{i}: {i}\n" for i in range(700_000)),
    "10 MB of a number": "max_bucket: " + "9" * 10_000_000,
    "10 MB of a comment": "#" * 10_000_000,
    "deep lists": "model: " + "[" * NESTED,
    "deep lists, closed": "model: " + "[" * NESTED + "]" * NESTED,
    "deep mappings": "{a: " * NESTED,
    "deep indents": "\n".join(" " * i + "a:" for i in range(2000)),
    "no UTF-8": b"model: \xff\xfe\xfa",
    "UTF-16": "model: m\n".encode("utf-16"),
    "a byte-order mark": "\ufeffmodel: m\n".encode(),
    "tabs": "model:\tm\n\tmax_bucket: 4\n",
    "zeros": b"\x00" * 100,
    "a number of 5000 digits": "max_bucket: " + "9" * 5000,
    "a float of 5000 digits": "max_queue_s: 0." + "9" * 5000,
    "sexagesimal": "max_bucket: 1:30\nmodel: m",
    "a date": "model: 2024-01-01\n",
    "a date that is none": "model: 2024-13-45\n",
    "a set": "model: !!set {a, b}\n",
    "bad base64": "model: !!binary '%%%'\n",
    "a float that is none": "max_queue_s: !!float abc\n",
    "an integer that is none": "max_bucket: !!int abc\n",
    "a timestamp that is none": "model: !!timestamp abc\n",
    "an object": "model: !!python/object/apply:os.system ['exit 1']\n",
    "an unknown tag": "model: !secret x\n",
    "an undefined alias": "model: *nothing\n",
    "two documents": "model: m\n---\nmodel: n\n",
    "a list as key": "? [a, b]\n: 1\n",
    "a mapping as key": "? {a: b}\n: 1\n",
    "null as key": "~: 1\n",
    "numbers as keys": "1: 2\n1.0: 3\n",
    "NaN as key": ".nan: 1\n.nan: 2\n",
    "a lone surrogate": 'model: "\\ud800"\n',
    "a terminal's escape": 'model: "\\e[2J"\nmax_bucket: "\\e[2J"\n',
    "a directive": "%YAML 9.9\n---\nmodel: m\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_made_to_harm_costs_little_and_is_refused_in_one_line(file, name):
    content = FILES[name]
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    outcome(["--config", str(file)])


@pytest.mark.parametrize(
    "path", ["missing.yaml", ".", "/dev/null", "/proc/self/mem", "a\x00b", "x" * 5000, "fifo", "🙂"]
)
def test_a_path_that_is_no_file_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    assert outcome(["--config", path])


def test_a_bad_configuration_ends_the_worker_with_code_2_one_line_and_no_traceback(tmp_path):
    (tmp_path / "bad.yaml").write_text(bomb())
    for argv in (["--config", str(tmp_path / "bad.yaml")], ["--max-bucket", "\udcff"], ["--model", "m", "--model"]):
        run = subprocess.run(
            [sys.executable, "-m", "worker", *argv], capture_output=True, text=True, timeout=60, check=False
        )
        assert run.returncode == 2, run.stderr
        assert run.stderr.startswith("pagelane: error: ")
        assert run.stderr.count("\n") == 1
