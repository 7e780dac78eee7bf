"""What the worker reads of a model directory: sampling defaults, the model's family, a token for the health probe."""

from pathlib import Path
from typing import TypeVar

import msgspec
from dynamo.llm.exceptions import InvalidArgument

from engine.messages import Sampling
from engine.models.files import ModelError, read_json
from worker.config import ConfigError
from worker.convert import to_sampling

PARSERS: dict[str, tuple[str | None, str | None]] = {
    "qwen2": ("hermes", None),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_moe": ("hermes", "qwen3"),
    "mistral": ("mistral", None),
}
"""By `model_type` of config.json: Dynamo's parsers of tool calls and of reasoning. Other families get none."""


T = TypeVar("T")


class _GenerationConfig(msgspec.Struct, frozen=True):
    """The keys of generation_config.json that concern sampling."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _ModelConfig(msgspec.Struct, frozen=True):
    model_type: str = ""


def generation_defaults(directory: Path) -> Sampling:
    """Defaults from generation_config.json, field by field as vLLM takes them; a missing temperature is OpenAI's 1.

    `do_sample: false` is the author's word that the model is meant to be greedy: temperature 0. A missing file is no
    error. Raises `ConfigError` if the file cannot be read or holds what a request would be refused for.
    """
    path = directory / "generation_config.json"
    file = _read(path, _GenerationConfig)
    try:
        sampling = to_sampling(msgspec.structs.asdict(file), Sampling(temperature=1.0), lambda: 0)
    except InvalidArgument as error:
        raise ConfigError(f"{path}: {error}; correct the file") from None
    if file.do_sample is False:
        sampling = msgspec.structs.replace(sampling, temperature=0.0)
    return sampling


def parsers(directory: Path) -> tuple[str | None, str | None]:
    """Dynamo's names of the family's parsers for tool calls and for reasoning, or None."""
    return PARSERS.get(_read(directory / "config.json", _ModelConfig).model_type, (None, None))


def _read(path: Path, kind: type[T]) -> T:
    if not path.exists() and not path.is_symlink():
        return kind()
    try:
        return read_json(path, kind)
    except ModelError as error:
        raise ConfigError(str(error)) from None
