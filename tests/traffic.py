"""Traffic against a scheduler in virtual time: no device, only what a step costs. For thrash, fairness, pictures.

The step costs are those of Qwen3-4B on one H200 (bf16, context 1088, FlashInfer's wrappers in a CUDA graph, measured on
2026-11-30): 3.6, 4.2, 6.2 and 14.7 ms at 1, 16, 64 and 256 rows; prompts run at about 70,000 tokens a second.
"""

import hashlib
import heapq
import random
from array import array
from collections import deque
from dataclasses import dataclass, field

from engine.chunking import StepCosts
from engine.messages import Sampling, Submit
from engine.scheduler import Scheduler
from engine.scheduling import SchedulerConfig
from engine.step import StepPlan, StepResult
from kv.budget import KvCapacity
from kv.hashing import Blake2bHasher
from kv.pool import PagePool

_TOKENS = (0, 256, 1024, 2048)
_DECODE_S = {0: 0.0, 1: 0.0036, 16: 0.0042, 64: 0.0062, 256: 0.0147}
H200_COSTS = StepCosts(
    tuple(_DECODE_S),
    _TOKENS,
    tuple(tuple(max(decode, 0.0036 if tokens else 0.0) + tokens / 70_000 for tokens in _TOKENS)
          for decode in _DECODE_S.values()),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace."""

    time: float
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    family: int = 0
    """Requests of one family share their first 64 tokens; 0 shares with nobody."""


@dataclass(slots=True)
class Sample:
    """The lane after one step."""

    time: float
    active: int
    prefilling: int
    waiting: int
    used_pages: int
    chunk_tokens: int
    preemptions: int


@dataclass
class Run:
    """What a trace gave."""

    samples: list[Sample] = field(default_factory=list)
    sent: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    """When each token of a request came, by its place in the trace."""
    ended: dict[int, float] = field(default_factory=dict)
    decisions: str = ""
    """Digest of every step plan: two runs that decided alike have the same."""
    scheduler: Scheduler | None = None

    @property
    def seconds(self) -> float:
        return self.samples[-1].time

    @property
    def first_token(self) -> dict[int, float]:
        return {key: times[0] for key, times in self.tokens.items()}

    @property
    def useful_share(self) -> float:
        """Tokens computed once over all tokens computed."""
        counters = self.scheduler.counters
        return 1 - counters.recomputed_tokens / counters.computed_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.scheduler.counters.generated_tokens / self.seconds


class Traffic:
    """Feeds a trace of arrivals to a scheduler; a step ends when its cost has passed."""

    def __init__(self, config: SchedulerConfig, usable_pages: int, costs: StepCosts = H200_COSTS) -> None:
        self.config = config
        self.costs = costs
        self.hasher = Blake2bHasher(config.page_size)
        self.scheduler = Scheduler(config, PagePool(KvCapacity(usable_pages, config.page_size)), self.hasher)
        self.result = Run(scheduler=self.scheduler)
        self._digest = hashlib.blake2b(digest_size=16)
        self._clock = 0.0
        self._pending: list[tuple[float, int]] = []
        self._next: dict[int, tuple[float, int]] = {}
        """By request: what its user sends afterwards, and how much later."""

    def run_users(self, users: list[list[Arrival]]) -> Run:
        """Every user sends their next request so long after their last one has ended as its `time` says."""
        arrivals = [arrival for own in users for arrival in own]
        key = 0
        for own in users:
            self._pending.append((own[0].time, key))
            for arrival in own[1:]:
                self._next[key] = (arrival.time, key + 1)
                key += 1
            key += 1
        return self._play(arrivals)

    def run(self, arrivals: list[Arrival]) -> Run:
        """Play the trace to its end."""
        self._pending = [(arrival.time, key) for key, arrival in enumerate(arrivals)]
        return self._play(arrivals)

    def _play(self, arrivals: list[Arrival]) -> Run:
        pending = self._pending
        heapq.heapify(pending)
        flying: deque[tuple[float, StepPlan]] = deque()
        busy_until = 0.0
        while True:
            while pending and pending[0][0] <= self._clock:
                key = heapq.heappop(pending)[1]
                self.result.sent[key] = self._clock
                self.scheduler.submit(self._submit(key, arrivals[key]), self._clock)
            plan = self.scheduler.plan(self._clock)
            if plan is not None:
                self._note(plan)
                chunk_tokens = plan.tokens - len(plan.decode_rows)
                busy_until = max(busy_until, self._clock) + self.costs.of(len(plan.decode_rows), chunk_tokens)
                flying.append((busy_until, plan))
                if len(flying) < self.config.max_in_flight:
                    continue
            if flying:
                self._resolve(*flying.popleft())
            elif pending:
                self._clock = pending[0][0]
            else:
                break
        self.result.decisions = self._digest.hexdigest()
        return self.result

    def _submit(self, key: int, arrival: Arrival) -> Submit:
        rng = random.Random(f"{arrival.family or key} of {bool(arrival.family)}")
        shared = [rng.randrange(1000) for _ in range(64)]
        own = random.Random(key)
        tokens = array(
            "i", (shared + [own.randrange(1000) for _ in range(arrival.prompt_tokens)])[: arrival.prompt_tokens]
        )
        packed = tokens.tobytes()
        hashes = b"".join(self.hasher.chain(packed))
        return Submit(key, f"r{key}", packed, hashes, arrival.max_tokens, (), Sampling(), priority=arrival.priority)

    def _note(self, plan: StepPlan) -> None:
        chunks = [(chunk.row, chunk.start, len(chunk.tokens)) for chunk in plan.chunks]
        self._digest.update(repr((plan.decode_rows, plan.decode_lengths, chunks, plan.table)).encode())

    def _resolve(self, ends: float, plan: StepPlan) -> None:
        self._clock = max(self._clock, ends)
        effects = self.scheduler.resolve(StepResult([7] * len(plan.sampled_rows)))
        for key in effects.keys:
            self.result.tokens.setdefault(key, []).append(self._clock)
        for finished in effects.finished:
            self.result.ended[finished.key] = self._clock
            if finished.key in self._next:
                later, key = self._next[finished.key]
                heapq.heappush(self._pending, (self._clock + later, key))
        rows, pool = self.scheduler.rows, self.scheduler.pool
        self.result.samples.append(
            Sample(
                self._clock,
                len(rows.active),
                len(rows.prefilling),
                len(self.scheduler.waiting),
                pool.referenced_pages,
                plan.tokens - len(plan.decode_rows),
                self.scheduler.counters.preemptions,
            )
        )


def poisson(rate: float, count: int, seed: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Arrival]:
    """`count` arrivals at `rate` a second, prompt and output lengths uniform over the ranges."""
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, rng.randint(*prompt), rng.randint(*output)))
    return arrivals
