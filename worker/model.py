"""What the worker reads of a model directory: sampling defaults, the model's family, a token for the health probe."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from dynamo.llm.exceptions import InvalidArgument

from engine.messages import Sampling
from worker.config import ConfigError
from worker.convert import to_sampling

PARSERS = {"qwen3": ("hermes", "qwen3"), "qwen3_moe": ("hermes", "qwen3")}
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


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling of requests that do not say, and what the file asks for that is not served."""

    sampling: Sampling
    unserved: tuple[str, ...]


def generation_defaults(directory: Path) -> GenerationDefaults:
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
    penalty = file.repetition_penalty
    unserved = () if penalty is None or penalty == 1.0 else (f"repetition_penalty {penalty:g}",)
    return GenerationDefaults(sampling, unserved)


def parsers(directory: Path) -> tuple[str | None, str | None]:
    """Dynamo's names of the family's parsers for tool calls and for reasoning, or None."""
    return PARSERS.get(_read(directory / "config.json", _ModelConfig).model_type, (None, None))


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
