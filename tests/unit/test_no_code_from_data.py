"""Data is never run: no pickle, no eval, no code of a model folder, nowhere in the three packages."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for package in ("worker", "engine", "kv") for path in (ROOT / package).rglob("*.py"))

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy", "code"}
"""Modules that turn bytes into objects or code."""
CALLS = {
    "eval": "runs text",
    "exec": "runs text",
    "compile": "makes code of text",
    "__import__": "imports by a name that is data",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "torch.load": "unpickles: read safetensors",
    "torch.hub.load": "runs a repository's code",
    "torch.jit.load": "loads code",
    "numpy.load": "may unpickle",
    "np.load": "may unpickle",
    "yaml.unsafe_load": "makes any object",
    "yaml.full_load": "makes objects",
    "socket.recv_pyobj": "unpickles",
    "socket.send_pyobj": "pickles",
}
METHODS = {"recv_pyobj", "send_pyobj"}
LOADERS = {"SafeLoader", "CSafeLoader", "_PlainLoader"}
"""Loaders that make plain values only; a test holds ours to that."""


def name(node: ast.expr) -> str:
    """A dotted name, "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{name(node.value)}.{node.attr}" if name(node.value) else ""
    return node.id if isinstance(node, ast.Name) else ""


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and reason of everything that could turn data into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, reason) for reason in call_faults(node))
        elif isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            yield node.lineno, "trust_remote_code"


def call_faults(call: ast.Call) -> Iterator[str]:
    """What is wrong with a call."""
    called = name(call.func)
    if called in CALLS:
        yield f"{called} {CALLS[called]}"
    if isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
        yield f"{call.func.attr} pickles"
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    if called == "yaml.load" and name(values.get("Loader", ast.Constant(None))) not in LOADERS:
        yield "yaml.load makes any object: name a SafeLoader"
    for keyword in ("trust_remote_code", "shell", "allow_pickle"):
        value = values.get(keyword)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield f"{keyword} is not False"


def test_there_are_sources():
    assert len(SOURCES) > 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_turns_data_into_code(path):
    found = list(faults(ast.parse(path.read_text())))
    assert not found, f"{path.relative_to(ROOT)}: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "import torch; torch.load('x')",
        "import yaml; yaml.load('x')",
        "import yaml; yaml.load('x', Loader=yaml.Loader)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "import subprocess; subprocess.run('x', shell=flag)",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "sock.recv_pyobj()",
    ],
)
def test_the_walk_turns_red(text):
    assert list(faults(ast.parse(text)))


def test_our_yaml_loader_makes_plain_values_only():
    import yaml

    from worker.flags import _PlainLoader

    assert issubclass(_PlainLoader, yaml.SafeLoader)
    for tag in ("!!python/object/apply:os.getcwd []", "!!python/name:os.system ''", "!!python/module:os ''"):
        with pytest.raises(yaml.YAMLError):
            yaml.load(f"key: {tag}", Loader=_PlainLoader)
