"""The engine that Dynamo drives, against a core that computes nothing: the contract, the errors, the drain."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from dynamo._core import Context
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.llm.exceptions import CannotConnect, EngineShutdown, InvalidArgument, Unknown

from engine.messages import Stats
from kv.hashing import Blake2bHasher, event_hash
from tests.models import tiny_model
from worker import backend as backend_module
from worker import registration
from worker import running as running_module
from worker.backend import Backend, Surroundings
from worker.config import WorkerConfig
from worker.publish import LoadReporter
from worker.registration import PAGE_SIZE_KEY, RegistrationWatch, other_page_size, served_name

FAKE_CORE = str(Path(__file__).parents[1] / "fake_core.py")
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(scope="module")
def event_loop_policy():
    """The loop that serves in production: its readers are not asyncio's."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
def model(tmp_path):
    directory = tiny_model(tmp_path / "tiny")
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return directory


class Recorder:
    """Stands for Dynamo's publishers and for the end of the process."""

    def __init__(self) -> None:
        self.stored: list[tuple] = []
        self.removed: list[list[int]] = []
        self.load: list[Any] = []
        self.ends = 0

    def publish_stored(self, token_ids, num_block_tokens, block_hashes, *, parent_hash, cache_salt):
        self.stored.append((token_ids, num_block_tokens, block_hashes, parent_hash, cache_salt))

    def publish_removed(self, block_hashes):
        self.removed.append(block_hashes)

    def publish(self, rank, snapshot):
        self.load.append(snapshot)

    def end_process(self):
        self.ends += 1


def make(model: Path, *options: str, recorder: Recorder | None = None, **settings: Any) -> Backend:
    end = recorder.end_process if recorder is not None else lambda: None
    command = (sys.executable, FAKE_CORE, *options)
    around = Surroundings(core_command=command, rng=lambda: random.Random(0), end_process=end, loop_limit_s=3600)
    return Backend(WorkerConfig(model=str(model), **{"drain_timeout_s": 0.2} | settings), around)


@contextlib.asynccontextmanager
async def started(model: Path, *options: str, recorder: Recorder | None = None, **settings: Any):
    backend = make(model, *options, recorder=recorder, **settings)
    try:
        config = await backend.start(7)
        if recorder is not None:
            backend.attach_snapshot_publisher(recorder)
            for source in await backend.kv_event_sources():
                source.on_ready(recorder)
        yield backend, config
    finally:
        await backend.cleanup()


def request(ids: Any = (1, 2, 3), max_tokens: int | None = 4, **fields: Any) -> dict[str, Any]:
    ids = list(ids) if isinstance(ids, tuple | range) else ids
    return {"token_ids": ids, "stop_conditions": {"max_tokens": max_tokens}, "sampling_options": {}, **fields}


async def collect(backend: Backend, asked: dict[str, Any], context: Any = None) -> list[dict[str, Any]]:
    return [chunk async for chunk in backend.generate(asked, context or Context())]


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


