"""Looks through a model directory for what the worker, the core or Dynamo's frontend would trip over later. No torch.

The frontend reads tokenizer and chat template when it lists the model; what it cannot read only shows as a model that
never appears. So the files are looked at here, before anything is loaded.
"""

from pathlib import Path
from typing import Any

import msgspec

from engine.models.config import ModelConfig, load_model_config
from engine.models.files import MIB, ModelError, check_inside, read_file, read_json
from engine.models.shapes import INDEX_FILE, SINGLE_FILE

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
TEMPLATE_LIMIT = MIB
"""Most bytes of a chat template."""
_PUBLISHER = "take the file from the model's publisher"


class _Bpe(msgspec.Struct):
    """The part of tokenizer.json that every tokenizer has."""

    vocab: dict[str, int] | list[Any]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _Bpe
    added_tokens: list[_AddedToken] | None = None


class _Ends(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def check_directory(directory: Path, load_format: str = "auto") -> None:
    """Raise `ModelError` for a missing or broken file; weights are looked at by the core, which reads them.

    With `load_format` dummy the weights may be absent.
    """
    needed: list[tuple[str, ...]] = [("config.json",), ("tokenizer.json",), ("tokenizer_config.json",)]
    if load_format != "dummy":
        needed.append((SINGLE_FILE, INDEX_FILE))
    for names in needed:
        if not any((directory / name).is_file() for name in names):
            raise ModelError(
                f"{directory}: has no {' or '.join(names)}; a model directory holds config, weights and tokenizer"
            )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _check_json_object(directory / name)
    config = load_model_config(directory)
    _check_tokenizer(directory / "tokenizer.json")
    _check_ends(directory, config)
    for name in (*TEMPLATE_FILES, "special_tokens_map.json", "added_tokens.json"):
        if (directory / name).exists() or (directory / name).is_symlink():
            read_file(directory / name)
    _check_template(directory)
    if (directory / SINGLE_FILE).exists():
        check_inside(directory / SINGLE_FILE)


def has_chat_template(directory: Path) -> bool:
    """True if the model says how a conversation becomes a prompt."""
    if any((directory / name).is_file() for name in TEMPLATE_FILES):
        return True
    return bytes(_tokenizer_config(directory).get("chat_template", msgspec.Raw(b"null"))) != b"null"


def _tokenizer_config(directory: Path) -> dict[str, msgspec.Raw]:
    return read_json(directory / "tokenizer_config.json", dict[str, msgspec.Raw])


def _check_json_object(path: Path) -> None:
    try:
        msgspec.json.decode(read_file(path), type=dict[str, msgspec.Raw])
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: is not a JSON object ({error}); {_PUBLISHER}") from None


def _check_tokenizer(path: Path) -> None:
    tokenizer = read_json(path, _Tokenizer)
    if not tokenizer.model.vocab:
        raise ModelError(f"{path}: model.vocab is empty; {_PUBLISHER}")


def _check_ends(directory: Path, config: ModelConfig) -> None:
    """Refuse end tokens that are no tokens: the model would never stop, or the frontend not list it."""
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if not path.exists() and not path.is_symlink():
            continue
        ends = read_json(path, _Ends).eos_token_id
        for token in ends if isinstance(ends, list) else [] if ends is None else [ends]:
            if not 0 <= token < config.vocab_size:
                raise ModelError(
                    f"{path}: eos_token_id has {token}, but the vocabulary has {config.vocab_size} tokens; {_PUBLISHER}"
                )


def _check_template(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    raw = _tokenizer_config(directory).get("chat_template")
    if raw is None:
        return
    if len(bytes(raw)) > TEMPLATE_LIMIT:
        raise ModelError(f"{path}: chat_template has {len(bytes(raw))} bytes, but at most {TEMPLATE_LIMIT} are taken")
    try:
        msgspec.json.decode(raw, type=str | list[_NamedTemplate] | None)
    except (ValueError, msgspec.DecodeError) as error:
        raise ModelError(f"{path}: chat_template: {error}; {_PUBLISHER}") from None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str
