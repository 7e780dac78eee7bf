"""What a request must find in the pool before it may enter: pure arithmetic in pages."""

from typing import NamedTuple

import numpy as np

from engine.request import Request
from engine.scheduling import SchedulerConfig
from kv.index import max_hit_blocks
from kv.pool import PagePool


def lifetime_pages(prompt_tokens: int, max_tokens: int, page_size: int) -> int:
    """Most pages that a request ever holds: the last sampled token is never written to the cache."""
    return -(-(prompt_tokens + max_tokens - 1) // page_size)


class Demand(NamedTuple):
    """What a waiting request asks of the pool now."""

    hit: list[int]
    """Pages of its longest cached prefix; at least one token is left to compute."""
    fresh: int
    """Pages that its prompt needs beside the hit."""
    reserved: int
    """Pages to set aside for it, the fresh ones included: its whole lifetime, or 0."""
    growth: int = 0
    """Pages that its output takes beyond its prompt's, as far as its client has said how long it expects it to be."""

    def fits(self, pool: PagePool, promised: int, margin: int) -> bool:
        """True if need <= have.

        need = `reserved`, or `fresh` and `margin` (what is to be left beside its prompt's pages); have = available -
        promised to others - the hit pages that are evictable now, which the request is about to take.
        """
        need = self.reserved or self.fresh + margin
        return need <= pool.available - promised - pool.evictable(self.hit)


def demand(request: Request, pool: PagePool, config: SchedulerConfig) -> Demand:
    """Match the request's prefix and count what it needs. Its lifetime is reserved if the lane reserves every lifetime,
    or if it was preempted `max_preemptions` times: a plain cap on preemptions would deadlock. A request whose prompt's
    log probabilities are asked for takes no hit: they come from computing every token.
    """
    page_size, length = config.page_size, len(request.tokens)
    hit = [] if request.scores_prompt else pool.match(request.digests, max_hit_blocks(length, page_size))
    fresh = -(-length // page_size) - len(hit)
    protected = config.lifetime or request.preemptions >= config.max_preemptions
    reserved = lifetime_pages(request.prompt_tokens, request.max_tokens, page_size) - len(hit) if protected else 0
    return Demand(hit, fresh, reserved, max(0, request.expected_pages(page_size) - len(hit) - fresh))


def never_served(request: Request, config: SchedulerConfig) -> str:
    """Why the lane could never serve this request, with both numbers; empty if it can."""
    prompt, output, limit = request.prompt_tokens, request.max_tokens, config.servable_length
    blocks = prompt // config.page_size
    if request.malformed:
        return request.malformed
    if prompt < 1 or output < 1:
        return f"a request needs a prompt and room for a token, but it has {prompt} and {output} tokens"
    if prompt + output > limit:
        return (
            f"prompt ({prompt} tokens) and max_tokens ({output}) make {prompt + output} tokens, but the servable "
            f"length is {limit}; shorten the prompt or lower max_tokens"
        )
    if len(request.digests) != blocks:
        return f"{len(request.digests)} block hashes came with a prompt of {blocks} full blocks"
    return _outside_vocabulary(request, config.vocab_size)


def _outside_vocabulary(request: Request, vocab_size: int | None) -> str:
    """A token that the model would look up beyond its table, and so fail the step for all that are in it."""
    if vocab_size is None:
        return ""
    ids = np.frombuffer(request.tokens, dtype=np.int32)
    ends = {"the prompt holds token": (int(ids.min()), int(ids.max()))}
    if request.stop_token_ids:
        ends["the stop tokens hold"] = (min(request.stop_token_ids), max(request.stop_token_ids))
    for where, tokens in ends.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                return f"{where} {token}, but the model's vocabulary is 0 to {vocab_size - 1}"
    return ""
