"""Reads `config.json` of a model directory into a `ModelConfig`, and refuses by name what Pagelane does not compute.

No torch: the worker process reads model configurations too.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

Architecture = Literal["llama", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]

ARCHITECTURES: dict[str, Architecture] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""Names in `architectures` of config.json, and what we call them."""

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")

_DEFAULT_THETA = 10_000.0
_QWEN3_HEAD_DIM = 128
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
# Far wider than any published model, and narrow enough that every formula of `engine.models.rope` stays finite: yarn
# divides by log(theta) and by a sum that a negative mscale_all_dim can make zero.
_ROPE_BOUNDS = {
    "rope_theta": (2.0, 1e15),
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "original_max_position_embeddings": (1, 1 << 27),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
}

T = TypeVar("T")


class ModelError(ValueError):
    """A model directory or file that cannot be served. One line that names the file, the field and the way out."""

    def __init__(self, message: str) -> None:
        # What is quoted from a file may break lines.
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding, in the terms of transformers' `rope_parameters`. Fields that `kind` does not use are None.

    `original_context` is the context length before scaling, in tokens. `attention_factor` multiplies cos and sin; None
    derives it from `factor`, `mscale` and `mscale_all_dim` (yarn).
    """

    theta: float = _DEFAULT_THETA
    kind: RopeKind = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_context: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


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

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys pass an RMSNorm over head_dim before the rotary embedding."""
        return self.architecture == "qwen3"

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


class _RawRope(msgspec.Struct, forbid_unknown_fields=True):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


class _RawConfig(msgspec.Struct):
    """The keys of config.json that matter; the rest neither changes a logit nor the shape of a tensor."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    architectures: list[str] | None = None
    model_type: str | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: int | None = 1
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


def read_json(path: Path, kind: type[T]) -> T:
    """Decode `path` as JSON of type `kind`, or raise a `ModelError` that names the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from None


def load_model_config(directory: Path) -> ModelConfig:
    """Read config.json of `directory`.

    Both the `rope_parameters` of transformers 5 and the older `rope_theta` and `rope_scaling` are read. Raises
    `ModelError` for missing, ill-typed or out-of-range fields, and for every feature that Pagelane does not compute.
    """
    path = directory / "config.json"
    # Of a model that is not supported that is the thing to say, not which of our fields it lacks.
    architecture = _architecture(path, read_json(path, dict[str, Any]))
    raw = read_json(path, _RawConfig)
    _refuse_unsupported(path, raw)
    _check_bounds(path, raw)
    rope = _rope_config(path, raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=_kv_heads(path, raw, architecture),
        head_dim=_head_dim(path, raw, architecture),
        rms_norm_eps=raw.rms_norm_eps,
        tied=raw.tie_word_embeddings,
        context_limit=_context_limit(path, raw, rope),
        dtype=_dtype(path, raw),
        rope=rope,
    )


