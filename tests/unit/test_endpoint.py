"""The worker's end of the socket: who may connect to it, what is left of it, and that no wake-up is lost."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
import zmq

from worker.endpoint import Endpoint

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")
CONNECT = "import sys, zmq; s = zmq.Context().socket(zmq.PAIR); s.connect(sys.argv[1]); s.send(b'intruder'); s.recv()"


@pytest.fixture(scope="module")
def event_loop_policy():
    """The loop that serves in production: its readers are not asyncio's."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
def taken() -> list[bytes]:
    return []


@pytest.fixture
def endpoint(taken) -> Iterator[Endpoint]:
    endpoint = Endpoint(taken.append)
    yield endpoint
    endpoint._remove_directory()  # what a failed test leaves


async def until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


def connected(address: str) -> "zmq.Socket[bytes]":
    """The core's end, in this process."""
    core = zmq.Context().socket(zmq.PAIR)
    core.connect(address)
    return core


@pytest.fixture
def intruder(endpoint) -> Iterator[None]:
    """Another process of the same user, which knows the path and goes on trying to connect."""
    process = subprocess.Popen([sys.executable, "-c", CONNECT, endpoint.address])
    yield
    process.kill()
    process.wait()


@pytest.mark.usefixtures("intruder")
async def test_another_process_of_the_same_user_is_refused_and_logged_once(endpoint, taken, caplog):
    endpoint.listen(os.getpid())
    try:
        await until(lambda: "refused" in caplog.text)
        core = connected(endpoint.address)
        core.send(b"core")
        await until(lambda: taken)
        await asyncio.sleep(0.3)  # the intruder goes on trying
        assert taken == [b"core"]
        assert caplog.text.count("refused") == 1
        assert f"only process {os.getpid()} may use it" in caplog.text
        endpoint.send(b"to the core")
        assert core.poll(5000)
        assert core.recv() == b"to the core"
        core.context.destroy(linger=0)
    finally:
        endpoint.close()


async def test_nobody_can_connect_once_the_core_has(endpoint):
    endpoint.listen(os.getpid())
    core = connected(endpoint.address)
    endpoint.send(b"start")
    await until(lambda: not Path(endpoint.address.removeprefix("ipc://")).parent.exists())
    assert core.recv() == b"start"
    core.context.destroy(linger=0)
    endpoint.close()
    endpoint.close()


async def test_a_core_that_comes_before_the_worker_listens_is_let_in_later(endpoint, taken):
    core = connected(endpoint.address)
    core.send(b"early")
    await asyncio.sleep(0.2)
    endpoint.listen(os.getpid())
    await until(lambda: taken == [b"early"])
    core.context.destroy(linger=0)
    endpoint.close()


async def test_a_core_that_connects_between_send_and_receive_still_gets_its_start(endpoint):
    """The receive takes the core's arrival in and uses up the descriptor's edge; nothing else would tell of it."""
    core = zmq.Context().socket(zmq.PAIR)

    class Between:
        """The worker's socket; the core connects at the first receive."""

        def __init__(self, socket, address):
            self.socket, self.address = socket, address

        def recv(self, flags):
            if self.address:
                core.connect(self.address)
                self.address = ""
                time.sleep(0.2)
            return self.socket.recv(flags)

        def __getattr__(self, name):
            return getattr(self.socket, name)

    endpoint.listen(os.getpid())
    endpoint._socket = Between(endpoint._socket, endpoint.address)
    endpoint.send(b"start")
    try:
        await until(lambda: core.poll(0), 1.0)
    finally:
        endpoint.close()
        core.context.destroy(linger=0)
