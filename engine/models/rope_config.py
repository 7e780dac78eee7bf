"""Reads the rotary embedding's parameters from config.json, in both spellings. No torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.models.files import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")

_DEFAULT_THETA = 10_000.0
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


class RopeFields(msgspec.Struct, kw_only=True):
    """The keys of config.json that concern positions."""

    max_position_embeddings: int
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    original_max_position_embeddings: int | None = None


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


def read_rope(path: Path, raw: RopeFields) -> RopeConfig:
    """The rotary embedding that `raw` describes, or a `ModelError` that names `path` and the field."""
    given = {
        field: _read_one(path, field, value, raw)
        for field in ("rope_parameters", "rope_scaling")
        if (value := getattr(raw, field))
    }
    if len(set(given.values())) > 1:
        raise ModelError(f"{path}: rope_parameters and rope_scaling are both present and differ; keep one of them")
    return next(iter(given.values()), None) or _read_one(path, "rope_theta", {}, raw)


def _read_one(path: Path, field: str, value: dict[str, Any], raw: RopeFields) -> RopeConfig:
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


def _rope_theta(path: Path, field: str, rope: _RawRope, raw: RopeFields) -> float:
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
