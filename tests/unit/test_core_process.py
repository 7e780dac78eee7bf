"""The engine core as a process: what it answers, and that it never outlives its worker."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from engine.__main__ import serve
from engine.config import CoreConfig
from engine.messages import (
    MAX_MESSAGE_BYTES,
    Dropped,
    Failed,
    FromCore,
    Heartbeat,
    Ready,
    Requests,
    Sampling,
    Start,
    StepOutput,
    Stop,
    Submit,
)
from kv.events import replay
from kv.hashing import Blake2bHasher, pack_tokens, unpack_tokens
from tests.models import tiny_model
from tests.property.messages import EXTREMES

WAIT_MS = 30_000


class Process:
    """A core of its own and the worker's end of its socket."""

    def __init__(self, directory: Path) -> None:
        address = f"ipc://{directory / 'core.sock'}"
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.bind(address)
        self.child = subprocess.Popen([sys.executable, "-m", "engine", address], stderr=subprocess.PIPE, text=True)
        self.decoder = msgspec.msgpack.Decoder(FromCore)

    def send(self, message: object) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromCore:
        assert self.socket.poll(WAIT_MS), "the core is silent"
        return self.decoder.decode(self.socket.recv())

    def steps_until(self, *keys: int) -> list[StepOutput]:
        """Step messages up to the one in which the last of `keys` has ended."""
        missing, outputs = set(keys), []
        while missing:
            message = self.receive()
            if isinstance(message, StepOutput):
                outputs.append(message)
                missing -= {finished.key for finished in message.finished}
        return outputs

    def close(self) -> str:
        self.child.kill()
        _, errors = self.child.communicate()
        self.context.destroy(linger=0)
        return errors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("core") / "tiny")


@pytest.fixture
def core(tmp_path: Path):
    process = Process(tmp_path)
    yield process
    process.close()


def start(core: Process, model: Path, **settings: object) -> Ready:
    config = CoreConfig(model=str(model), **({"kv_cache_memory": "1MiB", "threads": 1} | settings))
    core.send(Start(config))
    message = core.receive()
    assert isinstance(message, Ready), message
    return message


def submit(key: int, prompt: list[int], max_tokens: int = 4) -> Submit:
    packed = pack_tokens(prompt)
    hashes = b"".join(Blake2bHasher(16).chain(packed))
    return Submit(key, f"r{key}", packed, hashes, max_tokens, (), Sampling())


def test_a_core_says_what_it_holds_and_serves_until_it_is_told_to_stop(core, model):
    ready = start(core, model, pipeline_depth=1)
    assert ready.page_size == 16
    assert ready.hasher == Blake2bHasher(16).fingerprint
    assert ready.servable_length == min(2048, ready.usable_pages * 16)
    assert f"{ready.usable_pages} pages of 16 tokens" in ready.load_line
    assert ready.memory["kv_pool"] == pytest.approx(1 << 20, rel=0.05)
    core.send(Requests([submit(1, list(range(10, 50))), submit(2, [11] * 3, 7)], []))
    outputs = core.steps_until(1, 2)
    tokens = {1: [], 2: []}
    for output in outputs:
        for key, token in zip(output.keys, unpack_tokens(output.tokens), strict=True):
            tokens[key].append(token)
    finished = {f.key: f for output in outputs for f in output.finished}
    assert [len(tokens[1]), len(tokens[2])] == [4, 7]
    assert finished[1].reason == finished[2].reason == "length"
    assert (finished[1].prompt_tokens, finished[1].completion_tokens, finished[1].cached_tokens) == (40, 4, 0)
    assert len(replay(event for output in outputs for event in output.events)) == 2
    stats = outputs[-1].stats
    assert (stats.active, stats.draining, stats.referenced_pages, stats.cached_pages) == (0, 0, 0, 2)
    assert stats.stored_blocks == 2
    core.send(Stop())
    assert core.child.wait(10) == 0


def test_a_silent_core_sends_heartbeats(core, model):
    start(core, model)
    first, second = core.receive(), core.receive()
    assert isinstance(first, Heartbeat)
    assert isinstance(second, Heartbeat)
    assert second.last_step_age_s < 1.0  # an idle lane is not a stuck one


def test_a_cancelled_request_ends_and_its_pages_return(core, model):
    start(core, model)
    core.send(Requests([submit(1, [5] * 20, 900)], []))
    core.receive()
    core.send(Requests([], [1]))
    finished = core.steps_until(1)[-1]
    assert finished.finished[0].reason == "cancelled"
    assert finished.stats.referenced_pages == 0


def test_a_core_that_cannot_start_says_why_in_one_line(core, tmp_path):
    core.send(Start(CoreConfig(model=str(tmp_path / "nothing"))))
    message = core.receive()
    assert isinstance(message, Failed)
    assert "\n" not in message.reason
    assert "config.json" in message.reason
    assert core.child.wait(10) == 1


