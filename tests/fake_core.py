"""A deterministic engine core for tests of the worker: speaks `engine.messages`, computes nothing, imports no torch.

Started like the real one, with the socket's address as the last argument: `python fake_core.py [options] ADDRESS`. The
i-th output token of a request is `(last prompt token + 1 + i) % VOCAB_SIZE`. Full blocks of prompts stay cached.
"""

import argparse
import os
import sys
import time
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq

from engine.config import CoreConfig
from engine.messages import (
    Drain,
    Failed,
    Finished,
    Heartbeat,
    Ready,
    Requests,
    Start,
    Stats,
    StepOutput,
    Stop,
    Submit,
    ToCore,
)
from kv.events import Removed, Stored
from kv.hashing import Blake2bHasher, event_hash, split_digests

VOCAB_SIZE = 1000
USABLE_PAGES = 256


@dataclass
class Row:
    submit: Submit
    cached: int
    sent: int = 0

    @property
    def prompt(self) -> np.ndarray:
        return np.frombuffer(self.submit.prompt, dtype="<i4")

    def next_token(self) -> int:
        return (int(self.prompt[-1]) + 1 + self.sent) % VOCAB_SIZE

    def finished(self, reason: str) -> Finished:
        return Finished(self.submit.key, reason, len(self.prompt), self.sent, self.cached)


