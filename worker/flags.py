"""From command line, YAML file and environment to a `WorkerConfig`: flags win over the file, the file over the rest."""

import difflib
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from kv.geometry import PAGE_SIZES
from worker.config import ENVIRONMENT, ConfigError, WorkerConfig, check, shown

FIELDS = {field.name: field for field in msgspec.structs.fields(WorkerConfig)}
MAX_CONFIG_BYTES = 1 << 16
"""Largest config file; PyYAML reads about 100 KB a second."""
_LONGEST_NAME = 60
Own = dict[str, str]
"""A command's own flags and their values."""
_NULL_WORDS = ("null", "none", "")


class HelpRequested(Exception):
    """`--help` stands on the command line; the text is the help."""


def load_config(argv: Iterable[str], environ: Mapping[str, str]) -> WorkerConfig:
    """Read the worker's configuration.

    Raises `ConfigError` with one line that names key, value and what is allowed, and `HelpRequested` for `--help`.
    """
    flags, path = _parse_flags(list(argv))
    values = _from_environment(environ)
    values |= _from_yaml(path) if path is not None else {}
    values |= flags
    if "model" not in values:
        raise ConfigError("model is not set: give --model DIR, or model: in the file named by --config")
    suffix = environ.get("DYN_NAMESPACE_WORKER_SUFFIX")
    if suffix:
        values["namespace"] = f"{values.get('namespace', FIELDS['namespace'].default)}-{suffix}"
    config = WorkerConfig(**values)
    check(config, environ)
    return config


def split_flags(argv: Iterable[str], valued: Iterable[str], switches: Iterable[str] = ()) -> tuple[Own, list[str]]:
    """A command's own flags, and the rest of its command line, which is for `load_config`.

    `valued` take a value, `--flag VALUE` or `--flag=VALUE`; `switches` take none and have the value "". Raises
    `ConfigError` for a value that is missing.
    """
    own: Own = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, text = word.partition("=")
        if word in switches:
            own[word] = ""
        elif flag in valued:
            own[flag] = text if equals else next(words, "")
            if not own[flag]:
                raise ConfigError(f"{flag} needs a value")
        else:
            rest.append(word)
    return own, rest


def _parse_flags(argv: list[str]) -> tuple[dict[str, Any], Path | None]:
    values: dict[str, Any] = {}
    path: Path | None = None
    words = iter(argv)
    for word in words:
        if word in ("-h", "--help"):
            raise HelpRequested(help_text())
        flag, equals, text = word.partition("=")
        key = _key_of(flag)
        if not equals:
            try:
                text = next(words)
            except StopIteration:
                raise ConfigError(f"{flag} needs a value") from None
        if key == "config":
            path = Path(text)
        else:
            values[key] = _from_text(key, text, flag)
    return values, path


def _key_of(flag: str) -> str:
    if not flag.startswith("--"):
        raise ConfigError(f"unexpected argument {flag!r}: every setting is given as --key value")
    key = flag[2:].replace("-", "_")
    if key != "config" and key not in FIELDS:
        raise ConfigError(f"unknown flag {shown(flag)[1:-1]}{_nearest(key, [*FIELDS, 'config'], '--')}")
    return key


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    return {key: _from_text(key, environ[name], name) for key, name in ENVIRONMENT.items() if environ.get(name)}


def _from_yaml(path: Path) -> dict[str, Any]:
    text = _read(path)
    try:
        document = yaml.load(text, Loader=_PlainLoader)  # noqa: S506 - a SafeLoader
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply: it must hold keys and values") from None
    except Exception as error:  # what a scalar that is none of its type makes PyYAML raise, is not for us to list
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold keys and values, but holds a {type(document).__name__}")
    for key in document:
        if key not in FIELDS:
            raise ConfigError(f"{path}: unknown key {shown(key)}{_nearest(str(key), FIELDS, '')}")
    return {key: _convert(key, value, f"{path}: {key}") for key, value in document.items()}


