"""Tiny random models for tests: real directories with config, weights, tokenizer and chat template. No torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.models.config import ModelConfig, load_model_config
from engine.models.families import FAMILIES, Architecture
from engine.models.shapes import weight_shapes

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
EOS = 2
"""Id of <|im_end|>, the end token of every tiny model."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}
"""One `rope_parameters` of each kind; the scaled ones begin to matter within the first few hundred positions."""

_WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
}
"""How each family says that its attention does not slide; by default Mistral's does."""

_TRAINING_TEXT = """The quick brown fox jumps over the lazy dog, and then it sleeps in the sun until evening.
What is the capital of France? The capital of France is Paris. What is the weather like there today? It is sunny.
def total(values): return sum(value for value in values if value is not None)
| name | count | price |
Numbers such as 1, 2, 10, 128 and 2048 stand between the words; so do the dates of the other months and years.
You are a helpful assistant. Answer the question of the user in a few short sentences, and say so if you do not know.
"""


def tiny_model(
    directory: Path,
    family: Architecture = "llama",
    *,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    layers: int = 2,
    tied: bool = False,
    head_dim_given: bool = True,
    rope: str | dict[str, Any] = "default",
    vocab: int = 320,
    context: int = 2048,
    seed: int = 0,
) -> Path:
    """Write a model directory with float32 weights and return it.

    Weights are scaled so that logits are spread out (standard deviation 3 to 4) and depend on far positions as well as
    near ones: a wrong page, position, group map or norm changes the text. `vocab` is at least 261 (bytes and special
    tokens). Hidden size is heads x head_dim for Llama (transformers wants a multiple of heads) and without
    `head_dim_given`, and 48 otherwise, where the two are independent.
    """
    heads = group * kv_heads
    derived = family == "llama" or not head_dim_given
    config = {
        "architectures": [FAMILIES[family].checkpoint],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": heads * head_dim if derived else 48,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **({"head_dim": head_dim} if head_dim_given else {}),
        **_WINDOWS.get(family, {}),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
        "rope_parameters": ROPES[rope] if isinstance(rope, str) else rope,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": EOS,
    }
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": [EOS, 0]})
    save_file(
        tiny_weights(load_model_config(directory), seed), directory / "model.safetensors", metadata={"format": "pt"}
    )
    _write_tokenizer(directory, vocab)
    return directory


def tiny_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Random float32 weights for `config`, by their names in a checkpoint."""
    random = np.random.default_rng(seed)
    return {name: _tiny_weight(random, name, shape) for name, shape in weight_shapes(config).items()}


def _tiny_weight(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith(".bias"):
        return random.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return random.uniform(0.5, 1.5, shape).astype(np.float32)
    gain = 1.0
    if "q_proj" in name or "k_proj" in name:
        # Attention scores get a standard deviation of about two: neither uniform nor a single token.
        gain = 1.4
    elif "o_proj" in name or "down_proj" in name:
        # Layers must outweigh the embedding in the residual stream, or a tied model repeats its last token for ever.
        gain = 6.0
    elif "embed_tokens" in name or "lm_head" in name:
        gain = 4.0 if "lm_head" in name else 3.0
    return (random.standard_normal(shape) * gain * shape[1] ** -0.5).astype(np.float32)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _write_tokenizer(directory: Path, vocab: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[EOS],
            "pad_token": SPECIAL_TOKENS[0],
            "unk_token": None,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