def check_stream(chunks: list[dict[str, Any]]) -> None:
    """The rules that Dynamo's frontend relies on, for every stream that ends without an exception."""
    assert [i for i, chunk in enumerate(chunks) if chunk.get("finish_reason")] == [len(chunks) - 1]
    assert all(isinstance(chunk["token_ids"], list) and chunk["index"] == 0 for chunk in chunks)
    assert all(chunk["token_ids"] for chunk in chunks[:-1])
    usage = chunks[-1]["completion_usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len(tokens_of(chunks))
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


async def test_the_registration_says_what_the_core_has(model):
    async with started(model, max_bucket=8, max_step_tokens=128, served_model_name="name") as (_, config):
        assert (config.model, config.served_model_name) == (str(model), "name")
        llm = config.llm
        assert (llm.context_length, llm.kv_cache_block_size, llm.total_kv_blocks) == (4096, 16, 256)
        assert (llm.max_num_seqs, llm.max_num_batched_tokens) == (8, 128)
        assert (llm.data_parallel_size, llm.data_parallel_start_rank) == (1, 0)
        assert config.runtime_data == {PAGE_SIZE_KEY: "16"}


async def test_from_args_gives_engine_and_dynamos_configuration(model, monkeypatch):
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    backend, config = await Backend.from_args(
        ["--model", str(model), "--namespace", "n", "--enable-kv-events", "false"]
    )
    assert type(config).__name__ == "WorkerConfig"
    assert (config.namespace, config.discovery_backend, config.served_model_name) == ("n", "file", "tiny")
    assert (config.tool_call_parser, config.reasoning_parser) == (None, None)
    assert not config.enable_kv_routing
    assert await backend.kv_event_sources() == []
    await backend.cleanup()


async def test_a_model_is_resolved_once_and_not_on_the_event_loop(model, monkeypatch):
    """Its file is hashed then, which takes seconds."""
    threads = []

    def resolve(name, load_format, **_):
        threads.append(threading.current_thread())
        return model

    monkeypatch.setattr(registration, "resolve_model", resolve)
    backend, config = await Backend.from_args(["--model", "folder/Name.gguf"])
    backend._around = Surroundings(core_command=(sys.executable, FAKE_CORE))
    registered = await backend.start(7)
    await backend.cleanup()
    assert [thread is threading.main_thread() for thread in threads] == [False]
    assert (config.model_name, config.served_model_name) == (str(model), "Name")
    assert (registered.model, registered.served_model_name) == (str(model), "Name")


def test_a_model_is_named_after_the_path_that_was_given(tmp_path, monkeypatch):
    (tmp_path / "snapshots" / "abc123").mkdir(parents=True)
    (tmp_path / "Nice-Model").symlink_to(tmp_path / "snapshots" / "abc123")
    (tmp_path / "snapshots" / "x").mkdir()
    (tmp_path / "snapshots" / "x" / "Q.GGUF").touch()
    monkeypatch.chdir(tmp_path / "snapshots")
    names = [str(tmp_path / "Nice-Model"), "../Nice-Model/", "abc123/..", "x/Q.GGUF", "smollm2"]
    assert [served_name(name) for name in names] == ["Nice-Model", "Nice-Model", "snapshots", "Q", "smollm2"]


@pytest.mark.parametrize(
    ("said", "parsers"), [({}, ("hermes", "qwen3")), ({"tool_call_parser": None}, (None, "qwen3"))]
)
async def test_the_familys_parsers_are_the_default(model, said, parsers):
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    config = backend_module.dynamo_config(WorkerConfig(model=str(model), **said))
    assert (config.tool_call_parser, config.reasoning_parser) == parsers


@pytest.mark.parametrize("packed", [False, True])
async def test_a_request_gets_its_tokens_and_one_terminal_chunk(model, packed):
    ids = np.array([1, 2, 3], dtype="<i4").tobytes() if packed else [1, 2, 3]
    async with started(model) as (backend, _):
        chunks = await collect(backend, request(ids, 5))
        check_stream(chunks)
        assert tokens_of(chunks) == [4, 5, 6, 7, 8]
        assert chunks[-1]["finish_reason"] == "length"
        assert counted(backend) == {"length": 1}


async def test_a_stop_token_is_delivered_and_ends_the_request(model):
    async with started(model) as (backend, _):
        chunks = await collect(backend, request(max_tokens=100, eos_token_ids=[6]))
        check_stream(chunks)
        assert (tokens_of(chunks), chunks[-1]["finish_reason"]) == ([4, 5, 6], "stop")


async def test_requests_in_parallel_do_not_mix(model):
    async with started(model) as (backend, _):
        asked = [request((key,), 3 + key % 5) for key in range(40)]
        for key, chunks in enumerate(await asyncio.gather(*(collect(backend, one) for one in asked))):
            check_stream(chunks)
            assert tokens_of(chunks) == [key + 1 + i for i in range(3 + key % 5)]


async def test_a_slow_reader_gets_its_tokens_merged(model):
    async with started(model) as (backend, _):
        chunks = []
        async for chunk in backend.generate(request(max_tokens=50), Context()):
            chunks.append(chunk)
            await asyncio.sleep(0.05)
        check_stream(chunks)
        assert len(chunks) < 10
        assert len(tokens_of(chunks)) == 50


@pytest.mark.parametrize("length", [32, 100, 4000])
async def test_cached_tokens_are_reported_and_events_continue_the_chain(model, length):
    recorder, ids = Recorder(), [i % 900 for i in range(length)]
    async with started(model, recorder=recorder) as (backend, _):
        cold = await collect(backend, request(ids, 1))
        warm = await collect(backend, request([*ids, *range(16)], 1, routing={"cache_salt": None}))
        salted = await collect(backend, request(ids, 1, routing={"cache_salt": "tenant"}))
    cached = [
        chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] for chunks in (cold, warm, salted)
    ]
    blocks = length // 16
    assert cached == [0, blocks * 16, 0]
    packed = np.array([*ids, *range(16)], dtype="<i4").tobytes()
    hashes = [event_hash(digest) for digest in Blake2bHasher(16).chain(packed)]
    first, second, third = recorder.stored
    assert first == (ids[: blocks * 16], [16] * blocks, hashes[:blocks], None, None)
    assert second[2:] == (hashes[blocks:], hashes[blocks - 1], None)
    assert third[3:] == (None, "tenant")
    assert set(third[2]).isdisjoint(hashes)


