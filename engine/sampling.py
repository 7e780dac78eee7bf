"""Chooses the next token of each row: greedy, temperature, top-k, top-p, min-p, with a seed per row.

The random number of a token is a hash of (seed, position of the token in its sequence): it does not depend on batch
mates, on the order of rows, or on how a prompt was chunked. Tokens are drawn by inverting the cumulative distribution
over the tokens in order of falling logit.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LOGITS_ROWS = 32
"""Rows whose logits are held at once; more rows are computed in slices."""
DRAW_ROWS = 4
"""Rows sorted and summed at once, in float64."""
TOP_K_CLASSES = (64, 1024)
"""A row with a top_k takes the smallest of these that holds it, and so never sorts the vocabulary. Its class depends on
the row alone: ties between equal logits then fall the same way whatever its mates ask for."""


class SamplingRows(NamedTuple):
    """Parameters of the rows to sample, each `[rows]`; see `engine.messages.Sampling`."""

    temperature: Tensor
    """float32; 0 is greedy."""
    top_k: Tensor
    """int32; 0 is off."""
    top_p: Tensor
    """float32; 1 is off."""
    min_p: Tensor
    """float32; 0 is off."""
    seed: Tensor
    """int64: the bits of the unsigned seed."""
    position: Tensor
    """int64: position that the sampled token will have in its sequence."""

    def take(self, rows: Tensor) -> "SamplingRows":
        """The parameters of `rows`."""
        return SamplingRows(*(column[rows] for column in self))


class Buffers(Protocol):
    """Where the sampler's memory lies."""

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None: ...
    def take(self, name: str) -> Tensor: ...


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of int64 bit patterns; torch's own shift keeps the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), a bijection of 64-bit words."""
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) with 53 random bits for each (seed, position); int64 in, float64 out.

    The seed is hashed before the position is added, so that neighbouring seeds do not share shifted streams.
    """
    state = _mix(seed + _signed(0x9E3779B97F4A7C15)) + position * _signed(0x9E3779B97F4A7C15)
    return _shift_right(_mix(state), 11).double() * 2.0**-53


class Sampler:
    """Samples rows of float32 logits; scratch is bounded by `DRAW_ROWS` rows of the vocabulary."""

    @staticmethod
    def reserve(buffers: Buffers, vocab: int) -> None:
        """Plan the scratch."""
        buffers.reserve("draw_logits", (DRAW_ROWS, vocab), torch.float32)
        buffers.reserve("draw_tokens", (DRAW_ROWS, vocab), torch.int64)
        buffers.reserve("draw_weights", (DRAW_ROWS, vocab), torch.float64)

    def __init__(self, buffers: Buffers) -> None:
        self._scratch = [buffers.take(name).flatten() for name in ("draw_logits", "draw_tokens", "draw_weights")]

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Tokens, int64 `[rows]`, for `logits` float32 `[rows, vocab]`.

        Greedy rows take the largest logit, the lowest token among equals. The others: logits / temperature, then top-k,
        then top-p over the softmax of what is left (the token that crosses the bound stays), then min-p relative to the
        most likely token. At least one token always stays.
        """
        tokens = logits.argmax(dim=-1)
        classes = self._classes(rows, logits.shape[1])
        for width in sorted(set(classes) - {0}):
            members = [row for row, own in enumerate(classes) if own == width]
            for begin in range(0, len(members), DRAW_ROWS):
                some = torch.tensor(members[begin : begin + DRAW_ROWS])
                tokens[some] = self.draw(logits[some], rows.take(some), width)
        return tokens

    @staticmethod
    def _classes(rows: SamplingRows, vocab: int) -> list[int]:
        """Candidates that each row sorts: 0 for greedy rows, the vocabulary where no class holds its top_k."""
        return [
            0 if temperature == 0 else next((size for size in TOP_K_CLASSES if 0 < top_k <= size < vocab), vocab)
            for temperature, top_k in zip(rows.temperature.tolist(), rows.top_k.tolist(), strict=True)
        ]

    def draw(self, logits: Tensor, rows: SamplingRows, width: int) -> Tensor:
        """Tokens, int64 `[rows]`, of at most `DRAW_ROWS` rows with a temperature; `width` candidates are looked at."""
        count, vocab = logits.shape
        values, tokens, weights = (scratch[: count * width].view(count, width) for scratch in self._scratch)
        if width < vocab:
            torch.topk(logits, width, dim=-1, out=(values, tokens))
        else:
            torch.sort(logits, dim=-1, descending=True, stable=True, out=(values, tokens))
        weights.copy_(values)
        # A tiny temperature may overflow the quotient; only differences to the largest logit matter.
        weights.sub_(weights[:, :1].clone()).div_(rows.temperature[:, None]).exp_()
        rank = torch.arange(width)
        weights.masked_fill_((rank >= rows.top_k[:, None]) & (rows.top_k[:, None] > 0), 0.0)
        before = weights.cumsum(dim=-1)
        bound = rows.top_p[:, None].double() * before[:, -1:]
        dropped = (before - weights >= bound) & (rows.top_p[:, None] < 1)
        dropped |= weights < rows.min_p[:, None].double()
        dropped[:, 0] = False
        cumulative = weights.masked_fill_(dropped, 0.0).cumsum_(dim=-1)
        target = uniform(rows.seed, rows.position)[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, target, right=True).clamp_(max=width - 1)
        return tokens.gather(1, drawn)[:, 0]
