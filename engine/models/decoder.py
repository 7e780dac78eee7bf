"""Llama and its kin: one decoder forward pass over the tokens of a step, whatever lane runs it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.rope import rope_table
from engine.models.shapes import EMBEDDING, HEAD


class Attention(Protocol):
    """Attention of one step over a paged KV cache."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append keys and values of the step's tokens to the cache, then attend.

        `queries` is `[tokens, heads, head_dim]`, `keys` and `values` `[tokens, kv_heads, head_dim]`; returns
        `[tokens, heads * head_dim]`.
        """
        ...


class MatMul(Protocol):
    """Matrix product of a lane."""

    def __call__(self, inputs: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Write `inputs [tokens, in] @ weight [out, in].T` to `out [tokens, out]` and return it."""
        ...


class Buffers(Protocol):
    """Where activations lie; `reserve` plans a tensor, `take` gives it."""

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None: ...
    def take(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; matrices are `[out, in]`, and those that read the same input lie in one matrix."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a decoder. `head` is the embedding where they are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor

    @classmethod
    def fuse(cls, config: ModelConfig, weights: dict[str, Tensor]) -> "DecoderWeights":
        """Join the weights that `engine.models.weights` gives, under their Hugging Face names.

        Takes the tensors out of `weights` one layer at a time, so that the peak is one layer above the sum.
        """
        embedding = weights.pop(EMBEDDING)
        head = embedding if config.tied else weights.pop(HEAD)
        layers = [_fuse_layer(config, weights, f"model.layers.{layer}.") for layer in range(config.layers)]
        return cls(embedding, layers, weights.pop("model.norm.weight"), head)

    def matrices(self) -> Iterator[Tensor]:
        """Every matrix that a step multiplies with."""
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.head

    @property
    def nbytes(self) -> int:
        """Bytes of the weights; a tied head counts once."""
        tensors = [self.embedding, self.norm, *(() if self.head is self.embedding else (self.head,))]
        for layer in self.layers:
            tensors += (layer.input_norm, layer.qkv, layer.output, layer.mlp_norm, layer.gate_up, layer.down)
            tensors += (part for part in (layer.qkv_bias, layer.q_norm, layer.k_norm) if part is not None)
        return sum(tensor.nbytes for tensor in tensors)


def _fuse_layer(config: ModelConfig, weights: dict[str, Tensor], prefix: str) -> LayerWeights:
    def take(name: str, kind: str = "weight") -> Tensor:
        return weights.pop(f"{prefix}{name}.{kind}")

    return LayerWeights(
        input_norm=take("input_layernorm"),
        qkv=torch.cat([take(f"self_attn.{part}_proj") for part in "qkv"]),
        qkv_bias=torch.cat([take(f"self_attn.{part}_proj", "bias") for part in "qkv"]) if config.qkv_bias else None,
        q_norm=take("self_attn.q_norm") if config.qk_norm else None,
        k_norm=take("self_attn.k_norm") if config.qk_norm else None,
        output=take("self_attn.o_proj"),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=torch.cat([take("mlp.gate_proj"), take("mlp.up_proj")]),
        down=take("mlp.down_proj"),
    )


class Decoder:
    """The forward pass. Activations lie in `buffers`, planned by `reserve` for `max_tokens` tokens a step."""

    @staticmethod
    def reserve(buffers: Buffers, config: ModelConfig, max_tokens: int, dtype: torch.dtype) -> None:
        """Plan the activations of the largest step."""
        widths = {
            "hidden": config.hidden_size,
            "projected": config.hidden_size,
            "qkv": (config.heads + 2 * config.kv_heads) * config.head_dim,
            "gate_up": 2 * config.intermediate_size,
            "rope_cos": config.head_dim,
            "rope_sin": config.head_dim,
        }
        for name, width in widths.items():
            buffers.reserve(name, (max_tokens, width), dtype)

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, buffers: Buffers, matmul: MatMul, positions: int
    ) -> None:
        self.config = config
        self.weights = weights
        self._matmul = matmul
        self._hidden = buffers.take("hidden")
        self._projected = buffers.take("projected")
        self._qkv = buffers.take("qkv")
        self._gate_up = buffers.take("gate_up")
        self._step_cos = buffers.take("rope_cos")
        self._step_sin = buffers.take("rope_sin")
        cos, sin = rope_table(config, positions)
        # Rotation is x * cos + swap_halves(x) * sin with the minus sign of the first half kept in the table.
        sin[:, : config.head_dim // 2].neg_()
        self.cos, self.sin = cos.to(weights.norm.dtype), sin.to(weights.norm.dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states `[tokens, hidden]` before the final norm, valid until the next call.

        `token_ids` and `positions` are `[tokens]`, int32 or int64.
        """
        tokens = token_ids.shape[0]
        hidden = torch.index_select(self.weights.embedding, 0, token_ids, out=self._hidden[:tokens])
        torch.index_select(self.cos, 0, positions, out=self._step_cos[:tokens])
        torch.index_select(self.sin, 0, positions, out=self._step_sin[:tokens])
        for index, layer in enumerate(self.weights.layers):
            hidden += self._attend(index, layer, self._norm(hidden, layer.input_norm), attention)
            hidden += self._mlp(layer, self._norm(hidden, layer.mlp_norm))
        return hidden

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write the logits of `hidden [rows, hidden]` to `out [rows, vocab]` and return it."""
        return self._matmul(self._norm(hidden, self.weights.norm), self.weights.head, out)

    def _norm(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(inputs, (inputs.shape[-1],), weight, self.config.rms_norm_eps)

    def _attend(self, index: int, layer: LayerWeights, inputs: Tensor, attention: Attention) -> Tensor:
        config, tokens = self.config, inputs.shape[0]
        qkv = self._matmul(inputs, layer.qkv, self._qkv[:tokens])
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        heads = qkv.view(tokens, -1, config.head_dim)
        rotated = heads[:, : config.heads + config.kv_heads]
        queries, keys, values = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        self._normalise_heads(layer, queries, keys)
        self._rotate(rotated)
        attended = attention(index, queries, keys, values)
        return self._matmul(attended, layer.output, self._projected[:tokens])

    def _normalise_heads(self, layer: LayerWeights, queries: Tensor, keys: Tensor) -> None:
        if layer.q_norm is not None and layer.k_norm is not None:
            queries.copy_(self._norm(queries, layer.q_norm))
            keys.copy_(self._norm(keys, layer.k_norm))

    def _rotate(self, heads: Tensor) -> None:
        """Rotary embedding in place; `heads` is `[tokens, heads, head_dim]`, dimension i paired with i + half."""
        tokens, count, head_dim = heads.shape
        swapped = heads.view(tokens, count, 2, head_dim // 2).flip(2).view(tokens, count, head_dim)
        cos, sin = self._step_cos[:tokens, None], self._step_sin[:tokens, None]
        heads.mul_(cos).addcmul_(swapped, sin)

    def _mlp(self, layer: LayerWeights, inputs: Tensor) -> Tensor:
        tokens, inner = inputs.shape[0], self.config.intermediate_size
        gate_up = self._matmul(inputs, layer.gate_up, self._gate_up[:tokens])
        activated = F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:])
        return self._matmul(activated, layer.down, self._projected[:tokens])
