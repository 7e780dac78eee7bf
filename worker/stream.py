"""What the worker holds of one request's output between the core and the consumer."""

import asyncio
from dataclasses import dataclass, field

from engine.messages import Finished


@dataclass(slots=True, eq=False)
class Stream:
    """What has come for one request and has not been taken yet."""

    key: int
    tokens: list[int] = field(default_factory=list)
    delivered: int = 0
    """Tokens that have come so far, taken or not."""
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

    def wake(self) -> None:
        """Let `take` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
