"""A decoder's weights in one allocation, each part in its place before the first is read.

Parts that are read first and joined then leave gaps in an allocator's memory that nothing else fits (760 MiB of
Qwen3-4B on an H200), and take a layer's memory twice for a moment.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Buffers, DecoderWeights, LayerWeights
from engine.models.shapes import EMBEDDING, HEAD, weight_shapes

_NORM = "model.norm.weight"
_LAYER = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
"""Fields of `LayerWeights`, and the checkpoint's tensors that lie in each, one below the other."""


class PlacedWeights(NamedTuple):
    """Weights that are still to be written."""

    weights: DecoderWeights
    parts: dict[str, Tensor]
    """Views of `weights` by the names and in the order of `weight_shapes`: where each tensor of a checkpoint goes."""


def reserve_weights(buffers: Buffers, config: ModelConfig, dtype: torch.dtype) -> None:
    """Plan the memory of all weights."""
    shapes = weight_shapes(config)
    for name, parts in _places(config, shapes):
        buffers.reserve(name, (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:]), dtype)


def take_weights(buffers: Buffers, config: ModelConfig) -> PlacedWeights:
    """The weights that `reserve_weights` planned, and the places of their parts."""
    shapes = weight_shapes(config)
    found: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    for name, names in _places(config, shapes):
        found[name] = buffers.take(name)
        pieces = torch.split(found[name], [shapes[part][0] for part in names])
        parts |= zip(names, pieces, strict=True)
    layers = [
        LayerWeights(**{field: found.get(f"weights.{layer}.{field}") for field in _LAYER})  # type: ignore[arg-type]
        for layer in range(config.layers)
    ]
    embedding = found[EMBEDDING]
    weights = DecoderWeights(embedding, layers, found[_NORM], embedding if config.tied else found[HEAD])
    return PlacedWeights(weights, {name: parts[name] for name in shapes})


def _places(config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, list[str]]]:
    """Name of each tensor of the model, and the checkpoint's tensors that it is made of."""
    yield EMBEDDING, [EMBEDDING]
    for layer in range(config.layers):
        for field, names in _LAYER.items():
            parts = [f"model.layers.{layer}.{name}" for name in names]
            if parts[0] in shapes:
                yield f"weights.{layer}.{field}", parts
    for name in (_NORM, HEAD):
        if name in shapes:
            yield name, [name]