async def test_load_is_reported_on_change_and_regularly(model):
    recorder = Recorder()
    async with started(model, "--step-s", "0.01", recorder=recorder, load_publish_interval_s=0.05) as (backend, _):
        assert (recorder.load[0].kv_used_blocks, recorder.load[0].kv_cache_hit_rate) == (0, None)
        await collect(backend, request(range(40), 4))
        assert {3, 0} <= {snapshot.kv_used_blocks for snapshot in recorder.load}
        assert recorder.load[-1].kv_used_blocks == 0
        assert recorder.load[-1].kv_cache_hit_rate == 0.0
        before = len(recorder.load)
        await until(lambda: len(recorder.load) >= before + 3)
        assert {(snapshot.kv_total_blocks, snapshot.dp_rank) for snapshot in recorder.load} == {(256, 0)}


def test_an_unchanged_load_is_reported_once_an_interval():
    recorder, now = Recorder(), 0.0
    reporter = LoadReporter(256, 1.0, lambda: now)
    reporter.attach(recorder)
    for now, expected in ((0.0, 1), (0.5, 1), (0.9, 1), (1.0, 2), (1.9, 2), (2.0, 3)):
        reporter.report(Stats(referenced_pages=4))
        assert len(recorder.load) == expected, now
    reporter.report(Stats(referenced_pages=5))
    assert len(recorder.load) == 4


async def test_ranks_and_sources_are_the_same_at_every_call(model):
    async with started(model) as (backend, _):
        assert backend.component_metrics_dp_ranks() == backend.component_metrics_dp_ranks() == [0]
        assert [source.dp_rank for source in await backend.kv_event_sources()] == [0]
        assert [source.dp_rank for source in await backend.kv_event_sources()] == [0]


@pytest.mark.parametrize("when", ["before", "waiting", "generating"])
async def test_a_client_that_leaves_ends_its_request_and_frees_the_core(model, when):
    async with started(model, "--step-s", "0.01", max_bucket=1) as (backend, _):
        context, other = Context(), Context()
        if when == "before":
            context.stop_generating()
        blocker = asyncio.create_task(collect(backend, request(max_tokens=10000), other)) if when == "waiting" else None
        if blocker is not None:
            await until(lambda: backend._client.stats.active == 1)
        task = asyncio.create_task(collect(backend, request(max_tokens=10000), context))
        await asyncio.sleep(0.1)
        if when != "before":
            context.stop_generating()
            await backend.abort(context)
        chunks = await asyncio.wait_for(task, 1)
        check_stream(chunks)
        assert chunks[-1]["finish_reason"] == "cancelled"
        assert counted(backend) == {"cancelled": 1}
        assert bool(tokens_of(chunks)) is (when == "generating")
        if blocker is not None:
            other.stop_generating()
            await backend.abort(other)
            await blocker
        await until(lambda: gauges(backend) == (0, 0, 0))


async def test_a_consumer_that_drops_the_stream_frees_the_core(model):
    async with started(model, "--step-s", "0.01") as (backend, _):
        stream = backend.generate(request(max_tokens=10000), Context())
        await anext(stream)
        await stream.aclose()
        await until(lambda: gauges(backend) == (0, 0, 0))
        assert counted(backend) == {"cancelled": 1}


async def test_a_stream_that_another_thread_lets_go_of_frees_the_core_and_harms_no_other(model):
    """Dynamo asks for chunks on threads of its own, where no loop has hooks that would close a generator at home."""
    async with started(model, "--step-s", "0.01") as (backend, _):
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        streams = [backend.generate(request(max_tokens=10000), Context())]
        await anext(streams[0])
        sys.set_asyncgen_hooks(*hooks)
        await asyncio.to_thread(streams.clear)
        await until(lambda: gauges(backend) == (0, 0, 0))
        assert counted(backend) == {"cancelled": 1}
        check_stream(await asyncio.wait_for(collect(backend, request()), 5))


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_consumer_that_is_cancelled_while_it_waits_frees_the_core(model, tokens):
    async with started(model, "--step-s", "0.2") as (backend, _):
        stream = backend.generate(request(max_tokens=10000), Context())
        for _ in range(tokens):
            await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: gauges(backend) == (0, 0, 0))
        assert counted(backend) == {"cancelled": 1}