def _read(path: Path) -> str:
    """Text of the config file. What is no file is not opened: a pipe might never end."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"cannot read the config file {path}: it is not a file")
        if status.st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"the config file {path} has {status.st_size} bytes, but at most {MAX_CONFIG_BYTES} are read"
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file {path} is not UTF-8: {error}") from None
    except ValueError as error:
        raise ConfigError(f"the config file's path {shown(str(path))} cannot be used: {error}") from None


class _PlainLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML would silently take the last, and aliases, by which a
    few hundred bytes can stand for more values than there is memory.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not taken", None)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool | None) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key if isinstance(key, str | int | float | bool | None) else id(key_node))
        return super().construct_mapping(node, deep)


def _from_text(key: str, text: str, source: str) -> Any:
    """Value of a flag or variable. Numbers are read as such; `null` is None where the key may be null."""
    if text.lower() in _NULL_WORDS and _nullable(key):
        return None
    return _convert(key, text, source, strict=False)


def _convert(key: str, value: Any, source: str, strict: bool = True) -> Any:
    try:
        if isinstance(value, str):
            value.encode()
        return msgspec.convert(value, FIELDS[key].type, strict=strict)
    except ValueError:  # also of what is no Unicode
        raise ConfigError(f"{source} is {shown(value)}, but must be {allowed(key)}") from None


def _nullable(key: str) -> bool:
    kind = _bare(inspect.type_info(FIELDS[key].type))
    return isinstance(kind, inspect.UnionType) and any(isinstance(part, inspect.NoneType) for part in kind.types)


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def allowed(key: str) -> str:
    """What a key may hold, in words."""
    if key == "kv_page_size":
        return " or ".join(str(size) for size in PAGE_SIZES)
    return _describe(_bare(inspect.type_info(FIELDS[key].type)))


def _describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(_describe(_bare(part)) for part in types)
        case inspect.LiteralType(values=values):
            return " or ".join(str(value) for value in values)
        case inspect.NoneType():
            return "null"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            bounds = ((" of at least", kind.ge), (" above", kind.gt), (" and at most", kind.le), (" below", kind.lt))
            return noun + "".join(f"{word} {bound:.10g}" for word, bound in bounds if bound is not None)
        case inspect.StrType(pattern=str()):
            return "made of letters, digits, _ and -"
        case inspect.StrType(min_length=length):
            return "a text that is not empty" if length else "a text"
        case _:
            raise AssertionError(f"no words for {kind}")


def _nearest(name: str, known: Iterable[str], prefix: str) -> str:
    close = difflib.get_close_matches(name[:_LONGEST_NAME], list(known), n=1, cutoff=0.0)
    near = close[0] if not prefix else prefix + close[0].replace("_", "-")
    return f": the nearest known one is {near}"


def help_text() -> str:
    """Every flag with its meaning, what it may be and its default."""
    lines = [
        "usage: python -m worker --model DIR [--config FILE] [--KEY VALUE ...]",
        "",
        "Serve a model as a Dynamo worker. Every key can stand in the YAML file too (with _ for -); flags win.",
        "",
        "  --config FILE",
        "      YAML file with any of the keys below.",
    ]
    for key, field in FIELDS.items():
        default = (
            "required"
            if field.default is msgspec.NODEFAULT
            else f"default {msgspec.json.encode(field.default).decode()}"
        )
        variable = f", or {ENVIRONMENT[key]}" if key in ENVIRONMENT else ""
        lines += [f"  --{key.replace('_', '-')} ({allowed(key)}; {default}{variable})", f"      {description(key)}"]
    return "\n".join(lines)


def description(key: str) -> str:
    """The documentation of a key."""
    kind = inspect.type_info(FIELDS[key].type)
    return str((kind.extra_json_schema or {})["description"]) if isinstance(kind, inspect.Metadata) else ""
