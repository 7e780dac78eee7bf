"""Any bytes on the socket between worker and core: nothing dies, nothing hangs, no page is lost."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.config import CoreConfig
from engine.core import Channel, Core
from engine.lane import Lane
from engine.messages import (
    MAX_REQUEST_BYTES,
    Dropped,
    Finished,
    FromCore,
    Heartbeat,
    Ready,
    Requests,
    Stats,
    StepOutput,
    ToCore,
)
from engine.scheduler import Scheduler
from engine.scheduling import SchedulerConfig
from engine.step import StepPlan, StepResult
from kv.budget import KvCapacity
from kv.events import Removed, Stored
from kv.hashing import Blake2bHasher
from kv.pool import PagePool
from tests.property.messages import (
    FRAMES,
    LONG,
    PAGE_SIZE,
    VOCAB,
    damaged,
    encode,
    named,
    odd_fields,
    request,
    stops,
)
from worker.client import ClientConfig, CoreClient, Listener
from worker.outbox import Outbox

PAGES = 40
FUZZ = settings(
    max_examples=20_000 if LONG else 300,
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class CountingExecutor:
    """Computes nothing: which KV a request finds is not the question here."""

    parameters = frozenset(("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"))

    def launch(self, plan: StepPlan) -> StepResult:
        return StepResult([7] * (len(plan.decode_rows) + sum(chunk.samples for chunk in plan.chunks)))

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, StepResult)
        return handle


class Wired:
    """A core in this process and the other end of its socket."""

    def __init__(self, address: str, lag: int = 1) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.bind(address)
        config = SchedulerConfig(
            page_size=PAGE_SIZE,
            servable_length=PAGES * PAGE_SIZE,
            max_bucket=4,
            max_step_tokens=64,
            max_chunk_tokens=64,
            vocab_size=VOCAB,
            max_in_flight=lag + 1,
        )
        self.clock = iter(range(10**9)).__next__
        scheduler = Scheduler(config, PagePool(KvCapacity(PAGES, PAGE_SIZE)), Blake2bHasher(PAGE_SIZE))
        self.lane = Lane(scheduler, CountingExecutor(), self.clock)
        self.channel = Channel(address)
        self.core = Core(self.lane, self.channel, self.clock)
        self.decoder = msgspec.msgpack.Decoder(FromCore)
        self.keys = iter(range(10**6, 10**9))

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.socket.send(frame)

    def serve(self) -> list[FromCore]:
        """Send a request and let the core work until that and all others have ended; what it said meanwhile."""
        mark = next(self.keys)
        self.send(encode(Requests([request(mark, [1, 2, 3], 2)], [])))
        said: list[FromCore] = []
        for _ in range(100_000):
            assert self.core.turn(), "the core wants to end"
            while self.socket.poll(5 if self.lane.idle else 0):
                said.append(self.decoder.decode(self.socket.recv()))
            ended = [f for message in said if isinstance(message, StepOutput) for f in message.finished]
            ours = [(end.reason, end.completion_tokens) for end in ended if end.key == mark]
            if ours and self.lane.idle:
                assert ours == [("length", 2)]
                return said
        raise AssertionError("the core does not come to an end")

    def close(self) -> None:
        self.channel.close()
        self.context.destroy(linger=0)


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wired]:
    logging.getLogger("engine.core").setLevel(logging.CRITICAL)
    pair = Wired(f"ipc://{tmp_path_factory.mktemp('wire') / 's'}")
    yield pair
    pair.close()
    logging.getLogger("engine.core").setLevel(logging.NOTSET)


@FUZZ
@given(frames=st.lists(FRAMES, min_size=1, max_size=6))
def test_a_core_outlives_any_bytes_and_loses_no_page(wired, frames):
    wired.send(*(frame for frame in map(named, frames) if not stops(frame)))
    said = wired.serve()
    pool = wired.lane.scheduler.pool
    pool.check()
    assert pool.referenced_pages == 0
    assert wired.lane.scheduler.promised_pages == 0
    assert all(isinstance(message, StepOutput | Heartbeat | Dropped) for message in said)


STREAMS = range(1, 6)
STEPS = st.builds(
    lambda keys, ended, events: StepOutput(
        keys,
        b"\1\0\0\0" * len(keys),
        [Finished(key, "stop", 3, keys.count(key), 0) for key in ended],
        events,
        Stats(active=len(keys)),
    ),
    st.lists(st.integers(0, 7), max_size=8),
    st.lists(st.integers(0, 7), max_size=3),
    st.lists(st.sampled_from([Removed([1]), Stored([2], None, b"\0" * 64, None)]), max_size=2),
)
BEATS = st.builds(Heartbeat, st.just(Stats()), st.floats(0, 1))
SAYINGS = STEPS | BEATS
FROM_CORE = SAYINGS.map(encode) | damaged(SAYINGS) | odd_fields(SAYINGS) | FRAMES


def serving_client(listener: Listener) -> CoreClient:
    """A client as it is once its core has said `Ready`, with no process behind it."""
    client = CoreClient(ClientConfig(CoreConfig(model="m"), ("unused",)), listener)
    client._ready = asyncio.get_running_loop().create_future()
    client._on_frame(encode(Ready(10, PAGE_SIZE, 100, "hasher", VOCAB, "", {}, {})))
    return client


@FUZZ
@given(frames=st.lists(FROM_CORE, min_size=1, max_size=8))
@example(frames=[b"\x81\xa4type\xa1\n"])
def test_a_client_outlives_any_bytes_and_ends_every_stream_once(frames):
    failures: list[str] = []

    async def scenario() -> None:
        client = serving_client(Listener(failure=failures.append))
        streams = [client.submit(request(key, [1])) for key in STREAMS]
        for frame in map(named, frames):
            client._on_frame(frame)
        assert client.failure == (failures[0] if failures else None)
        assert len(failures) <= 1
        assert all("\n" not in reason for reason in failures)
        for stream in streams:
            ended = (stream.end is not None) + (stream.error is not None)
            assert ended == (stream.key not in client._streams)
            assert not (failures and stream.key in client._streams), "it waits for a core that is lost"
            if ended:
                await asyncio.wait_for(stream.take(), 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "step",
    [
        {"keys": [1, 2], "tokens": b"\1\0\0\0"},
        {"keys": [1], "tokens": b"\1\0\0"},
        {"keys": [], "tokens": b"\1\0\0\0"},
        {"keys": [1], "tokens": None},
        {"keys": 1},
        {"finished": [[1, "no such reason", 1, 1, 1]]},
    ],
    ids=str,
)
async def test_a_step_that_contradicts_itself_fails_the_core_and_its_requests(step: dict[str, Any]) -> None:
    client = serving_client(Listener())
    stream = client.submit(request(1, [1]))
    sound = {"type": "step", "keys": [], "tokens": b"", "finished": [], "events": [], "stats": []}
    client._on_frame(encode(sound | step))
    await asyncio.wait_for(stream.take(), 1)
    assert stream.error is not None
    assert "cannot be read" in stream.error


async def test_a_request_that_cannot_be_sent_fails_alone() -> None:
    sent: list[bytes] = []
    client = serving_client(Listener())
    client._send = lambda message: sent.append(encode(message))  # type: ignore[method-assign]
    good = client.submit(request(1, [1]))
    for broken in (
        msgspec.structs.replace(request(2, [1]), request_id="\ud800"),
        msgspec.structs.replace(request(3, [1]), max_tokens=2**70),
        msgspec.structs.replace(request(4, [1]), sampling=[float("nan")]),
        msgspec.structs.replace(request(5, [1]), cache_salt="x" * (MAX_REQUEST_BYTES + 1)),
    ):
        stream = client.submit(broken)
        await asyncio.wait_for(stream.take(), 1)
        assert stream.end is not None
        assert stream.end.reason == "error"
        assert len(stream.end.message) < 300
    await asyncio.sleep(0)
    (message,) = sent
    assert [submit.key for submit in msgspec.msgpack.decode(message, type=ToCore).submits] == [1]
    assert good.end is None


async def test_what_does_not_fit_in_one_message_goes_in_several() -> None:
    outbox = Outbox()
    for key in range(6):
        salt = "x" * (MAX_REQUEST_BYTES // 5 * (key + 1) - 1000 if key < 5 else 1)
        assert outbox.submit(msgspec.structs.replace(request(key, [1]), cache_salt=salt)) is None
    outbox.cancel(17)
    messages = [msgspec.msgpack.decode(encode(message), type=ToCore) for message in outbox.take()]
    assert [[submit.key for submit in message.submits] for message in messages] == [[0, 1], [2], [3], [4, 5]]
    assert [message.cancels for message in messages] == [[], [], [], [17]]
    assert [len(message.submits) for message in outbox.take()] == [0]


async def test_streams_that_may_have_stood_in_a_dropped_message_end() -> None:
    client = serving_client(Listener())
    answered, silent = client.submit(request(1, [1])), client.submit(request(2, [1]))
    client._on_frame(encode(StepOutput([1], b"\1\0\0\0", [], [], Stats())))
    client._on_frame(encode(Dropped("it has 3 bytes and cannot be read")))
    await asyncio.wait_for(silent.take(), 1)
    assert silent.end is not None
    assert (silent.end.reason, silent.error) == ("error", None)
    assert answered.end is None
    assert client.failure is None