async def test_a_client_that_leaves_between_two_chunks_ends_its_request(model):
    async with started(model, "--step-s", "0.01") as (backend, _):
        context, chunks = Context(), []
        async with asyncio.timeout(2):
            async for chunk in backend.generate(request(max_tokens=10000), context):
                chunks.append(chunk)
                if len(chunks) == 3:
                    context.stop_generating()
                    await backend.abort(context)
        check_stream(chunks)
        assert chunks[-1]["finish_reason"] == "cancelled"


async def test_of_two_requests_with_one_id_only_the_stopped_one_is_aborted(model):
    async with started(model, "--step-s", "0.005") as (backend, _):
        gone, stays = Context("same"), Context("same")
        tasks = [
            asyncio.create_task(collect(backend, request(max_tokens=10000), gone)),
            asyncio.create_task(collect(backend, request(max_tokens=40), stays)),
        ]
        await asyncio.sleep(0.05)
        gone.stop_generating()
        await backend.abort(gone)
        first, second = await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert (first[-1]["finish_reason"], second[-1]["finish_reason"]) == ("cancelled", "length")
        assert len(tokens_of(second)) == 40


async def test_a_bad_request_is_the_clients_error_and_costs_the_core_nothing(model):
    async with started(model) as (backend, _):
        with pytest.raises(InvalidArgument, match="n is 2"):
            await collect(backend, request(sampling_options={"n": 2}))
        assert backend._client.stats.unified_steps == 0


async def test_a_full_queue_sends_the_client_elsewhere(model):
    async with started(model, "--step-s", "0.02", max_bucket=1, max_queue=1) as (backend, _):
        active = asyncio.create_task(collect(backend, request(max_tokens=20)))
        await until(lambda: backend._client.stats.active == 1)
        rest = await asyncio.gather(
            *(collect(backend, request(max_tokens=3)) for _ in range(3)), return_exceptions=True
        )
        served = [await active, *(result for result in rest if isinstance(result, list))]
        assert [len(tokens_of(chunks)) for chunks in served] == [20, 3]
        assert [type(result) for result in rest if not isinstance(result, list)] == [CannotConnect] * 2
        assert counted(backend) == {"length": 2}


async def test_usage_is_told_in_the_first_chunk_and_exact_in_a_cancelled_end(model):
    """The frontend never sees the last chunk of a request that it cancels itself, for a stop string."""
    async with started(model, "--step-s", "0.02") as (backend, _):
        await collect(backend, request(range(40), 2))
        context = Context()
        chunks = []
        async for chunk in backend.generate(request(range(40), 1000), context):
            chunks.append(chunk)
            if len(chunks) == 3:
                context.stop_generating()
                await backend.abort(context)
        check_stream(chunks)
        told = chunks[0]["completion_usage"]
        assert (told["prompt_tokens"], told["completion_tokens"]) == (40, len(chunks[0]["token_ids"]))
        assert told["prompt_tokens_details"] == {"cached_tokens": 32}
        assert all("completion_usage" not in chunk for chunk in chunks[1:-1])
        end = chunks[-1]
        assert end["finish_reason"] == "cancelled"
        assert end["completion_usage"]["completion_tokens"] == len(tokens_of(chunks)) >= 3
        assert end["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_what_the_core_does_not_honour_is_refused_by_name(model):
    async with started(model) as (backend, _):
        with pytest.raises(InvalidArgument, match="presence_penalty is 1, but this worker's device does not serve"):
            await collect(backend, request(sampling_options={"presence_penalty": 1}))
        assert counted(backend) == {}


async def test_a_failed_step_and_a_bug_of_ours_are_not_the_clients_fault(model, monkeypatch):
    async with started(model, "--error-token", "5") as (backend, _):
        with pytest.raises(Unknown, match="the step failed"):
            await collect(backend, request())
        assert counted(backend) == {"error": 1}
        with monkeypatch.context() as broken:
            broken.setattr(backend_module.convert, "to_submit", lambda *_: int("no number"))
            with pytest.raises(Unknown, match="internal error"):
                await collect(backend, request())
        assert counted(backend) == {"error": 2}
        with monkeypatch.context() as broken:
            broken.setattr(running_module.Running, "next_chunk", lambda *_, **__: int("no number"))
            with pytest.raises(Unknown, match="internal error"):
                await collect(backend, request((1, 500), 3))
        assert counted(backend) == {"error": 3}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--fail-start", "unknown architecture"), "unknown architecture"),
        (("--exit-at-start", "3"), "exit code 3"),
        (("--hasher", "other"), "its block hasher is other"),
    ],
)
async def test_a_core_that_cannot_start_is_named_and_cleaned_up(model, options, reason):
    backend = make(model, *options)
    with pytest.raises(EngineShutdown, match=reason):
        await backend.start(7)
    assert reason in backend.failure
    await backend.cleanup()


async def test_a_models_sampling_defaults_that_cannot_be_served_are_named(model):
    (model / "generation_config.json").write_text(json.dumps({"temperature": -1}))
    backend = make(model)
    with pytest.raises(EngineShutdown, match=r"generation_config\.json: temperature is -1"):
        await backend.start(7)
    assert "temperature is -1" in backend.failure
    await backend.cleanup()


async def test_a_lost_core_fails_its_requests_and_ends_the_process_once(model):
    recorder = Recorder()
    async with started(model, "--step-s", "0.01", recorder=recorder) as (backend, _):
        tasks = [asyncio.create_task(collect(backend, request(max_tokens=10000))) for _ in range(3)]
        await until(lambda: backend._client.stats.active == 3)
        os.kill(backend._client.pid, signal.SIGKILL)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineShutdown)
            assert "SIGKILL" in str(result)
        assert counted(backend) == {"error": 3}
        with pytest.raises(EngineShutdown):
            await collect(backend, request())
        with pytest.raises(EngineShutdown):
            await collect(backend, build_health_check_payload(1))
        assert recorder.ends == 1


async def test_the_canary_is_answered_past_the_queue(model):
    async with started(model, "--step-s", "0.05", max_bucket=1, max_queue=1) as (backend, _):
        busy = [asyncio.create_task(collect(backend, request(max_tokens=10)))]
        await until(lambda: backend._client.stats.active == 1)
        busy.append(asyncio.create_task(collect(backend, request(max_tokens=10))))
        await until(lambda: backend._client.stats.waiting == 1)
        payload = build_health_check_payload(1)
        os.kill(backend._client.pid, signal.SIGSTOP)
        try:
            check_stream(await asyncio.wait_for(collect(backend, payload), 5))
        finally:
            os.kill(backend._client.pid, signal.SIGCONT)
        await asyncio.gather(*busy)


async def test_a_worker_that_was_told_to_end_serves_on_but_refuses_canaries(model):
    async with started(model) as (backend, _):
        assert await backend.health_check_payload() is None, "tokens of a running stream would keep health green"
        payload = build_health_check_payload(1)
        check_stream(await collect(backend, payload))
        backend.leave()
        check_stream(await collect(backend, request()))
        with pytest.raises(EngineShutdown, match="told to end"):
            await collect(backend, payload)


async def test_running_requests_end_before_the_core_does(model):
    async with started(model, "--step-s", "0.01", drain_timeout_s=5) as (backend, _):
        running = asyncio.create_task(collect(backend, request(max_tokens=20)))
        await until(lambda: backend._client.stats.active == 1)
        drain = asyncio.create_task(backend.cleanup())
        await asyncio.sleep(0)
        with pytest.raises(EngineShutdown):
            await collect(backend, request())
        check_stream(await running)
        await drain


async def test_what_outlasts_the_drain_fails_so_that_it_can_migrate(model):
    async with started(model, "--step-s", "0.01", drain_timeout_s=0.1) as (backend, _):
        running = asyncio.create_task(collect(backend, request(max_tokens=10000)))
        await until(lambda: backend._client.stats.active == 1)
        began = time.monotonic()
        await backend.cleanup()
        assert time.monotonic() - began < 2
        with pytest.raises(EngineShutdown):
            await running


async def test_what_waits_when_the_drain_begins_fails_at_once_and_what_runs_goes_on(model):
    async with started(model, "--step-s", "0.02", max_bucket=1, drain_timeout_s=5) as (backend, _):
        running = asyncio.create_task(collect(backend, request(max_tokens=40)))
        await until(lambda: backend._client.stats.active == 1)
        waiting = asyncio.create_task(collect(backend, request(max_tokens=3)))
        await until(lambda: backend._client.stats.waiting == 1)
        drain = asyncio.create_task(backend.cleanup())
        with pytest.raises(EngineShutdown, match="admits no more"):
            await asyncio.wait_for(waiting, 2)
        assert not running.done()
        check_stream(await running)
        await drain


