"""Names and shapes of a model's weights, as its checkpoint has them. No torch."""

from engine.models.config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight in the order of the forward pass; matrices are `[out, in]`. No head if tied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (queries, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (keys, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (keys, hidden)
        if config.qkv_bias:
            shapes[prefix + "self_attn.q_proj.bias"] = (queries,)
            shapes[prefix + "self_attn.k_proj.bias"] = (keys,)
            shapes[prefix + "self_attn.v_proj.bias"] = (keys,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes
