"""Random weights of real shapes that behave: logits of a few nats of entropy, attention far from uniform.

- Attention scores get a standard deviation of about 4, so that a query's entropy is well under half of a uniform one's.
- Each half layer adds `_LAYERS_SHARE / layers` of the embedding's size to the residual stream. More is chaos: with
  0.25 in each, bfloat16 in `transformers` itself was 0.24 nats from float32 on the 4B shape, and lost 1.3 to argmax.
- Every embedding has one direction in common, and the head of `_COMMON` tokens reads it: a bias in their favour, as
  real models have for frequent tokens. Without it, few nats would need logits so large that any rounding changes them.
- The final norm has random signs: with a tied head, the last token would otherwise repeat itself.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.families import FAMILIES
from engine.models.shapes import weight_shapes

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-tiny": {"hidden_size": 512, "intermediate_size": 1536, "layers": 3, "heads": 16, "tied": True,
                   "vocab": 32000},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "layers": 36, "heads": 32, "tied": True},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "layers": 36, "heads": 32, "tied": False},
    "qwen3-14b": {"hidden_size": 5120, "intermediate_size": 17408, "layers": 40, "heads": 40, "tied": False},
    "group6-256": {"hidden_size": 1536, "intermediate_size": 4096, "layers": 4, "heads": 24, "tied": True,
                   "kv_heads": 4, "head_dim": 256},
    "qwen2-0.5b": {"family": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "layers": 24, "heads": 14,
                   "tied": True, "kv_heads": 2, "head_dim": 64},
    "group5-128": {"hidden_size": 1536, "intermediate_size": 4096, "layers": 4, "heads": 40, "tied": True},
}  # fmt: skip
_EMBEDDING_STD = 0.08
_LAYERS_SHARE = 1.1
_COMMON = 256
_SHARED_SIZE = 0.4
_BIAS_NATS = 40.0
_NORM_GAIN = 2.1
_PROJECTION_GAIN = 1.9


def write_config(name: str, directory: Path) -> Path:
    """config.json of a shape, in `directory`."""
    shape = SHAPES[name]
    config = {
        "architectures": [FAMILIES[shape.get("family", "qwen3")].checkpoint],
        "model_type": shape.get("family", "qwen3"),
        "vocab_size": shape.get("vocab", 151936),
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape.get("kv_heads", 8),
        "head_dim": shape.get("head_dim", 128),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape["tied"],
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def shaped_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 weights on the GPU, by their names in a checkpoint."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    def spread(*shape: int) -> Tensor:
        return 0.6 + 0.8 * torch.rand(*shape, device="cuda", generator=generator)

    weights = {}
    for name, shape in weight_shapes(config).items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = _NORM_GAIN * spread(*shape)
        elif name == "model.norm.weight":
            value = spread(*shape) * random(*shape).sign()
        elif name.endswith(".bias"):
            value = 0.5 * random(*shape)
        elif len(shape) == 1:
            value = spread(*shape)
        elif "embed_tokens" in name or "lm_head" in name:
            value = random(*shape) * _EMBEDDING_STD
        elif "o_proj" in name or "down_proj" in name:
            value = random(*shape) * (2 * _LAYERS_SHARE / config.layers * _EMBEDDING_STD * shape[1] ** -0.5)
        else:
            # Without norms of their own, queries and keys get their gain here.
            gain = _PROJECTION_GAIN if not config.qk_norm and name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            value = random(*shape) * (gain * shape[1] ** -0.5)
        weights[name] = value
    _favour(config, weights, generator)
    return {name: value.to(torch.bfloat16) for name, value in weights.items()}


def _favour(config: ModelConfig, weights: dict[str, Tensor], generator: torch.Generator) -> None:
    """Give all embeddings one direction in common, and a part of the head what the final norm makes of it."""
    hidden = config.hidden_size
    direction = torch.randn(hidden, device="cuda", generator=generator)
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if config.tied else weights["lm_head.weight"]
    read = direction * weights["model.norm.weight"]
    common = torch.randperm(config.vocab_size, device="cuda", generator=generator)[:_COMMON]
    embedding += _SHARED_SIZE * _EMBEDDING_STD * direction
    head[common] += _BIAS_NATS / hidden * read
