"""What a row's logits undergo before a token is chosen: penalties for tokens that it has, and tokens it may not end in.

Plain numpy on one row, for the CPU lane and as the definition for others. The semantics are vLLM's: the repetition
penalty counts prompt and output (Keskar et al. 2019, CTRL), presence and frequency count the output alone (OpenAI), in
this order; temperature and the filters come after them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.messages import Sampling

Array = NDArray[Any]

_LARGEST = np.finfo(np.float32).max


def penalize(logits: Array, prompt: Array, outputs: Array, sampling: Sampling) -> None:
    """Change `logits` (float32 `[vocab]`, finite) in place for a request with these prompt and output token ids.

    They stay finite: what overflows, with a repetition penalty near zero, is the largest float32.
    """
    repetition = np.float32(sampling.repetition_penalty)
    if repetition != 1.0:
        seen = np.unique(np.concatenate((prompt, outputs)))
        values = logits[seen]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            values = np.where(values > 0, values / repetition, values * repetition)
        logits[seen] = np.clip(values, -_LARGEST, _LARGEST)
    if sampling.frequency_penalty or sampling.presence_penalty:
        produced, counts = np.unique(outputs, return_counts=True)
        values = logits[produced] - np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        logits[produced] = values - np.float32(sampling.presence_penalty)