class FakeCore:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.socket = zmq.Context().socket(zmq.PAIR)
        self.socket.connect(options.address)
        self.decoder = msgspec.msgpack.Decoder(ToCore)
        self.encoder = msgspec.msgpack.Encoder()
        self.waiting: deque[Submit] = deque()
        self.active: dict[int, Row] = {}
        self.known: set[bytes] = set()
        self.steps = 0
        self.messages = 0
        self.last_step = time.monotonic()
        self.counts = dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens", "refused_queue_full"), 0)

    def send(self, message: object) -> None:
        self.socket.send(self.encoder.encode(message))

    def receive(self, timeout_s: float) -> list[Start | Requests | Stop]:
        messages = []
        if self.socket.poll(int(timeout_s * 1000)):
            while self.socket.poll(0):
                messages.append(self.decoder.decode(self.socket.recv()))
        return messages

    def start(self) -> CoreConfig:
        (message,) = self.receive(10.0)
        config = message.config
        time.sleep(self.options.load_s)
        if self.options.exit_at_start is not None:
            sys.exit(self.options.exit_at_start)
        if self.options.fail_start is not None:
            self.send(Failed(self.options.fail_start))
            time.sleep(0.1)
            sys.exit(1)
        self.page_size = config.kv_page_size
        hasher = Blake2bHasher(self.page_size)
        self.digest_size = hasher.digest_size
        length = min(config.context_limit or 4096, USABLE_PAGES * self.page_size)
        self.send(
            Ready(
                usable_pages=USABLE_PAGES,
                page_size=self.page_size,
                servable_length=length,
                hasher=self.options.hasher or hasher.fingerprint,
                vocab_size=VOCAB_SIZE,
                load_line=f"KV cache (fake): {USABLE_PAGES} pages of {self.page_size} tokens",
                memory={"weights": 1, "kv_pool": 2},
                seconds={"load": 0.5},
            )
        )
        return config

    def stats(self) -> Stats:
        pages = sum(-(-(len(row.prompt) + row.sent) // self.page_size) for row in self.active.values())
        return Stats(
            waiting=len(self.waiting),
            active=len(self.active),
            free_pages=USABLE_PAGES - pages,
            referenced_pages=pages,
            decode_steps=self.steps,
            unified_steps=self.messages,  # so that tests can count them
            stored_blocks=len(self.known),
            **self.counts,
        )

    def run(self, config: CoreConfig) -> int:
        while True:
            for message in self.receive(0.0 if self.active or self.waiting else 0.05):
                if isinstance(message, Stop):
                    return 0
                if isinstance(message, Drain):
                    self.drain()
                    continue
                self.take(message, config)
            if self.waiting or self.active:
                self.step(config)
            else:
                self.beat()  # the wait for messages sets the pace
            if os.getppid() == 1:
                return 0

    def beat(self) -> None:
        self.send(Heartbeat(self.stats(), time.monotonic() - self.last_step))

    def take(self, requests: Requests, config: CoreConfig) -> None:
        self.messages += 1
        refused = []
        for submit in requests.submits:
            if len(self.waiting) >= config.max_queue:
                self.counts["refused_queue_full"] += 1
                refused.append(Finished(submit.key, "error", 0, 0, 0, "the queue is full", True))
            else:
                self.waiting.append(submit)
        finished = refused
        for key in requests.cancels:
            row = self.active.pop(key, None)
            waiting = [submit for submit in self.waiting if submit.key == key]
            for submit in waiting:
                self.waiting.remove(submit)
                row = Row(submit, 0)
            if row is not None:
                finished.append(row.finished("cancelled"))
        if finished:
            self.send(StepOutput([], b"", finished, [], self.stats()))

    def drain(self) -> None:
        ends = [Finished(s.key, "error", 0, 0, 0, "this worker admits no more", True) for s in self.waiting]
        self.waiting.clear()
        self.send(StepOutput([], b"", ends, [], self.stats()))

    def step(self, config: CoreConfig) -> None:
        self.misbehave()
        if self.options.beat_in_step:
            self.beat()
        time.sleep(self.options.step_s)
        events: list[Stored | Removed] = []
        cached: dict[int, int] = {}
        while self.waiting and len(self.active) < config.max_bucket:
            submit = self.waiting.popleft()
            row = self.active[submit.key] = Row(submit, self.admit(submit, events))
            if row.cached:
                cached[submit.key] = row.cached
        keys, tokens, finished = [], [], []
        for key, row in list(self.active.items()):
            token = row.next_token()
            row.sent += 1
            keys.append(key)
            tokens.append(token)
            if token == self.options.error_token:
                finished.append(Finished(key, "error", 0, 0, 0, "the step failed", retryable=self.options.retryable))
            elif token in row.submit.stop_token_ids:
                finished.append(row.finished("stop"))
            elif row.sent == row.submit.max_tokens:
                finished.append(row.finished("length"))
        for end in finished:
            del self.active[end.key]
        self.steps += 1
        self.counts["generated_tokens"] += len(tokens)
        self.last_step = time.monotonic()
        self.send(StepOutput(keys, np.array(tokens, dtype="<i4").tobytes(), finished, events, self.stats(), cached))

    def admit(self, submit: Submit, events: list[Stored | Removed]) -> int:
        digests = split_digests(submit.block_hashes, self.digest_size)
        hits = next((i for i, digest in enumerate(digests) if digest not in self.known), len(digests))
        prompt_tokens = len(submit.prompt) // 4
        cached = min(hits * self.page_size, (prompt_tokens - 1) // self.page_size * self.page_size)
        self.counts["prompt_tokens"] += prompt_tokens
        self.counts["cached_tokens"] += cached
        new = digests[hits:]
        if new:
            block = self.page_size * 4
            parent = event_hash(digests[hits - 1]) if hits else None
            blocks = submit.prompt[hits * block : len(digests) * block]
            events.append(Stored([event_hash(digest) for digest in new], parent, blocks, submit.cache_salt))
            self.known.update(new)
        return cached

    def misbehave(self) -> None:
        if self.steps == self.options.garbage_after:
            self.socket.send(b"\xc1 no message")
        if self.steps == self.options.die_after:
            os._exit(9)
        if self.steps == self.options.wedge_after:
            time.sleep(3600)
        while self.steps == self.options.stall_after:
            time.sleep(0.05)
            self.beat()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds a step takes")
    parser.add_argument("--beat-in-step", action="store_true", help="send a heartbeat at the start of each step")
    parser.add_argument("--fail-start", help="answer Start with Failed and this reason")
    parser.add_argument("--exit-at-start", type=int, help="end with this code instead of answering Start")
    parser.add_argument("--hasher", help="claim this block hasher")
    parser.add_argument("--die-after", type=int, help="end with code 9 after so many steps")
    parser.add_argument("--wedge-after", type=int, help="fall silent after so many steps")
    parser.add_argument("--stall-after", type=int, help="after so many steps, beat but make no more")
    parser.add_argument("--load-s", type=float, default=0.0, help="seconds between Start and Ready")
    parser.add_argument("--retryable", action="store_true", help="a request that fails may be tried elsewhere")
    parser.add_argument("--garbage-after", type=int, help="after so many steps, send bytes that are no message")
    parser.add_argument("--error-token", type=int, help="a request that would get this token fails")
    parser.add_argument("address")
    core = FakeCore(parser.parse_args())
    return core.run(core.start())


if __name__ == "__main__":
    sys.exit(main())
