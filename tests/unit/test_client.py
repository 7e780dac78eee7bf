"""The worker's end of the socket, against a core process that computes nothing."""

import asyncio
import contextlib
import os
import signal
import stat
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import uvloop

from engine.config import CoreConfig
from engine.messages import Sampling, Submit
from kv.events import Stored
from kv.hashing import Blake2bHasher
from worker.client import ClientConfig, CoreClient, CoreError, Listener

FAKE_CORE = str(Path(__file__).parents[1] / "fake_core.py")
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(scope="module")
def event_loop_policy():
    """The loop that serves in production: its readers are not asyncio's."""
    return uvloop.EventLoopPolicy()


def submit(key: int, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> Submit:
    packed = np.array(prompt, dtype="<i4").tobytes()
    hashes = b"".join(Blake2bHasher(16).chain(packed))
    return Submit(key, f"request-{key}", packed, hashes, max_tokens, (), Sampling())


@contextlib.asynccontextmanager
async def started(*options: str, listener: Listener | None = None, stop_timeout_s: float = 3.0, **core):
    command = (sys.executable, FAKE_CORE, *options)
    config = ClientConfig(CoreConfig(model="m", **core), command, stop_timeout_s=stop_timeout_s)
    client = CoreClient(config, listener or Listener())
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


async def read(stream) -> list[int]:
    tokens = await stream.take()  # all may have come before anybody reads
    while stream.end is None and stream.error is None:
        tokens += await stream.take()
    return tokens


async def until(condition, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_tokens_and_end_of_a_request_come_in_order():
    async with started() as client:
        stream = client.submit(submit(1))
        assert await read(stream) == [4, 5, 6, 7]
        assert (stream.end.reason, stream.end.prompt_tokens, stream.end.completion_tokens) == ("length", 3, 4)
        assert client.running == 0


async def test_many_streams_do_not_mix():
    async with started() as client:
        streams = [client.submit(submit(key, (key,), 1 + key % 7)) for key in range(1, 101)]
        for key, tokens in zip(range(1, 101), await asyncio.gather(*map(read, streams)), strict=True):
            assert tokens == [key + 1 + i for i in range(1 + key % 7)]


async def test_what_is_submitted_in_one_turn_of_the_loop_is_one_message():
    async with started() as client:
        streams = [client.submit(submit(key)) for key in range(50)]
        client.cancel(49)
        await asyncio.gather(*map(read, streams[:49]))
        assert client.stats.unified_steps == 1


async def test_a_stream_that_nobody_read_gives_all_its_tokens_at_once():
    async with started() as client:
        stream = client.submit(submit(1, max_tokens=20))
        await until(lambda: stream.end is not None)
        assert await stream.take() == [(4 + i) for i in range(20)]


async def test_a_cancelled_stream_gets_nothing_more_and_the_core_frees_it():
    async with started("--step-s", "0.01", max_bucket=1) as client:
        active, waiting = client.submit(submit(1, max_tokens=10000)), client.submit(submit(2, max_tokens=10000))
        await active.take()
        client.cancel(2)
        client.cancel(1)
        await until(lambda: client.stats.active == client.stats.waiting == client.stats.referenced_pages == 0)
        assert (active.end, waiting.end, waiting.delivered) == (None, None, 0)
        assert len(await active.take()) <= 1  # what had come before; and then it does not wait for more
        assert await active.take() == []
        client.cancel(1)  # again, and of a key that never was: nothing happens
        client.cancel(999)
        assert await read(client.submit(submit(3))) == [4, 5, 6, 7]


async def test_events_and_stats_reach_the_listener():
    events, stats = [], []
    async with started(listener=Listener(events.extend, stats.append)) as client:
        await read(client.submit(submit(1, tuple(range(40)))))
        assert [type(event) for event in events] == [Stored]
        assert len(events[0].hashes) == 2
        assert events[0].parent is None
        await until(lambda: stats[-1].generated_tokens == 4)  # a heartbeat or the last step


async def test_the_sockets_directory_is_private_and_goes_once_the_core_has_connected(monkeypatch, tmp_path):
    """So that a worker that is killed leaves none behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client = CoreClient(ClientConfig(CoreConfig(model="m"), (sys.executable, FAKE_CORE)), Listener())
    start = asyncio.create_task(client.start())
    try:
        await asyncio.sleep(0)
        (directory,) = tmp_path.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        await start
        assert list(tmp_path.iterdir()) == []
        assert await read(client.submit(submit(1))) == [4, 5, 6, 7]
    finally:
        await client.stop()


@pytest.mark.parametrize("end", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
async def test_a_core_that_dies_before_it_connects_leaves_no_directory(monkeypatch, tmp_path, end):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client = CoreClient(ClientConfig(CoreConfig(model="m"), (sys.executable, "-c", end)), Listener())
    with pytest.raises(CoreError):
        await client.start()
    await client.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["x" * 100, "missing"])
async def test_a_temporary_folder_that_can_hold_no_socket_is_named(monkeypatch, tmp_path, folder):
    if folder != "missing":
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / folder))
    with pytest.raises(CoreError, match="TMPDIR") as refusal:
        async with started():
            pass
    assert folder in str(refusal.value)
    if folder != "missing":
        length = len(str(refusal.value).partition("socket, ")[2].partition(", has")[0])
        assert f"has {length} bytes" in str(refusal.value)
        assert "at most 107" in str(refusal.value)
    assert not list(tmp_path.glob("*/*"))


async def test_a_command_that_is_not_there_is_named():
    client = CoreClient(ClientConfig(CoreConfig(model="m"), ("/no/such/python",)), Listener())
    with pytest.raises(CoreError, match="/no/such/python"):
        await client.start()
    await client.stop()


HANG = ("-c", "import time; time.sleep(60)")
DEAF = ("-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)")


@pytest.mark.parametrize("program", [HANG, DEAF])
async def test_a_core_that_still_loads_is_killed_at_once_and_its_start_ends(program):
    client = CoreClient(ClientConfig(CoreConfig(model="m"), (sys.executable, *program)), Listener())
    start = asyncio.create_task(client.start())
    await asyncio.sleep(0.1)
    pid = client.pid
    early = client.submit(submit(1))
    assert (await early.take(), early.error) == ([], "the engine core is not running")
    async with asyncio.timeout(2):
        await client.stop()
        with pytest.raises(CoreError, match="shuts down"):
            await start
    assert not alive(pid)
    with pytest.raises(CoreError, match="shuts down"):
        await client.start()


async def test_a_request_that_comes_while_the_core_is_stopped_ends_at_once():
    async with started() as client:
        stop = asyncio.create_task(client.stop())
        await asyncio.sleep(0)
        late = client.submit(submit(1))
        assert await asyncio.wait_for(late.take(), 1) == []
        assert "shuts down" in late.error
        await stop


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--fail-start", "no such architecture"), "no such architecture"),
        (("--exit-at-start", "3"), "ended with exit code 3"),
        (("--no-such-option",), "ended with exit code 2"),
    ],
)
async def test_a_core_that_cannot_start_says_why(options, reason):
    with pytest.raises(CoreError, match=reason):
        async with started(*options):
            pass


@pytest.mark.parametrize(("kill", "reason"), [(True, "killed by SIGKILL"), (False, "exit code 9")])
async def test_a_core_that_dies_fails_its_requests_once(kill, reason):
    failures = []
    listener = Listener(failure=failures.append)
    async with started("--step-s", "0.01", *(() if kill else ("--die-after", "3")), listener=listener) as client:
        streams = [client.submit(submit(key, max_tokens=10000)) for key in range(3)]
        await asyncio.gather(*(stream.take() for stream in streams))
        if kill:
            os.kill(client.pid, signal.SIGKILL)
        await asyncio.gather(*map(read, streams))
        assert all(reason in stream.error for stream in streams)
        assert len(failures) == 1
        assert reason in client.failure
        late = client.submit(submit(9))
        assert await late.take() == []
        assert reason in late.error


@pytest.mark.parametrize(
    ("option", "reason"), [("--wedge-after", "has said nothing for"), ("--stall-after", "made no step for")]
)
async def test_a_core_that_makes_no_steps_is_taken_for_wedged(option, reason):
    async with started(option, "2", step_timeout_s=1.0) as client:
        stream = client.submit(submit(1, max_tokens=10000))
        began = time.monotonic()
        await read(stream)
        assert reason in stream.error
        assert time.monotonic() - began > 0.9
        async with asyncio.timeout(2):  # a wedged core reads no `Stop`
            await client.stop()


async def test_a_core_that_sends_garbage_is_lost_and_its_requests_end():
    failures = []
    async with started("--garbage-after", "2", listener=Listener(failure=failures.append)) as client:
        streams = [client.submit(submit(key, max_tokens=10000)) for key in range(3)]
        async with asyncio.timeout(5):
            await asyncio.gather(*map(read, streams))
        assert all("cannot be read" in stream.error for stream in streams)
        assert len(failures) == 1
        pid = client.pid
    assert not alive(pid)


async def test_time_in_which_the_worker_itself_stood_still_is_no_silence_of_the_core():
    suspended = 0.0
    command = (sys.executable, FAKE_CORE)
    config = ClientConfig(CoreConfig(model="m", step_timeout_s=5), command, clock=lambda: time.monotonic() + suspended)
    client = CoreClient(config, Listener())
    try:
        await client.start()
        await asyncio.sleep(0.1)  # it is being watched
        os.kill(client.pid, signal.SIGSTOP)  # it stands still as well, and has sent nothing meanwhile
        suspended = 100.0
        await asyncio.sleep(1.0)
        assert client.failure is None
        os.kill(client.pid, signal.SIGCONT)
        assert await read(client.submit(submit(1))) == [4, 5, 6, 7]
        os.kill(client.pid, signal.SIGSTOP)
        await until(lambda: client.failure is not None, 20)
        assert "has said nothing for" in client.failure
    finally:
        await client.stop()


async def test_an_idle_core_is_not_wedged():
    async with started(step_timeout_s=1.0) as client:
        await asyncio.sleep(1.5)
        assert client.failure is None
        assert await read(client.submit(submit(1))) == [4, 5, 6, 7]


async def test_the_age_of_the_last_step_counts_only_while_there_is_work():
    async with started("--beat-in-step", "--step-s", "0.05", step_timeout_s=1.0) as client:
        await asyncio.sleep(1.2)
        assert await read(client.submit(submit(1))) == [4, 5, 6, 7]
        assert client.failure is None


async def test_a_core_that_does_not_end_is_killed():
    async with started("--wedge-after", "1", stop_timeout_s=0.1) as client:
        await client.submit(submit(1, max_tokens=10000)).take()
        pid = client.pid
        os.kill(pid, signal.SIGSTOP)
    assert not alive(pid)


async def test_stopping_is_possible_at_any_time_and_fails_what_runs():
    client = CoreClient(ClientConfig(CoreConfig(model="m"), (sys.executable, FAKE_CORE)), Listener())
    await client.stop()
    async with started("--step-s", "0.01") as client:
        stream = client.submit(submit(1, max_tokens=10000))
        await stream.take()
        pid = client.pid
        await client.stop()
        await client.stop()
        assert "shuts down" in stream.error
        assert not alive(pid)


async def test_two_thousand_submissions_while_steps_stream_in_lose_nothing():
    """The descriptor is edge-triggered: a message that comes while the client sends must not wait for the next one."""
    async with started(max_bucket=256, max_step_tokens=512, max_queue=4000) as client:

        async def one(key: int) -> None:
            await asyncio.sleep((key % 40) * 0.001)
            assert await read(client.submit(submit(key, (key % 900,), 3))) == [key % 900 + 1 + i for i in range(3)]

        await asyncio.wait_for(asyncio.gather(*map(one, range(2000))), 30)
