"""Looks through a model directory for what worker and core would trip over later. No torch."""

from pathlib import Path

import msgspec

from engine.models.config import ModelConfig, load_model_config
from engine.models.files import ModelError, check_inside, read_file, read_json
from engine.models.shapes import INDEX_FILE, SINGLE_FILE

_PUBLISHER = "take the file from the model's publisher"


class _Ends(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def check_directory(directory: Path, load_format: str = "auto") -> None:
    """Raise `ModelError` for a missing or broken file.

    Weights are looked at by the core, which reads them, and texts by `check_tokenizer` and `check_templates`. With
    `load_format` dummy the weights may be absent.
    """
    needed: list[tuple[str, ...]] = [("config.json",), ("tokenizer.json",), ("tokenizer_config.json",)]
    if load_format != "dummy":
        needed.append((SINGLE_FILE, INDEX_FILE))
    for names in needed:
        if not any((directory / name).is_file() for name in names):
            raise ModelError(
                f"{directory}: has no {' or '.join(names)}; a model directory holds config, weights and tokenizer"
            )
    if (directory / SINGLE_FILE).is_file():
        check_inside(directory / SINGLE_FILE)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if name.startswith("tokenizer") or _is_there(directory / name):
            _check_json_object(directory / name)
    _check_ends(directory, load_model_config(directory))


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _check_json_object(path: Path) -> None:
    content = read_file(path)
    try:
        msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: is not a JSON object ({error}); {_PUBLISHER}") from None


def check_tokenizer(path: Path) -> None:
    """Load tokenizer.json as the frontend will, or raise `ModelError`; 0.3 s for a vocabulary of 49,000 tokens.

    What the frontend cannot load only shows as a model that never appears.
    """
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_buffer(read_file(path))
    except ModelError:
        raise
    except Exception as error:  # it raises bare Exceptions
        raise ModelError(f"{path}: is no tokenizer: {error}; {_PUBLISHER}") from None


def _check_ends(directory: Path, config: ModelConfig) -> None:
    """Refuse end tokens that are no tokens: the model would never stop."""
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        ends = read_json(path, _Ends).eos_token_id if _is_there(path) else None
        for token in ends if isinstance(ends, list) else [] if ends is None else [ends]:
            if not 0 <= token < config.vocab_size:
                raise ModelError(
                    f"{path}: eos_token_id has {token}, but the vocabulary has {config.vocab_size} tokens; {_PUBLISHER}"
                )
