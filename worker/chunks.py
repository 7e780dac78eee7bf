"""Chunks of a response as Dynamo's frontend reads them: pure functions.

The shapes are those of `dynamo.common.backend.engine.GenerateChunk` and `dynamo.common.backend.logprobs`.
"""

import math
from collections.abc import Iterator
from typing import Any

from engine.messages import Finished, Logprobs

Chunk = dict[str, Any]

LEAST_LOGPROB = -1e30
"""Stands for a probability of zero: JSON has no infinity, and the frontend drops all of a chunk's numbers over one."""


def token_chunk(tokens: list[int], logprobs: Logprobs | None = None) -> Chunk:
    """A chunk that carries new tokens, and their log probabilities if there are any, and does not end the stream."""
    chunk: Chunk = {"token_ids": tokens, "index": 0}
    if logprobs is not None:
        chunk["log_probs"] = [_finite(value) for value in memoryview(logprobs.own).cast("f")]
        # Always there: the frontend's chat answers show no log probability at all without a list for each token.
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": None, "logprob": value}
                for rank, (token, value) in enumerate(top, 1)
            ]
            for top in _likeliest(logprobs)
        ]
    return chunk


def final_chunk(tokens: list[int], end: Finished, logprobs: Logprobs | None = None) -> Chunk:
    """The last chunk of a stream: the tokens not yet sent, why it ended, and what it used.

    A stop token is among the tokens, as with vLLM: the frontend leaves it out of the text.
    """
    chunk = token_chunk(tokens, logprobs)
    chunk["finish_reason"] = end.reason
    chunk["completion_usage"] = usage(end.prompt_tokens, end.completion_tokens, end.cached_tokens)
    return chunk


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """What a request has used so far."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def prompt_logprobs(prompt: bytes, logprobs: Logprobs) -> list[dict[str, Any] | None]:
    """What goes into the last chunk's `engine_data`: for each prompt token (int32 bytes) a map from token id, as a
    text, to log probability, its own and the likeliest ones'.

    The first token follows nothing, so it has None.
    """
    entries: list[dict[str, Any] | None] = [None]
    tokens = memoryview(prompt).cast("i")[1:]
    own = memoryview(logprobs.own).cast("f")
    for token, value, top in zip(tokens, own, _likeliest(logprobs), strict=True):
        entry: dict[str, Any] = {str(token): {"logprob": _finite(value)}}
        for rank, (other, likely) in enumerate(top, 1):
            entry[str(other)] = {"logprob": likely, "rank": rank}
        entries.append(entry)
    return entries


def _likeliest(logprobs: Logprobs) -> Iterator[list[tuple[int, float]]]:
    """The likeliest tokens of each place and their log probabilities, the likeliest first."""
    ids, values = memoryview(logprobs.top_ids).cast("i"), memoryview(logprobs.top).cast("f")
    width = len(ids) // logprobs.tokens if logprobs.tokens else 0
    for begin in range(0, logprobs.tokens * width, width) if width else (0,) * logprobs.tokens:
        pairs = zip(ids[begin : begin + width], values[begin : begin + width], strict=True)
        yield [(token, _finite(value)) for token, value in pairs]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB
