"""One request between its submission to the core and the last chunk that its consumer takes."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo.llm.exceptions import CannotConnect, EngineShutdown, Unknown

from engine.messages import Finished, Logprobs, Submit
from worker.chunks import Chunk, final_chunk, prompt_logprobs, token_chunk, usage
from worker.metrics import RequestMetrics
from worker.stream import Stream

logger = logging.getLogger("pagelane")


@dataclass(slots=True, eq=False)
class Running:
    """A request that the core works on."""

    submit: Submit
    context: Any
    stream: Stream
    observed: RequestMetrics
    clock: Callable[[], float]
    last: float
    """When its last chunk left, at first when it arrived."""
    ended: bool = False

    def next_chunk(self, tokens: list[int], *, draining: bool) -> Chunk | None:
        """The chunk for new `tokens`, terminal if the request has ended. Raises if it ended badly."""
        if tokens:
            self._observe(len(tokens))
        end = self._ending(draining)
        if end is None:
            return self._token_chunk(tokens) if tokens else None
        self.end(end.reason)
        return final_chunk(tokens, end, self.stream.take_logprobs())

    async def with_prompt_logprobs(self, chunk: Chunk) -> Chunk:
        """The last chunk with what was asked for about the prompt, unless it has ended before it was computed.

        In a thread: a prompt of 32k tokens with 20 likeliest each takes Python 0.8 s; other streams go on meanwhile.
        """
        submit, scored = self.submit, self.stream.prompt_logprobs or Logprobs(b"")
        asked = self.ended and submit.sampling.prompt_logprobs is not None
        if asked and scored.tokens == len(submit.prompt) // 4 - 1:
            entries = await asyncio.to_thread(prompt_logprobs, submit.prompt, scored)
            chunk["engine_data"] = {"prompt_logprobs": entries}
        return chunk

    def end(self, reason: str) -> None:
        """Count the request's end; only the first time, so that each request has one reason."""
        if not self.ended:
            self.ended = True
            self.observed.finished.labels(reason).inc()

    def _observe(self, count: int) -> None:
        now = self.clock()
        if self.stream.delivered == count:
            self.observed.time_to_first_token.observe(now - self.last)
        else:
            self.observed.inter_token_latency.observe((now - self.last) / count)
        self.last = now

    def _ending(self, draining: bool) -> Finished | None:
        """How the request ended, None if it goes on."""
        end = self.stream.end
        if self.stream.error is not None:
            raise EngineShutdown(self.stream.error)
        if end is None:
            gone = self.stream.cancelled or self.context.is_stopped()
            return cancelled(self.submit, self.stream.delivered, self.stream.cached_tokens) if gone else None
        if end.refused and draining:
            self.ended = True
            self.observed.refused.labels("shutdown").inc()
            raise EngineShutdown(end.message)
        if end.refused:
            self.ended = True
            self.observed.refused.labels("capacity").inc()
            logger.warning("request %s: refused: %s", self.submit.request_id, end.message)
            raise CannotConnect(end.message)
        if end.reason == "error":
            logger.error("request %s: %s", self.submit.request_id, end.message)
            if end.retryable:
                raise CannotConnect(end.message)
            raise Unknown(end.message)
        return end

    def _token_chunk(self, tokens: list[int]) -> Chunk:
        """The first one says what the request has used, for a client that stops early: a stop string that the frontend
        finds cancels the request, and the last chunk never arrives.
        """
        stream = self.stream
        chunk = token_chunk(tokens, stream.take_logprobs())
        if stream.delivered == len(tokens):
            chunk["completion_usage"] = usage(len(self.submit.prompt) // 4, stream.delivered, stream.cached_tokens)
        return chunk


def cancelled(submit: Submit, delivered: int, cached_tokens: int) -> Finished:
    """The end of a request whose client has gone, after so many tokens."""
    return Finished(submit.key, "cancelled", len(submit.prompt) // 4, delivered, cached_tokens)
