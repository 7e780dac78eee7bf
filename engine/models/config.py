"""Reads `config.json` of a model directory into a `ModelConfig`, and refuses by name what Pagelane does not compute.

No torch: the worker process reads model configurations too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from engine.models.families import CHECKPOINTS, DEFAULT_WINDOW, FAMILIES, Architecture, Family
from engine.models.files import ModelError, read_json
from engine.models.rope_config import RopeConfig, RopeFields, read_rope

DTYPES = ("float32", "bfloat16", "float16")

# Upper bounds far above any published dense model, so that a corrupt file is refused before anything is sized by it.
_UPPER_BOUNDS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 10,
    "max_position_embeddings": 1 << 27,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a dense decoder. Sizes are elements, `context_limit` is tokens."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied: bool
    """The output head is the embedding matrix (`tie_word_embeddings`)."""
    context_limit: int
    """Longest sequence: `max_position_embeddings`, or `original_context * factor` where yarn makes that longer."""
    dtype: str
    """Type of the checkpoint's weights, one of `DTYPES`."""
    rope: RopeConfig
    qk_norm: bool
    """Queries and keys pass an RMSNorm over head_dim before the rotary embedding."""
    qkv_bias: bool
    """The projections to queries, keys and values have a bias."""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def context_for(self, setting: int | None) -> int:
        """Longest sequence in tokens with `context_limit: setting`. Raises `ValueError` if that is beyond the model."""
        if setting is not None and setting > self.context_limit:
            raise ValueError(
                f"context_limit is {setting} tokens, but the model was made for {self.context_limit}: "
                f"lower it, or leave it out to take {self.context_limit}"
            )
        return setting or self.context_limit


