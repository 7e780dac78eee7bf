"""Requests for a lane without a worker: a client that steps it, and a mix of everything that requests may ask for."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import CoreConfig
from engine.lane import Lane
from engine.messages import Finished, Sampling, Submit
from engine.scheduler import Scheduler
from engine.scheduling import Effects, SchedulerConfig
from kv.budget import KvCapacity, servable_length
from kv.hashing import Blake2bHasher, pack_tokens
from kv.pool import PagePool


def on_pool(lane: Lane, config: CoreConfig, vocab: int, tokens: int) -> Lane:
    """A lane on the executor of an idle `lane`, with a pool of its first `tokens` tokens and nothing cached."""
    capacity = KvCapacity(tokens // config.kv_page_size, config.kv_page_size)
    longest = servable_length(lane.scheduler.config.servable_length, capacity)
    limits = SchedulerConfig.of(config, longest, capacity.usable_pages, None, vocab)
    hasher = Blake2bHasher(config.kv_page_size)
    return Lane(Scheduler(limits, PagePool(capacity), hasher), lane.executor, time.perf_counter)


@dataclass
class Client:
    """Sends requests to a lane and steps it. Times are those of the lane's clock, in seconds."""

    lane: Lane
    sent: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    tokens: int = 0
    """Received."""
    _next: int = 1

    def send(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling | None = None) -> int:
        """Submit a request; returns its key."""
        key, self._next = self._next, self._next + 1
        packed = pack_tokens(prompt)
        hashes = b"".join(self.lane.scheduler.hasher.chain(packed))
        now = self.lane.clock()
        self.lane.scheduler.submit(Submit(key, f"r{key}", packed, hashes, max_tokens, (), sampling or Sampling()), now)
        self.sent[key] = now
        return key

    def step(self) -> Effects:
        """One turn of the lane."""
        effects = self.lane.advance()
        self.lane.scheduler.pool.events.drain()
        now = self.lane.clock()
        for key in effects.keys:
            self.first.setdefault(key, now)
        self.tokens += len(effects.keys)
        self.finished.update({one.key: one for one in effects.finished})
        return effects

    @property
    def live(self) -> list[int]:
        """Requests that have not ended."""
        return [key for key in self.sent if key not in self.finished]

    def cancel(self, keys: Sequence[int]) -> None:
        """Cancel requests."""
        for key in keys:
            self.lane.scheduler.cancel(key)

    def drain(self) -> None:
        """Step until nothing is left."""
        while not self.lane.idle:
            self.step()

    def ttft(self, key: int) -> float:
        """Seconds from submission to the first token."""
        return self.first[key] - self.sent[key]


@dataclass(frozen=True, slots=True)
class Mix:
    """A mixed load. Prompts and outputs have lengths drawn evenly up to the longest."""

    vocab: int
    streams: int = 256
    longest_prompt: int = 1500
    longest_output: int = 200
    burst: int = 24
    """Turns between two moments at which ended requests are replaced: in between, steps have no chunks."""
    cancelled: float = 0.02
    """Share of bursts' live requests that are cancelled."""
    seed: int = 11


class MixedLoad:
    """Keeps a lane busy: arrivals, ends, cancellations, shared prefixes, and every way to choose a token."""

    def __init__(self, lane: Lane, mix: Mix) -> None:
        self.client = Client(lane)
        self.mix = mix
        self.turns = self.cancelled = 0
        self._rng = random.Random(mix.seed)
        self._prefixes = [self._draw(min(130, mix.longest_prompt // 2)) for _ in range(4)]

    def turn(self) -> Effects:
        """Replace what has ended, if it is time, and step the lane."""
        if self.turns % self.mix.burst == 0:
            live = self.client.live
            gone = [key for key in live if self._rng.random() < self.mix.cancelled]
            self.client.cancel(gone)
            self.cancelled += len(gone)
            for _ in range(self.mix.streams - len(live)):
                self.client.send(self._prompt(), self._rng.randint(1, self.mix.longest_output), self._sampling())
        self.turns += 1
        return self.client.step()

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self.mix.vocab) for _ in range(count)]

    def _prompt(self) -> list[int]:
        begin = self._rng.choice(self._prefixes) if self._rng.random() < 0.25 else []
        return begin + self._draw(self._rng.randint(1, self.mix.longest_prompt - len(begin)))

    def _sampling(self) -> Sampling:
        seed = self._rng.getrandbits(40)
        return self._rng.choice(
            [
                Sampling(),
                Sampling(),
                Sampling(temperature=1.0, seed=seed),
                Sampling(temperature=0.6, top_p=0.95, top_k=20, seed=seed),
                Sampling(temperature=0.9, top_p=0.2, min_p=0.02, seed=seed),
                Sampling(
                    temperature=0.7, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, seed=seed
                ),
                Sampling(logprobs=3),
                Sampling(temperature=1.0, frequency_penalty=0.3, logprobs=0, seed=seed),
                Sampling(logprobs=1, prompt_logprobs=1),
            ]
        )
