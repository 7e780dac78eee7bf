"""What crosses the socket between worker and engine core: MessagePack, column-wise, one message per step each way.

Requests are named by `key`, a number that the worker gives out once and never reuses; the request's id travels along
only for log lines. Token ids are packed as little-endian int32 bytes.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.config import CoreConfig
from kv.events import Removed, Stored

MAX_MESSAGE_BYTES = 64 << 20
"""Longest message in either direction; a longer one is not read. One step's tokens and events take far less."""
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES // 2
"""Longest `Submit`, and the most that stand in one message together."""

FinishReason = Literal["stop", "length", "cancelled", "error"]


_LARGEST = 3.4e38
"""About the largest float32, in which executors hold these numbers."""
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
NotNegative = Annotated[float, Meta(ge=0, le=_LARGEST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token of a request is chosen. `temperature == 0` is greedy and ignores the rest.

    `top_k == 0`, `top_p == 1` and `min_p == 0` switch each filter off. `seed` is an unsigned 64-bit number; the random
    number of a token depends on it and on the token's position alone, so batch mates, chunking and preemption do not
    change a text.
    """

    temperature: NotNegative = 0.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    seed: Count = 0
    repetition_penalty: Annotated[float, Meta(gt=0, le=_LARGEST)] = 1.0
    """Divides positive logits of tokens that stand in prompt or output, and multiplies negative ones; 1 is off."""
    presence_penalty: Finite = 0.0
    """Subtracted from the logit of every token that stands in the output; 0 is off."""
    frequency_penalty: Finite = 0.0
    """Subtracted from a token's logit once for each time that it stands in the output; 0 is off."""
    min_tokens: Count = 0
    """Output tokens before which none of `Submit.stop_token_ids` is sampled."""
    logprobs: Count | None = None
    """Log probabilities of output tokens: None for none, 0 for the sampled token's, n for the n likeliest ones' too."""
    prompt_logprobs: Count | None = None
    """The same for the prompt's tokens, from its second one on."""

    @property
    def penalizes(self) -> bool:
        """True if the tokens so far change the next one's logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of consecutive tokens under the model's own distribution: before penalties and temperature."""

    own: bytes
    """Of the tokens themselves: float32, one per token."""
    top_ids: bytes = b""
    """int32 `[tokens, n]`: the n likeliest tokens at each place, the likeliest first."""
    top: bytes = b""
    """Their log probabilities: float32 `[tokens, n]`."""

    def joined(self, later: "Logprobs") -> "Logprobs":
        """These, and behind them those of later tokens of the same request."""
        return Logprobs(self.own + later.own, self.top_ids + later.top_ids, self.top + later.top)

    @property
    def tokens(self) -> int:
        """How many tokens these are of."""
        return len(self.own) // 4

    def behind(self, tokens: int) -> "Logprobs":
        """Those of all but the first `tokens` tokens."""
        cut = tokens * (len(self.top_ids) // self.tokens) if self.tokens else 0
        return Logprobs(self.own[4 * tokens :], self.top_ids[cut:], self.top[cut:])


class Submit(msgspec.Struct, frozen=True, array_like=True):
    """A request, checked and defaulted by the worker: prompt + max_tokens lie within the servable length."""

    key: int
    request_id: str
    prompt: bytes
    """Token ids, little-endian int32."""
    block_hashes: bytes
    """Digests of the prompt's full blocks, in order, concatenated (`BlockHasher.digest_size` bytes each)."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Tokens that end the request; the token itself is still delivered."""
    sampling: Sampling
    cache_salt: str | None = None
    priority: int = 0
    expected_output_tokens: int | None = None
    """The client's guess. It may shape admission; it never ends or refuses a request."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message to the core."""

    config: CoreConfig
    recorder: int = -1
    """Inherited descriptor of the memory that the last steps are written to (see `engine.recorder`); -1 for none."""


class Requests(msgspec.Struct, frozen=True, tag="requests"):
    """Everything that happened in the worker since its last message."""

    submits: list[Submit] = []
    cancels: list[int] = []


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The lane admits nothing more: what waits is refused at once, what runs goes on."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The core ends when it reads this. Requests that still run are dropped."""


ToCore = Start | Requests | Drain | Stop


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The core's answer to `Start`, once it can serve."""

    usable_pages: int
    page_size: int
    servable_length: int
    """min(context limit, usable pages x page size), in tokens."""
    hasher: str
    """Fingerprint of the block hasher; the worker's must be the same."""
    vocab_size: int
    load_line: str
    memory: dict[str, int]
    """Bytes by part, as the report shows them."""
    seconds: dict[str, float]
    """Start-up phases."""
    parameters: tuple[str, ...] = ()
    """Optional request parameters that the lane's executor honours (see `engine.step.Executor.parameters`)."""
    step_costs: tuple[tuple[int, int, float], ...] = ()
    """Active rows, prompt tokens and seconds of the steps that were measured; none without `itl_target_ms`."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The core cannot start or go on; it ends after this. `reason` is one line for the operator."""

    reason: str


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request: exactly one for every `Submit`."""

    key: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    message: str = ""
    """For `error`: what happened, for the client. Empty otherwise."""
    refused: bool = False
    """True if the lane did not run the request, or not to its end, for want of room or because it admits no more: queue
    full, too long in the queue, draining."""
    retryable: bool = False
    """True if a step failed: the fault is the lane's as far as anybody knows, and another may serve the request."""


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges and counters of the lane, as of the end of the step. Counters only rise."""

    waiting: int = 0
    prefilling: int = 0
    active: int = 0
    draining: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    referenced_pages: int = 0
    decode_steps: int = 0
    unified_steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests."""
    cached_tokens: int = 0
    """Of those, tokens served from the prefix cache."""
    computed_tokens: int = 0
    """Tokens run through the model, recomputed ones included."""
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens whose KV was lost to preemption and had to be computed again."""
    padding_tokens: int = 0
    """Tokens computed only to fill a batch size, beside `computed_tokens`."""
    bypasses: int = 0
    """Times that a waiting request which did not fit was passed by a later one."""
    stored_blocks: int = 0
    removed_blocks: int = 0
    refused_queue_full: int = 0
    refused_queue_time: int = 0
    queue_age_s: float = 0.0
    """Seconds that the longest-waiting request has waited."""
    decode_step_seconds: float = 0.0
    """Seconds spent in steps of decode rows alone, in total."""
    unified_step_seconds: float = 0.0
    """Seconds spent in steps with chunks, in total."""
    graph_steps: int = 0
    eager_steps: int = 0
    allocations_after_warmup: int = 0
    compilations_after_warmup: int = 0


class StepOutput(msgspec.Struct, frozen=True, tag="step", omit_defaults=True):
    """What one step gave. `tokens[i]` belongs to request `keys[i]`; a request may stand more than once, in order."""

    keys: list[int]
    tokens: bytes
    """Sampled token ids, little-endian int32, one per key."""
    finished: list[Finished]
    events: list[Stored | Removed]
    """Changes of the prefix index, in the order they happened."""
    stats: Stats
    cached: dict[int, int] = {}
    """By key of a request that was admitted since the last message: prompt tokens that the prefix cache had, if any."""
    logprobs: dict[int, Logprobs] = {}
    """By key: log probabilities of its `tokens`, of requests that ask for them."""
    prompt_logprobs: dict[int, Logprobs] = {}
    """By key: log probabilities of further prompt tokens, in order from the second token of the prompt on."""


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent when there is nothing else to say, a few times a second."""

    stats: Stats
    last_step_age_s: float


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The core could not read a message of the worker's and goes on without it."""

    reason: str


FromCore = Dropped | Ready | Failed | StepOutput | Heartbeat