def _architecture(path: Path, raw: dict[str, Any]) -> Architecture:
    named = raw.get("architectures")
    model_type = raw.get("model_type")
    if not named:
        named = [name for name, ours in ARCHITECTURES.items() if ours == model_type] or [f"model_type {model_type}"]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ModelError(
            f"{path}: architectures is {named!r}, which Pagelane does not serve; supported: {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[named[0]]
    if model_type not in (None, architecture):
        raise ModelError(f"{path}: architectures is {named!r}, but model_type is {model_type!r}; they must agree")
    return architecture


def _refuse_unsupported(path: Path, raw: _RawConfig) -> None:
    sliding = sorted({kind for kind in raw.layer_types or () if kind != "full_attention"})
    if sliding:
        raise ModelError(f"{path}: layer_types has {', '.join(sliding)}; supported: full_attention")
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method", "unknown")
        raise ModelError(
            f"{path}: quantization_config.quant_method is {method!r}; "
            f"supported: no quantization, weights of {', '.join(DTYPES)}"
        )
    for name, supported in (
        ("hidden_act", ("silu",)),
        ("attention_bias", (False,)),
        ("mlp_bias", (False,)),
        ("use_sliding_window", (False,)),
        ("pretraining_tp", (1, None)),
        ("partial_rotary_factor", (1.0, None)),
    ):
        value = getattr(raw, name)
        if value not in supported:
            raise ModelError(f"{path}: {name} is {_json(value)}; supported: {_json(supported[0])}")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _check_bounds(path: Path, raw: _RawConfig) -> None:
    for name, upper in _UPPER_BOUNDS.items():
        value = getattr(raw, name)
        if value is not None and not 1 <= value <= upper:
            raise ModelError(f"{path}: {name} is {value}, but must be between 1 and {upper}")
    if not 0 < raw.rms_norm_eps < 1:
        raise ModelError(f"{path}: rms_norm_eps is {raw.rms_norm_eps}, but must be between 0 and 1")


def _kv_heads(path: Path, raw: _RawConfig, architecture: Architecture) -> int:
    if raw.num_key_value_heads is None and architecture == "qwen3":
        raise ModelError(f"{path}: num_key_value_heads is missing")
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % kv_heads:
        raise ModelError(
            f"{path}: num_attention_heads is {raw.num_attention_heads}, "
            f"which is no multiple of num_key_value_heads {kv_heads}"
        )
    return kv_heads


def _head_dim(path: Path, raw: _RawConfig, architecture: Architecture) -> int:
    head_dim = raw.head_dim
    if head_dim is None and architecture == "qwen3":
        head_dim = _QWEN3_HEAD_DIM
    if head_dim is None:
        if raw.hidden_size % raw.num_attention_heads:
            raise ModelError(
                f"{path}: head_dim is missing and hidden_size {raw.hidden_size} is no multiple of "
                f"num_attention_heads {raw.num_attention_heads}"
            )
        head_dim = raw.hidden_size // raw.num_attention_heads
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim is {head_dim}, but must be even for the rotary embedding")
    return head_dim


def _dtype(path: Path, raw: _RawConfig) -> str:
    dtype = raw.dtype or raw.torch_dtype or "float32"
    if dtype not in DTYPES:
        raise ModelError(f"{path}: dtype is {dtype!r}; supported: {', '.join(DTYPES)}")
    return dtype


def _rope_config(path: Path, raw: _RawConfig) -> RopeConfig:
    given = {
        field: _one_rope_config(path, field, value, raw)
        for field in ("rope_parameters", "rope_scaling")
        if (value := getattr(raw, field))
    }
    if len(set(given.values())) > 1:
        raise ModelError(f"{path}: rope_parameters and rope_scaling are both present and differ; keep one of them")
    return next(iter(given.values()), None) or _one_rope_config(path, "rope_theta", {}, raw)


def _one_rope_config(path: Path, field: str, value: dict[str, Any], raw: _RawConfig) -> RopeConfig:
    try:
        rope = msgspec.convert(value, _RawRope)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {str(error).replace('$', field)} (in {field})") from None
    kind = next((known for known in ROPE_KINDS if known == (rope.rope_type or rope.type or "default")), None)
    if kind is None:
        raise ModelError(
            f"{path}: {field}.rope_type is {rope.rope_type or rope.type!r}; supported: {', '.join(ROPE_KINDS)}"
        )
    if rope.partial_rotary_factor not in (None, 1.0):
        raise ModelError(f"{path}: {field}.partial_rotary_factor is {rope.partial_rotary_factor}; supported: 1.0")
    theta = _rope_theta(path, field, rope, raw)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _rope_number(path, f"{field}.factor", rope.factor)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    original = (
        raw.original_max_position_embeddings or rope.original_max_position_embeddings or raw.max_position_embeddings
    )
    original = int(_rope_number(path, f"{field}.original_max_position_embeddings", original))
    if kind == "llama3":
        return _llama3(path, field, rope, RopeConfig(theta=theta, kind=kind, factor=factor, original_context=original))
    return _yarn(path, field, rope, RopeConfig(theta=theta, kind=kind, factor=factor, original_context=original))


def _rope_theta(path: Path, field: str, rope: _RawRope, raw: _RawConfig) -> float:
    inner, outer = rope.rope_theta, raw.rope_theta
    if inner is not None and outer is not None and inner != outer:
        raise ModelError(f"{path}: {field}.rope_theta is {inner}, but rope_theta is {outer}; keep one of them")
    theta = inner if inner is not None else outer
    if theta is None and raw.rope_parameters is not None:
        theta = raw.rope_parameters.get("rope_theta")
    return _rope_number(path, "rope_theta", _DEFAULT_THETA if theta is None else theta)


def _llama3(path: Path, field: str, rope: _RawRope, base: RopeConfig) -> RopeConfig:
    low = _rope_number(path, f"{field}.low_freq_factor", rope.low_freq_factor)
    high = _rope_number(path, f"{field}.high_freq_factor", rope.high_freq_factor)
    if high <= low:
        raise ModelError(f"{path}: {field}.high_freq_factor is {high}, but must exceed low_freq_factor {low}")
    return replace(base, low_freq_factor=low, high_freq_factor=high)


def _yarn(path: Path, field: str, rope: _RawRope, base: RopeConfig) -> RopeConfig:
    fast = _rope_number(path, f"{field}.beta_fast", rope.beta_fast or 32.0)
    slow = _rope_number(path, f"{field}.beta_slow", rope.beta_slow or 1.0)
    if fast < slow:
        raise ModelError(f"{path}: {field}.beta_fast is {fast}, but must be at least beta_slow {slow}")

    def given(name: str) -> float | None:
        value = getattr(rope, name)
        return None if value is None else _rope_number(path, f"{field}.{name}", value)

    return replace(
        base,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=given("attention_factor"),
        mscale=given("mscale"),
        mscale_all_dim=given("mscale_all_dim"),
        truncate=rope.truncate is not False,
    )


def _rope_number(path: Path, field: str, value: object) -> float:
    """`value` if it is a number within the `_ROPE_BOUNDS` of `field`'s last part, else a `ModelError` that names it."""
    if value is None:
        raise ModelError(f"{path}: {field} is missing")
    lower, upper = _ROPE_BOUNDS[field.rpartition(".")[2]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not lower <= value <= upper:
        raise ModelError(f"{path}: {field} is {value!r}, but must be a number between {lower:g} and {upper:g}")
    return float(value)


def _context_limit(path: Path, raw: _RawConfig, rope: RopeConfig) -> int:
    limit = raw.max_position_embeddings
    if rope.kind == "yarn" and rope.factor and rope.original_context and rope.original_context < limit:
        limit = max(limit, int(rope.original_context * rope.factor))
    upper = _UPPER_BOUNDS["max_position_embeddings"]
    if limit > upper:
        raise ModelError(f"{path}: the scaled context is {limit} tokens, but must be at most {upper}")
    return limit