def test_a_stop_right_behind_the_start_ends_the_core_before_it_loads(tmp_path):
    class OneBatch:
        def __init__(self):
            self.sent = []

        def receive(self, timeout_s):
            return [Start(CoreConfig(model=str(tmp_path / "nothing"))), Stop()]

        def send(self, message):
            self.sent.append(message)

    channel = OneBatch()
    assert serve(channel) == 0
    assert channel.sent == []


def test_a_core_waits_out_interrupts_and_terminations_which_are_its_workers_business(core, model):
    start(core, model)
    core.child.send_signal(signal.SIGINT)
    core.child.send_signal(signal.SIGTERM)
    core.send(Requests([submit(1, [5] * 5, 2)], []))
    assert core.steps_until(1)


def test_a_core_drops_what_it_cannot_read_and_serves_on(core, model):
    start(core, model)
    huge = [msgspec.msgpack.encode(bytes(50 << 20)), bytes(MAX_MESSAGE_BYTES + 1)]
    for frame in (*EXTREMES.values(), *huge, msgspec.msgpack.encode(Start(CoreConfig(model="again")))):
        core.socket.send(frame)
    core.send(Requests([submit(7, [5] * 40, 3)], [99, 7**20]))
    dropped = []
    while True:
        message = core.receive()
        if isinstance(message, Dropped):
            dropped.append(message.reason)
        elif isinstance(message, StepOutput) and 7 in {finished.key for finished in message.finished}:
            break
    assert f"it has {MAX_MESSAGE_BYTES + 1} bytes" in dropped[-1]
    assert str(MAX_MESSAGE_BYTES) in dropped[-1].partition("read:")[2]
    assert message.stats.referenced_pages == 0
    core.send(Stop())
    assert core.child.wait(10) == 0


def test_a_core_that_gets_garbage_before_its_start_waits_for_it(core, model):
    for frame in EXTREMES.values():
        core.socket.send(frame)
    core.send(Requests([submit(7, [5])], []))
    core.send(Start(CoreConfig(model=str(model), kv_cache_memory="1MiB", threads=1)))
    message = core.receive()
    while isinstance(message, Dropped):
        message = core.receive()
    assert isinstance(message, Ready)


LARGEST = 3.4e38
ODD_BUT_VALID = [
    {"temperature": LARGEST},
    {"temperature": 5e-324, "top_p": 0.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 2**31 - 1, "top_p": 5e-324, "seed": 2**64 - 1},
    {"temperature": 1.0, "min_p": 1.0, "repetition_penalty": LARGEST},
    {"temperature": LARGEST, "repetition_penalty": 5e-324, "presence_penalty": LARGEST, "frequency_penalty": LARGEST},
    {"presence_penalty": -LARGEST, "frequency_penalty": -LARGEST, "repetition_penalty": LARGEST},
    {"temperature": 1e-40, "presence_penalty": -LARGEST, "frequency_penalty": LARGEST},
    {"min_tokens": 2**63},
    {"logprobs": 2**62},
    {"prompt_logprobs": 2**62, "logprobs": 0},
]
"""Sampling at the ends of what a message may hold; a worker sends far less."""


def test_numbers_at_their_limits_fail_no_one_but_their_own_request(core, model):
    start(core, model)
    odd = [
        msgspec.structs.replace(submit(key, [key + 1] * 20, 5), sampling=Sampling(**sampling), stop_token_ids=(2,))
        for key, sampling in enumerate(ODD_BUT_VALID)
    ]
    strange = msgspec.structs.replace(submit(102, [5]), stop_token_ids=(10**9,), sampling=Sampling(min_tokens=1))
    core.send(Requests([*odd, submit(100, [5] * 40, 8), submit(101, [400], 2), strange], []))
    outputs = core.steps_until(*range(len(odd)), 100, 101, 102)
    finished = {f.key: f for output in outputs for f in output.finished}
    assert finished[100].reason == "length"
    assert [f.message for f in finished.values() if f.reason == "error"] == [
        "the prompt holds token 400, but the model's vocabulary is 0 to 319",
        "the stop tokens hold 1000000000, but the model's vocabulary is 0 to 319",
    ]
    core.send(Requests([submit(200, [6] * 40, 3)], []))
    after = core.steps_until(200)[-1]
    assert after.finished[0].reason == "length"
    assert after.stats.referenced_pages == 0


def ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:")).split()[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_core_dies_with_its_worker(tmp_path):
    """The worker is killed outright: nobody tells the core, and it must not live on."""
    script = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'engine', 'ipc://{tmp_path}/core.sock'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert worker.stdout is not None
    core_pid = int(worker.stdout.readline())
    deadline = time.monotonic() + 20
    while not ignores(core_pid, signal.SIGTERM):  # the core does so once it has asked the kernel to end with its parent
        assert time.monotonic() < deadline, "the core did not start"
        time.sleep(0.02)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    while psutil.pid_exists(core_pid) and time.monotonic() < deadline:
        if psutil.Process(core_pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    assert not psutil.pid_exists(core_pid) or psutil.Process(core_pid).status() == psutil.STATUS_ZOMBIE
