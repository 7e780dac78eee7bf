"""The worker's side of a lane in the test's own process: submits, takes what comes, knows who has ended."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.build import BuiltLane, build_lane
from engine.config import CoreConfig
from engine.lane import Lane
from engine.messages import Finished, Logprobs, Sampling, Submit
from kv.hashing import pack_tokens
from tests import golden


def build(directory: Path, **settings: object) -> BuiltLane:
    """A small CPU lane on one thread."""
    defaults = {"kv_cache_memory": "4MiB", "max_bucket": 8, "max_step_tokens": 256, "threads": 1}
    return build_lane(CoreConfig(model=str(directory), **(defaults | settings)), directory)


@dataclass
class Scores:
    """Log probabilities of one request, unpacked."""

    own: np.ndarray
    ids: np.ndarray
    """int32 `[tokens, n]`."""
    top: np.ndarray
    """float32 `[tokens, n]`."""

    @classmethod
    def of(cls, logprobs: Logprobs) -> "Scores":
        own = np.frombuffer(logprobs.own, np.float32)
        shape = (len(own), -1) if logprobs.top else (len(own), 0)
        ids, top = np.frombuffer(logprobs.top_ids, np.int32), np.frombuffer(logprobs.top, np.float32)
        return cls(own, ids.reshape(shape), top.reshape(shape))


@dataclass
class Owner:
    """Owns every request of `lane`."""

    lane: Lane
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = golden.TOKENS,
        sampling: Sampling | None = None,
        stop: tuple[int, ...] = (),
        **fields: Any,
    ) -> int:
        """Queue a request; returns its key."""
        key = len(self.tokens)
        self.tokens[key] = []
        packed = pack_tokens(prompt)
        hashes = b"".join(self.lane.scheduler.hasher.chain(packed))
        submit = Submit(key, f"r{key}", packed, hashes, max_tokens, stop, sampling or Sampling(), **fields)
        self.lane.scheduler.submit(submit, time.monotonic())
        return key

    def turn(self) -> None:
        """One turn of the lane."""
        effects = self.lane.advance()
        for key, token in zip(effects.keys, effects.tokens, strict=True):
            self.tokens[key].append(token)
        self.finished |= {finished.key: finished for finished in effects.finished}
        self.cached |= effects.cached
        for taken, given in ((self.logprobs, effects.logprobs), (self.prompt_logprobs, effects.prompt_logprobs)):
            for key, logprobs in given.items():
                taken[key] = taken[key].joined(logprobs) if key in taken else logprobs

    def preempt(self, key: int) -> None:
        """Have a request that holds a row give way now, as when pages run out."""
        rows = self.lane.scheduler.rows
        self.lane.scheduler._preempt((rows.prefilling | rows.active)[key])

    def run(self) -> None:
        """Turn until nothing is left to do or to be told."""
        while not self.lane.idle:
            self.turn()
        self.turn()

    def scores(self, key: int) -> Scores:
        """Log probabilities of a request's output."""
        return Scores.of(self.logprobs[key])

    def prompt_scores(self, key: int) -> Scores:
        """Log probabilities of its prompt, from the second token on."""
        return Scores.of(self.prompt_logprobs[key])
