"""Turns what `model:` says into a model directory. No torch: the worker process calls this."""

from pathlib import Path

import msgspec

from engine.models.demo import DEMO_NAMES, demo_model_path
from engine.models.files import ModelError
from engine.models.gguf_import import Progress, cached_import
from engine.models.shapes import INDEX_FILE, SINGLE_FILE


def resolve_model(model: str, load_format: str = "auto", progress: Progress | None = None) -> Path:
    """The directory with config.json, weights and tokenizer that `model` names.

    `model` is such a directory, a .gguf file (imported into the cache, once) or one of `DEMO_NAMES`. With `load_format`
    dummy the weights may be absent. Nothing is ever downloaded: a path that is not there raises `ModelError`.
    """
    if model in DEMO_NAMES and not Path(model).exists():
        return cached_import(demo_model_path(), progress=progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked_directory(path, load_format)
    if not path.exists():
        raise ModelError(
            f"{model}: no such model; give a model directory, a .gguf file or {DEMO_NAMES[0]} (nothing is downloaded)"
        )
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{model}: is neither a model directory nor a .gguf file")
    return cached_import(path, progress=progress)


def _checked_directory(path: Path, load_format: str) -> Path:
    needed: list[tuple[str, ...]] = [("config.json",), ("tokenizer.json",), ("tokenizer_config.json",)]
    if load_format != "dummy":
        needed.append((SINGLE_FILE, INDEX_FILE))
    for names in needed:
        if not any((path / name).is_file() for name in names):
            raise ModelError(
                f"{path}: has no {' or '.join(names)}; a model directory holds config, weights and tokenizer"
            )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _check_json_object(path / name)
    return path


def _check_json_object(path: Path) -> None:
    """Refuse a file that the frontend could not read either; there it would only mean that the model never appears."""
    try:
        msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: is not a JSON object ({error}); take the file from the model's publisher") from None


def has_chat_template(directory: Path) -> bool:
    """True if the model says how a conversation becomes a prompt."""
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    return bytes(_tokenizer_config(directory).get("chat_template", msgspec.Raw(b"null"))) != b"null"


def _tokenizer_config(directory: Path) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode((directory / "tokenizer_config.json").read_bytes(), type=dict[str, msgspec.Raw])
