"""The decoders that Pagelane computes: the shape of Llama, and what each family adds to it. No torch."""

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "seed_oss"]
"""A family, by its `model_type` in config.json."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's config.json means beyond the numbers that it states. Defaults are those of transformers."""

    checkpoint: str
    """Name in `architectures` of config.json."""
    head_dim: int | None = None
    """Where config.json names none; None is hidden_size / num_attention_heads."""
    kv_heads_needed: bool = False
    """Without num_key_value_heads transformers takes a number of its own, rather than one KV head per query head."""
    qk_norm: bool = False
    """Queries and keys pass an RMSNorm over head_dim before the rotary embedding."""
    qkv_bias: bool | None = False
    """The projections to queries, keys and values have a bias. None: `attention_bias` says so, true by default."""
    windowed: bool = False
    """Attention slides unless config.json says that it does not."""
    gguf: bool = True
    """llama.cpp has an architecture of this name."""


FAMILIES: dict[Architecture, Family] = {
    "llama": Family("LlamaForCausalLM"),
    # llama.cpp calls a Mistral llama.
    "mistral": Family("MistralForCausalLM", kv_heads_needed=True, windowed=True, gguf=False),
    "qwen2": Family("Qwen2ForCausalLM", kv_heads_needed=True, qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128, kv_heads_needed=True, qk_norm=True),
    "seed_oss": Family("SeedOssForCausalLM", head_dim=128, qkv_bias=None, gguf=False),
}

CHECKPOINTS: dict[str, Architecture] = {family.checkpoint: name for name, family in FAMILIES.items()}
"""Families by their names in `architectures` of config.json."""

DEFAULT_WINDOW = 4096
"""Tokens of a sliding window whose size config.json leaves out."""
