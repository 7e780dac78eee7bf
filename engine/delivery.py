"""What the scheduler owes to the requests' owners: tokens, log probabilities, and one end for every request."""

from engine.messages import Finished, FinishReason, Logprobs
from engine.request import Request
from engine.scheduling import Counters, Effects


class Deliveries:
    """Collects effects until they are taken. A request that has ended gets nothing more: what comes is surplus."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._effects = Effects()

    def take(self) -> Effects:
        """Everything since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects

    def admit(self, request: Request) -> None:
        """Tell how much of its prompt the prefix cache had, as long as its owner has not heard of it otherwise."""
        if request.cached_tokens:
            self._effects.cached[request.key] = request.cached_tokens

    def token(self, request: Request, token: int, logprobs: Logprobs | None) -> None:
        """The next output token; it may be the last one."""
        if request.ended:
            return
        request.tokens.append(token)
        self._counters.generated_tokens += 1
        self._effects.keys.append(request.key)
        self._effects.tokens.append(token)
        if logprobs is not None:
            _extend(self._effects.logprobs, request.key, logprobs)
        if token in request.stop_token_ids:
            self.finish(request, "stop")
        elif request.outputs == request.max_tokens:
            self.finish(request, "length")

    def prompt_logprobs(self, request: Request, start: int, scored: Logprobs) -> None:
        """Log probabilities of the prompt's tokens from position `start + 1` on; those that are known already, from
        before a preemption, are dropped.
        """
        if request.ended:
            return
        fresh = scored.behind(request.prompt_scored - start)
        request.prompt_scored += fresh.tokens
        if fresh.tokens:
            _extend(self._effects.prompt_logprobs, request.key, fresh)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        message: str = "",
        *,
        refused: bool = False,
        retryable: bool = False,
    ) -> None:
        """The end of a request that has not ended."""
        request.ended = True
        self._effects.finished.append(
            Finished(
                request.key,
                reason,
                request.prompt_tokens,
                request.outputs,
                request.cached_tokens,
                message,
                refused,
                retryable,
            )
        )


def _extend(logprobs: dict[int, Logprobs], key: int, later: Logprobs) -> None:
    logprobs[key] = logprobs[key].joined(later) if key in logprobs else later