async def test_a_failed_step_may_be_tried_elsewhere(model):
    async with started(model, "--error-token", "5", "--retryable") as (backend, _):
        with pytest.raises(CannotConnect, match="the step failed"):
            await collect(backend, request())
        assert counted(backend) == {"error": 1}


@pytest.mark.parametrize("told", ["before", "while"])
async def test_a_worker_that_is_told_to_end_while_it_loads_does_so_at_once(model, told):
    backend = make(model, "--load-s", "600")
    if told == "before":
        backend.leave()
    start = asyncio.create_task(backend.start(7))
    await asyncio.sleep(0.2)
    if told == "while":
        assert not start.done()
        backend.leave()
    with pytest.raises(EngineShutdown, match="told to end"):
        await asyncio.wait_for(start, 2)
    assert (backend.failure, backend.leaving) == (None, True)
    await asyncio.wait_for(backend.cleanup(), 2)


@pytest.mark.parametrize("told", [False, True])
async def test_a_worker_whose_registration_is_gone_drains_and_fails_unless_it_was_told_to_end(model, told):
    recorder = Recorder()
    async with started(model, "--step-s", "0.01", recorder=recorder, discovery_backend="file") as (backend, _):
        backend._around = dataclasses.replace(backend._around, watch=RegistrationWatch(0.01, 0.05))
        discovery = Discovery(16)
        await backend.on_endpoint_ready(discovery)
        running = asyncio.create_task(collect(backend, request(max_tokens=50)))
        await until(lambda: backend._client.stats.active == 1)
        if told:
            backend.leave()
        discovery.registered = []
        await until(lambda: recorder.ends == 1 or (told and running.done()))
        check_stream(await running)
        assert (recorder.ends, backend.failure is None) == ((0, True) if told else (1, False))
        if not told:
            with pytest.raises(EngineShutdown, match="not been in discovery"):
                await collect(backend, request())


async def test_cleanup_is_possible_at_any_time_and_twice(model):
    never = make(model)
    await never.cleanup()
    await never.cleanup()
    with pytest.raises(EngineShutdown):
        await collect(never, request())
    async with started(model) as (backend, _):
        await backend.cleanup()
        await backend.cleanup()


class Discovery:
    """Stands for an endpoint of Dynamo whose registered workers have `sizes`."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.registered = [7]

    async def client(self):
        return self

    def instance_ids(self):
        return self.registered

    async def wait_for_instances_by_runtime_data(self, key, value, min_count, timeout_s):
        assert (key, min_count) == (PAGE_SIZE_KEY, 1)
        if value not in map(str, self.sizes):
            raise TimeoutError
        return [1]


async def test_another_page_size_beside_ours_is_refused(model):
    assert await other_page_size(Discovery(), 16) is None
    assert await other_page_size(Discovery(16), 16) is None
    backend = make(model, kv_page_size=16)
    await backend.on_endpoint_ready(Discovery(16))
    with pytest.raises(EngineShutdown, match="kv_page_size is 16, but a worker with pages of 64 tokens"):
        await backend.on_endpoint_ready(Discovery(16, 64))


def test_the_worker_process_loads_no_torch(model):
    program = f"""
import asyncio, sys
from dynamo._core import Context
from worker import Backend
from worker.backend import Surroundings
from worker.config import WorkerConfig

async def main():
    backend = Backend(WorkerConfig(model={str(model)!r}), Surroundings(core_command=(sys.executable, {FAKE_CORE!r})))
    await backend.start(7)
    asked = {{"token_ids": [1, 2, 3], "stop_conditions": {{"max_tokens": 3}}}}
    chunks = [chunk async for chunk in backend.generate(asked, Context())]
    await backend.cleanup()
    assert chunks[-1]["finish_reason"] == "length", chunks

asyncio.run(main())
heavy = {{name.partition(".")[0] for name in sys.modules}} & {{"torch", "transformers", "flashinfer", "triton"}}
print("heavy:", sorted(heavy))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.strip().endswith("heavy: []"), result.stdout + result.stderr


def counted(backend: Backend) -> dict[str, float]:
    """Requests that ended, by reason; reasons that did not occur are left out."""
    samples = backend._observed.finished.collect()[0].samples
    return {s.labels["reason"]: s.value for s in samples if s.name.endswith("_total") and s.value}


def gauges(backend: Backend) -> tuple[int, int, int]:
    stats = backend._client.stats
    return stats.waiting, stats.active, stats.referenced_pages


async def until(condition, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.005)
