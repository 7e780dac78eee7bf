"""A live request as the scheduler sees it."""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from engine.messages import Sampling, Submit
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
    lost: int = 0
    """Tokens whose KV was written when it was last preempted; what the cache still has of them is found again."""
    bypassed: int = 0
    """Requests behind this one that were admitted while it did not fit."""
    blocked_in: tuple[int, int, int, bool] | None = None
    """State in which it was last found not to fit (unpromised pages, blocks stored so far, admissions so far, rows
    empty): as long as that is the same, so is the answer. Hit pages become referenced, and so cheaper, only by an
    admission.
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
            malformed=malformed,
        )

    @property
    def outputs(self) -> int:
        """Output tokens delivered so far."""
        return len(self.tokens) - self.prompt_tokens
