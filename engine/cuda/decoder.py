"""The forward pass of a decoder on CUDA: cuBLAS products, fused norms, one kernel for QK-norm, RoPE and KV append."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cuda.arena import DeviceArena
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderWeights
from engine.models.rope import rope_table


class Ops(Protocol):
    """Operations with a fused form on the device. Every one writes its result to a buffer that is given."""

    def rms_norm(self, inputs: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    def add_rms_norm(self, inputs: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual += inputs; inputs = RMSNorm(residual)."""
        ...

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    def rope_append(
        self,
        qkv: Tensor,
        queries: Tensor,
        kv: Tensor,
        layer: int,
        *,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None: ...


class TorchOps:
    """Plain torch, for a machine without FlashInfer or Triton; the oracle of the fused forms."""

    def rms_norm(self, inputs: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Ops`."""
        out.copy_(F.rms_norm(inputs.float(), (inputs.shape[-1],), weight.float(), eps))

    def add_rms_norm(self, inputs: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See `Ops`. The sum is normed before it is rounded, as FlashInfer does it."""
        total = residual.float() + inputs.float()
        residual.copy_(total)
        inputs.copy_(F.rms_norm(total, (inputs.shape[-1],), weight.float(), eps))

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Ops`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(F.silu(gate) * up)

    def rope_append(self, qkv: Tensor, queries: Tensor, kv: Tensor, layer: int, **rest: Any) -> None:
        """See `Ops`."""
        from engine.kernels.rope_append import rope_append_reference

        rope_append_reference(qkv, queries, kv, layer, **rest)


class FusedOps:
    """FlashInfer's norms and activation, and this project's Triton kernel."""

    def __init__(self) -> None:
        import flashinfer

        from engine.kernels.rope_append import rope_append

        self._flashinfer = flashinfer
        self.rope_append = rope_append

    def rms_norm(self, inputs: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Ops`."""
        self._flashinfer.norm.rmsnorm(inputs, weight, eps, out=out)

    def add_rms_norm(self, inputs: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See `Ops`."""
        self._flashinfer.norm.fused_add_rmsnorm(inputs, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Ops`."""
        self._flashinfer.activation.silu_and_mul(gate_up, out=out)


class StepAttention(Protocol):
    """Attention of the step that was begun last."""

    def __call__(self, layer: int, queries: Tensor, out: Tensor) -> None:
        """Attend with `queries` `[tokens, heads, head_dim]` over the cache of `layer`; `out` has their shape."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """What a `CudaDecoder` computes with."""

    config: ModelConfig
    weights: DecoderWeights
    kv: Tensor
    """`[pages, layers, 2, page_size, kv_heads, head_dim]`."""
    buffers: DeviceArena
    ops: Ops
    cos_sin: Tensor
    """float32 `[positions, head_dim]`; see `rope_rows`."""


def rope_rows(config: ModelConfig, positions: int, device: torch.device) -> Tensor:
    """float32 `[positions, head_dim]`: the cosines of the first half of the dimensions, then their sines."""
    cos, sin = rope_table(config, positions)
    half = config.head_dim // 2
    return torch.cat((cos[:, :half], sin[:, :half]), dim=-1).to(device)


class CudaDecoder:
    """The forward pass. It allocates nothing: activations lie in buffers planned by `reserve`."""

    @staticmethod
    def reserve(arena: DeviceArena, config: ModelConfig, max_tokens: int, dtype: torch.dtype) -> None:
        """Plan the activations of the largest step."""
        queries = config.heads * config.head_dim
        arena.reserve("hidden", (max_tokens, config.hidden_size), dtype)
        layers, attend, mlp = arena.during("attend", "mlp"), arena.during("attend"), arena.during("mlp")
        layers.reserve("residual", (max_tokens, config.hidden_size), dtype)
        attend.reserve("qkv", (max_tokens, queries + 2 * config.kv_heads * config.head_dim), dtype)
        attend.reserve("queries", (max_tokens, queries), dtype)
        attend.reserve("attended", (max_tokens, queries), dtype)
        mlp.reserve("gate_up", (max_tokens, 2 * config.intermediate_size), dtype)
        mlp.reserve("activated", (max_tokens, config.intermediate_size), dtype)

    def __init__(self, parts: DecoderParts) -> None:
        self.parts = parts
        take = parts.buffers.take
        self._residual, self._hidden, self._qkv = take("residual"), take("hidden"), take("qkv")
        self._queries, self._attended = take("queries"), take("attended")
        self._gate_up, self._activated = take("gate_up"), take("activated")

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: StepAttention) -> Tensor:
        """Hidden states `[tokens, hidden]` behind the final norm, valid until the next call.

        `token_ids` and `positions` are int32 `[tokens]`, `slots` int64 `[tokens]`.
        """
        parts, tokens = self.parts, token_ids.shape[0]
        weights, eps = parts.weights, parts.config.rms_norm_eps
        residual, hidden = self._residual[:tokens], self._hidden[:tokens]
        torch.index_select(weights.embedding, 0, token_ids, out=residual)
        parts.ops.rms_norm(residual, weights.layers[0].input_norm, eps, hidden)
        norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            self._attend(index, positions, slots, attention, hidden)
            parts.ops.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            gate_up = torch.mm(hidden, layer.gate_up.t(), out=self._gate_up[:tokens])
            activated = self._activated[:tokens]
            parts.ops.silu_and_mul(gate_up, activated)
            torch.mm(activated, layer.down.t(), out=hidden)
            parts.ops.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def _attend(self, index: int, positions: Tensor, slots: Tensor, attention: StepAttention, hidden: Tensor) -> None:
        """Replace `hidden` by the output of layer `index`'s attention."""
        parts, tokens, config = self.parts, hidden.shape[0], self.parts.config
        layer = parts.weights.layers[index]
        qkv = self._qkv[:tokens]
        if layer.qkv_bias is None:
            torch.mm(hidden, layer.qkv.t(), out=qkv)
        else:
            torch.addmm(layer.qkv_bias, hidden, layer.qkv.t(), out=qkv)
        queries = self._queries[:tokens].view(tokens, config.heads, config.head_dim)
        attended = self._attended[:tokens]
        parts.ops.rope_append(
            qkv,
            queries,
            parts.kv,
            index,
            cos_sin=parts.cos_sin,
            positions=positions,
            slots=slots,
            q_weight=layer.q_norm,
            k_weight=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        attention(index, queries, attended.view(tokens, config.heads, config.head_dim))
        torch.mm(attended, layer.output.t(), out=hidden)
