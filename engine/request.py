"""A live request as the scheduler sees it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.messages import Sampling, Submit
from engine.step import Chunk, RowContext
from kv.hashing import split_digests

MAX_CLASS = 16
"""Classes reach from -MAX_CLASS to MAX_CLASS."""


def priority_class(priority: int) -> int:
    """The class of a priority (higher goes first, as in Dynamo's API); one beyond the ends is taken as the end."""
    return max(-MAX_CLASS, min(MAX_CLASS, priority))


class State(Enum):
    """Where a live request stands. A request that has ended and left its row is no longer live."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    ACTIVE = "active"
    DRAINING = "draining"


def _expected_tokens(submit: Submit, prompt_tokens: int) -> int:
    hint = submit.expected_output_tokens
    return 0 if hint is None else prompt_tokens + min(max(hint, 0), submit.max_tokens)


@dataclass(slots=True, eq=False)
class Request:
    """One request from submission until its last page has returned.

    Two counts run apart while steps are in flight: `planned` (and `outputs_planned`) follow what has been launched,
    `written` and `tokens` what has been resolved.
    """

    key: int
    request_id: str
    tokens: "array[int]"
    """Prompt and, behind it, every output token that has been delivered."""
    prompt_tokens: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Sampling
    cache_salt: str | None
    digests: list[bytes]
    """Block hashes of the full blocks known so far: the prompt's from the start, later ones as they are sealed."""
    arrival: float
    """Time of submission, in the scheduler's clock (seconds)."""
    order: int
    """Submission number: the smaller, the older."""
    priority_class: int = 0
    """Higher goes first."""

    state: State = State.WAITING
    row: int = -1
    pages: list[int] = field(default_factory=list)
    target: int = 0
    """Tokens to compute before the first (or, after a preemption, the next) sample."""
    planned: int = 0
    """Tokens whose KV is written once every launched step has run."""
    written: int = 0
    """Tokens whose KV is written by resolved steps."""
    sealed: int = 0
    """Blocks offered to the prefix index so far."""
    outputs_planned: int = 0
    in_flight: int = 0
    """Launched, unresolved steps that use this request's row."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at the first admission."""
    preemptions: int = 0
    expected_tokens: int = 0
    """Tokens, prompt included, that the client expects it to reach: never above prompt + max_tokens; 0 for no guess."""
    prompt_scored: int = 0
    """Prompt tokens, from the second on, whose log probabilities have been delivered."""
    lost: int = 0
    """Tokens whose KV was written when it was last preempted; what the cache still has of them is found again."""
    bypassed: int = 0
    """Requests behind this one that were admitted while it did not fit."""
    blocked_in: tuple[int, int, int, bool] | None = None
    """State in which it was last found not to fit (pages that nobody waits for, blocks stored so far, admissions so
    far, rows empty): as long as that is the same, so is the answer. Hit pages become referenced, and so cheaper, only
    by an admission.
    """
    promised: int = 0
    """Pages reserved for this request and not yet allocated."""
    protected: bool = False
    """True while the whole lifetime is reserved: such a request is never preempted."""
    ended: bool = False
    """True once the terminal effect was emitted; tokens that still arrive are surplus."""
    malformed: str = ""
    """Why prompt or block hashes could not be read; such a request is never served. Empty for every other."""
    poisoned: bool = False
    """True once a step that used this request has failed: what its pages hold is unknown and must not be shared."""

    @classmethod
    def from_submit(cls, submit: Submit, digest_size: int, arrival: float, order: int) -> "Request":
        """Build the live request from what crossed the socket; bytes of a wrong length make it `malformed`."""
        tokens: array[int] = array("i")
        digests: list[bytes] = []
        malformed = ""
        try:
            digests = split_digests(submit.block_hashes, digest_size)
            tokens.frombytes(submit.prompt)
        except ValueError as error:
            malformed = f"prompt ({len(submit.prompt)} bytes) and block hashes cannot be read: {error}"
        return cls(
            key=submit.key,
            request_id=submit.request_id,
            tokens=tokens,
            prompt_tokens=len(tokens),
            max_tokens=submit.max_tokens,
            stop_token_ids=frozenset(submit.stop_token_ids),
            sampling=submit.sampling,
            cache_salt=submit.cache_salt,
            digests=digests,
            arrival=arrival,
            order=order,
            priority_class=priority_class(submit.priority),
            expected_tokens=_expected_tokens(submit, len(tokens)),
            malformed=malformed,
        )

    @property
    def outputs(self) -> int:
        """Output tokens delivered so far."""
        return len(self.tokens) - self.prompt_tokens

    def expected_pages(self, page_size: int) -> int:
        """Pages that it holds when it has become as long as its client expects; 0 if the client has not said."""
        return -(-(self.expected_tokens - 1) // page_size) if self.expected_tokens else 0

    @property
    def scores_prompt(self) -> bool:
        """True while log probabilities of its prompt are still to come, for which the whole prompt is computed."""
        return self.sampling.prompt_logprobs is not None and self.prompt_scored < self.prompt_tokens - 1

    def chunk(self, start: int, end: int) -> Chunk:
        """The chunk of positions `start` to `end - 1`."""
        targets: Sequence[int] = ()
        if self.scores_prompt:
            targets = self.tokens[start + 1 : min(end + 1, self.prompt_tokens)]
        top = self.sampling.prompt_logprobs or 0
        return Chunk(self.row, start, self.tokens[start:end], end == self.target, targets, top)

    def row_context(self) -> RowContext | None:
        """What the row that it enters must know for penalties and `min_tokens`; None if it asks for neither."""
        sampling = self.sampling
        suppresses = self.outputs < sampling.min_tokens and self.stop_token_ids
        if not (sampling.penalizes or suppresses):
            return None
        known = len(self.tokens) if sampling.penalizes else 0
        return RowContext(
            self.tokens[: min(known, self.prompt_tokens)],
            self.tokens[self.prompt_tokens : known],
            tuple(self.stop_token_ids) if suppresses else (),
            self.prompt_tokens + sampling.min_tokens if suppresses else 0,
        )
