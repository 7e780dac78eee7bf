"""Log probabilities of tokens under the model's own distribution: log_softmax of its logits, in float32.

Before penalties, temperature and filters: the same numbers whatever the sampling, so that two requests compare, and
those that `transformers` gives for the same tokens.
"""

import torch
from torch import Tensor

from engine.messages import Logprobs
from engine.sampling import DRAW_ROWS, Buffers


class LogprobReader:
    """Reads log probabilities from rows of logits. Its scratch is the sampler's, which is idle meanwhile."""

    def __init__(self, buffers: Buffers) -> None:
        self._weights = buffers.take("draw_logits")

    def read(self, logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
        """Of `tokens` (int64 `[rows]`) under `logits` (float32 `[rows, vocab]`), and of each row's `top` likeliest.

        A `top` beyond the vocabulary is the whole of it.
        """
        top = min(top, logits.shape[1])
        own, ids, values = [], [], []
        for begin in range(0, len(tokens), DRAW_ROWS):
            rows = logits[begin : begin + DRAW_ROWS]
            total = self._log_total(rows)
            own.append(rows.gather(1, tokens[begin : begin + DRAW_ROWS, None]) - total)
            if top:
                best = rows.topk(top, dim=-1)
                ids.append(best.indices.int())
                values.append(best.values - total)
        return Logprobs(_packed(own), _packed(ids), _packed(values))

    def _log_total(self, logits: Tensor) -> Tensor:
        """log(sum(exp(logits))) of each row, float32 `[rows, 1]`; the sum runs in float64."""
        weights = self._weights[: len(logits)]
        largest = logits.amax(dim=-1, keepdim=True)
        torch.sub(logits, largest, out=weights)
        return largest + weights.exp_().sum(dim=-1, keepdim=True, dtype=torch.float64).log().float()


def _packed(parts: list[Tensor]) -> bytes:
    return b"".join(part.numpy().tobytes() for part in parts)
