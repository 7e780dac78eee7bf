"""Translates the metadata of a GGUF file into config.json and generation_config.json. No torch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.families import FAMILIES
from engine.models.files import ModelError
from engine.models.gguf_tokenizer import special_token_id

# llama.cpp stores the scaling of Llama 3 as a tensor of divisors; these are the parameters of the published models.
_LLAMA3_SCALINGS = (
    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
)


def model_config(
    fields: Mapping[str, Any], source: Path, *, vocab_size: int, tied: bool, dtype: str, rope_freqs: NDArray[Any] | None
) -> dict[str, Any]:
    """The keys of config.json. `rope_freqs` is the tensor rope_freqs.weight, float32 `[head_dim / 2]`, or None.

    Both spellings of the rotary parameters are written, transformers 5's and the older one. Raises `ModelError` for
    another architecture, and for missing fields and features that Pagelane does not compute.
    """
    ours = fields.get("general.architecture")
    family = next((family for name, family in FAMILIES.items() if name == ours and family.gguf), None)
    if family is None:
        supported = ", ".join(name for name, family in FAMILIES.items() if family.gguf)
        raise ModelError(
            f"{source}: general.architecture is {ours!r}, which Pagelane does not serve; supported: {supported}"
        )
    reader = _Reader(fields, source, str(ours))
    if reader.number("expert_count", 0):
        raise ModelError(
            f"{source}: {ours}.expert_count is {reader.number('expert_count', 0)}; supported: 0 (dense models)"
        )
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    head_dim = reader.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.integer(key, head_dim) != head_dim:
            raise ModelError(
                f"{source}: {ours}.{key} is {reader.integer(key)}; supported: the head dimension, {head_dim}"
            )
    context = reader.integer("context_length")
    _refuse_window(reader, context)
    theta = _shortest(reader.number("rope.freq_base", 10_000.0))
    scaling = _scaling(reader, head_dim, theta, context, rope_freqs)
    eos = special_token_id(fields, source, "eos")
    return {
        "architectures": [family.checkpoint],
        "model_type": ours,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_hidden_layers": reader.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest(reader.number("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
        "rope_theta": theta,
        "rope_scaling": scaling,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": special_token_id(fields, source, "bos"),
        "eos_token_id": eos,
        "pad_token_id": special_token_id(fields, source, "padding"),
    }


def generation_config(fields: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The keys of generation_config.json; the end of a turn (eot, eom) is among the end tokens."""
    ends = [special_token_id(fields, source, key) for key in ("eos", "eot", "eom")]
    return {
        "bos_token_id": special_token_id(fields, source, "bos"),
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)),
        "pad_token_id": special_token_id(fields, source, "padding"),
    }


class _Reader:
    """Numbers of the architecture's own keys."""

    def __init__(self, fields: Mapping[str, Any], source: Path, architecture: str) -> None:
        self.fields = fields
        self.source = source
        self.architecture = architecture

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self.architecture}.{key}"
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.source}: {name} is {value!r}, but must be one number")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise ModelError(
                f"{self.source}: {self.architecture}.{key} is {value!r}, but must be an integer of at least 1"
            )
        return int(value)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was 1e-05 before GGUF stored it."""
    return float(str(np.float32(value)))


def _refuse_window(reader: _Reader, context: int) -> None:
    window = reader.number("attention.sliding_window", 0)
    if 0 < window < context:
        raise ModelError(
            f"{reader.source}: {reader.architecture}.attention.sliding_window is {window:g} tokens and context_length "
            f"is {context}, but Pagelane computes full attention only; take a release of the model without a window"
        )


def _scaling(
    reader: _Reader, head_dim: int, theta: float, context: int, rope_freqs: NDArray[Any] | None
) -> dict[str, Any] | None:
    kind = reader.fields.get(f"{reader.architecture}.rope.scaling.type", "none")
    if rope_freqs is not None:
        if kind != "none":
            raise ModelError(
                f"{reader.source}: has rope_freqs.weight and rope.scaling.type {kind!r}; supported: one of them"
            )
        return _llama3_scaling(reader, head_dim, theta, rope_freqs)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(reader.number("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = reader.integer("rope.scaling.original_context_length", context)
    elif kind != "linear":
        raise ModelError(
            f"{reader.source}: {reader.architecture}.rope.scaling.type is {kind!r}; supported: none, linear, yarn"
        )
    return scaling


def _llama3_scaling(reader: _Reader, head_dim: int, theta: float, rope_freqs: NDArray[Any]) -> dict[str, Any]:
    for scaling in _LLAMA3_SCALINGS:
        expected = llama3_divisors(head_dim, theta, scaling)
        if rope_freqs.shape == expected.shape and np.allclose(rope_freqs, expected, rtol=1e-5):
            return {"rope_type": "llama3", **scaling}
    raise ModelError(f"{reader.source}: rope_freqs.weight is not the scaling of Llama 3.1 or 3.2; supported: those two")


def llama3_divisors(head_dim: int, theta: float, scaling: Mapping[str, float]) -> NDArray[np.float64]:
    """What llama.cpp stores as rope_freqs.weight: Llama 3's divisor of each inverse frequency, `[head_dim / 2]`."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / scaling["factor"] + smooth))
