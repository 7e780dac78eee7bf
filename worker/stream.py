"""What the worker holds of one request's output between the core and the consumer."""

import asyncio
from dataclasses import dataclass, field

from engine.messages import Finished, Logprobs


@dataclass(slots=True, eq=False)
class Stream:
    """What has come for one request and has not been taken yet."""

    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    """Of `tokens`; None if none were asked for."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt's tokens so far, from the second on; they are kept until the end."""
    delivered: int = 0
    """Tokens that have come so far, taken or not."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    end: Finished | None = None
    error: str | None = None
    """Why the core will never finish this request."""
    cancelled: bool = False
    """True once the request was cancelled here; nothing more comes."""
    _waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[int]:
        """Wait until there is something new, and return all tokens that are there. At once if nothing more can come.

        At most one caller may wait.
        """
        if not self.tokens and self.end is None and self.error is None and not self.cancelled:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        tokens, self.tokens = self.tokens, []
        return tokens

    def take_logprobs(self) -> Logprobs | None:
        """Those of the tokens that `take` has just returned; to be called before anything else can come."""
        logprobs, self.logprobs = self.logprobs, None
        return logprobs

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Those of tokens that have just been appended."""
        self.logprobs = self.logprobs.joined(logprobs) if self.logprobs else logprobs

    def add_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Those of further tokens of the prompt."""
        self.prompt_logprobs = self.prompt_logprobs.joined(logprobs) if self.prompt_logprobs else logprobs

    def wake(self) -> None:
        """Let `take` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
