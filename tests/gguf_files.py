"""Writes tiny models as GGUF files, as llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from engine.models import gguf_import
from engine.models.config import load_model_config
from tests.models import CHAT_TEMPLATE, EOS, SPECIAL_TOKENS

QUANT = gguf.GGMLQuantizationType
NAMES = {ours: theirs for theirs, ours in gguf_import._BLOCK_NAMES.items()}


def write_gguf(
    path: Path,
    model: Path,
    *,
    quant: QUANT = QUANT.F32,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    left_out: tuple[str, ...] = (),
) -> Path:
    """`model` as llama.cpp's converter writes it; `keys` and `tensors` are added or replaced, `left_out` names both."""
    config = load_model_config(model)
    architecture = llama_cpp_architecture(config.architecture)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    found: dict[str, Any] = {
        f"{architecture}.context_length": config.context_limit,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.layers,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.heads,
        f"{architecture}.attention.head_count_kv": config.kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        f"{architecture}.rope.freq_base": config.rope.theta,
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS[:3] else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **(keys or {}),
    }
    writer = gguf.GGUFWriter(path, found.pop("general.architecture", architecture))
    for name, value in found.items():
        if name not in left_out:
            add(writer, name, value)
    for name, tensor in ({llama_cpp_name(n): t for n, t in converted(model).items()} | (tensors or {})).items():
        kind = QUANT.F32 if tensor.ndim == 1 else quant
        if name not in left_out:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp_architecture(ours: str) -> str:
    """What llama.cpp calls a family."""
    return "llama" if ours == "mistral" else ours


def add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    else:
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)


def converted(model: Path) -> dict[str, np.ndarray]:
    """The checkpoint's tensors, rows of queries and keys in llama.cpp's order: per head (half, i) as (i, half)."""
    config = load_model_config(model)
    weights = load_file(model / "model.safetensors")
    for name in weights if llama_cpp_architecture(config.architecture) == "llama" else ():
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if part in name:
                rows = weights[name].reshape(heads, 2, config.head_dim // 2, -1)
                weights[name] = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weights[name].shape))
    return weights


def llama_cpp_name(name: str) -> str:
    fixed = {theirs: ours for ours, theirs in gguf_import._OTHER_NAMES.items()}
    if name in fixed:
        return fixed[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(middle)]}.{kind}"