class _RawConfig(RopeFields, kw_only=True):
    """The keys of config.json that matter; the rest neither changes a logit nor the shape of a tensor."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    partial_rotary_factor: float | None = None
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    attention_out_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: int | None = 1
    use_sliding_window: bool | None = None
    sliding_window: int | UnsetType | None = UNSET
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


def load_model_config(directory: Path) -> ModelConfig:
    """Read config.json of `directory`.

    Both the `rope_parameters` of transformers 5 and the older `rope_theta` and `rope_scaling` are read. Raises
    `ModelError` for missing, ill-typed or out-of-range fields, and for every feature that Pagelane does not compute.
    """
    path = directory / "config.json"
    # Of a model that is not supported that is the thing to say, not which of our fields it lacks.
    architecture = _architecture(path, read_json(path, dict[str, Any]))
    family = FAMILIES[architecture]
    raw = read_json(path, _RawConfig)
    _check_bounds(path, raw)
    _refuse_unsupported(path, raw, family)
    rope = read_rope(path, raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=_kv_heads(path, raw, family),
        head_dim=_head_dim(path, raw, family),
        rms_norm_eps=raw.rms_norm_eps,
        tied=raw.tie_word_embeddings,
        context_limit=_context_limit(path, raw, rope),
        dtype=_dtype(path, raw),
        rope=rope,
        qk_norm=family.qk_norm,
        qkv_bias=raw.attention_bias is not False if family.qkv_bias is None else family.qkv_bias,
    )


def _architecture(path: Path, raw: dict[str, Any]) -> Architecture:
    named, model_type = raw.get("architectures"), raw.get("model_type")
    if not named:
        known = [name for name, ours in CHECKPOINTS.items() if ours == model_type]
        named = known or [f"model_type {model_type}"]
    architecture = CHECKPOINTS.get(named[0]) if isinstance(named, list) and [type(n) for n in named] == [str] else None
    if architecture is None:
        raise ModelError(
            f"{path}: architectures is {named!r}, which Pagelane does not serve; supported: {', '.join(CHECKPOINTS)}"
        )
    if model_type not in (None, architecture):
        raise ModelError(f"{path}: architectures is {named!r}, but model_type is {model_type!r}; they must agree")
    return architecture


def _refuse_unsupported(path: Path, raw: _RawConfig, family: Family) -> None:
    sliding = sorted({kind for kind in raw.layer_types or () if kind != "full_attention"})
    if sliding:
        raise ModelError(f"{path}: layer_types has {', '.join(sliding)}; supported: full_attention")
    _refuse_window(path, raw, family)
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method", "unknown")
        raise ModelError(
            f"{path}: quantization_config.quant_method is {method!r}; "
            f"supported: no quantization, weights of {', '.join(DTYPES)}"
        )
    for name, supported in (
        ("hidden_act", ("silu",)),
        ("attention_bias", (False, None) if family.qkv_bias is False else (False, True, None)),
        ("attention_out_bias", (False,)),
        ("mlp_bias", (False,)),
        ("pretraining_tp", (1, None)),
        ("partial_rotary_factor", (1.0, None)),
    ):
        value = getattr(raw, name)
        if value not in supported:
            raise ModelError(f"{path}: {name} is {_json(value)}; supported: {_json(supported[0])}")


def _refuse_window(path: Path, raw: _RawConfig, family: Family) -> None:
    """Refuse attention that slides over less than the context; over all of it, it is full attention."""
    slides = family.windowed if raw.use_sliding_window is None else raw.use_sliding_window
    window = DEFAULT_WINDOW if raw.sliding_window is UNSET else raw.sliding_window
    if not slides or window is None or window >= raw.max_position_embeddings:
        return
    verb = "defaults to" if raw.sliding_window is UNSET else "is"
    raise ModelError(
        f"{path}: sliding_window {verb} {window} tokens and max_position_embeddings is {raw.max_position_embeddings}, "
        "but Pagelane computes full attention only: take a release of the model without a window, or set "
        f"max_position_embeddings to {window} in a copy of the file, since up to there both are the same"
    )


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _check_bounds(path: Path, raw: _RawConfig) -> None:
    for name, upper in _UPPER_BOUNDS.items():
        value = getattr(raw, name)
        if value is not None and not 1 <= value <= upper:
            raise ModelError(f"{path}: {name} is {value}, but must be between 1 and {upper}")
    if not 0 < raw.rms_norm_eps < 1:
        raise ModelError(f"{path}: rms_norm_eps is {raw.rms_norm_eps}, but must be between 0 and 1")


def _kv_heads(path: Path, raw: _RawConfig, family: Family) -> int:
    if raw.num_key_value_heads is None and family.kv_heads_needed:
        raise ModelError(f"{path}: num_key_value_heads is missing; take it from the model's publisher")
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % kv_heads:
        raise ModelError(
            f"{path}: num_attention_heads is {raw.num_attention_heads}, "
            f"which is no multiple of num_key_value_heads {kv_heads}"
        )
    return kv_heads


def _head_dim(path: Path, raw: _RawConfig, family: Family) -> int:
    head_dim = raw.head_dim or family.head_dim
    if head_dim is None:
        if raw.hidden_size % raw.num_attention_heads:
            raise ModelError(
                f"{path}: head_dim is missing and hidden_size {raw.hidden_size} is no multiple of "
                f"num_attention_heads {raw.num_attention_heads}"
            )
        head_dim = raw.hidden_size // raw.num_attention_heads
    upper = _UPPER_BOUNDS["head_dim"]
    if head_dim > upper:
        raise ModelError(
            f"{path}: head_dim, hidden_size {raw.hidden_size} / num_attention_heads {raw.num_attention_heads}, "
            f"is {head_dim}, but must be at most {upper}"
        )
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim is {head_dim}, but must be even for the rotary embedding")
    return head_dim


def _dtype(path: Path, raw: _RawConfig) -> str:
    dtype = raw.dtype or raw.torch_dtype or "float32"
    if dtype not in DTYPES:
        raise ModelError(f"{path}: dtype is {dtype!r}; supported: {', '.join(DTYPES)}")
    return dtype


def _context_limit(path: Path, raw: _RawConfig, rope: RopeConfig) -> int:
    limit = raw.max_position_embeddings
    if rope.kind == "yarn" and rope.factor and rope.original_context and rope.original_context < limit:
        limit = max(limit, int(rope.original_context * rope.factor))
    upper = _UPPER_BOUNDS["max_position_embeddings"]
    if limit > upper:
        raise ModelError(f"{path}: the scaled context is {limit} tokens, but must be at most {upper}")
    return limit
