"""Rotary embedding: inverse frequencies and the table of cosines and sines."""

import math

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.files import ModelError
from engine.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Inverse frequencies, float32 `[head_dim / 2]`, in radians per position.

    The formulas and their order of operations in float32 are those of transformers' `ROPE_INIT_FUNCTIONS`, so that
    results are equal to the last bit: linear (kaiokendev), llama3 (Llama 3.1), yarn (arXiv 2309.00071).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = rope.theta**exponents
    if rope.kind == "linear":
        return (1.0 / base) / _given(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / base)
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    return 1.0 / base


def attention_factor(rope: RopeConfig) -> float:
    """Factor on cosines and sines: 1 but for yarn, where it is given or follows from `factor` (arXiv 2309.00071)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _given(rope.factor)
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return _mscale(factor, 1.0)


def rope_table(config: ModelConfig, positions: int | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 to `positions - 1`, each float32 `[positions, head_dim]`, halves repeated.

    `positions` defaults to context_limit + 1: a row that has reached the limit may run one surplus step before its end
    is known, and must find its position in the table. Raises `ModelError` if a number is not finite.
    """
    count = config.context_limit + 1 if positions is None else positions
    steps = torch.arange(count, dtype=torch.float32)
    angles = steps[:, None] * inverse_frequencies(config.rope, config.head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    scale = attention_factor(config.rope)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    # Angles grow with the position, so the last row holds whatever is not finite.
    if not bool((cos[-1].isfinite() & sin[-1].isfinite()).all()):
        raise ModelError(
            f"the rotary table of {count} positions is not finite (theta {config.rope.theta:g}, {config.rope.kind}, "
            f"factor {config.rope.factor}, attention factor {scale:g}): correct rope_parameters in config.json"
        )
    return cos, sin


def _given(value: float | None) -> float:
    """`load_model_config` fills every field that a kind uses; a hand-made RopeConfig may have forgotten one."""
    if value is None:
        raise ValueError("RopeConfig lacks a field that its kind needs")
    return value


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    factor, low, high = _given(rope.factor), _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    original = int(_given(rope.original_context))
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, smoothed, scaled)


def _yarn(rope: RopeConfig, base: Tensor, head_dim: int) -> Tensor:
    low = _correction_dim(rope, _given(rope.beta_fast), head_dim)
    high = _correction_dim(rope, _given(rope.beta_slow), head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (_given(rope.factor) * base) * (1 - keep) + 1.0 / base * keep


def _correction_dim(rope: RopeConfig, rotations: float, head_dim: int) -> float:
    """Dimension whose wavelength turns `rotations` times within the original context (yarn, section 3.2)."""
    turns = int(_given(rope.original_context)) / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(rope.theta))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
