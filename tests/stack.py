"""A running frontend with workers for tests, the requests they send it, and the metrics they read of it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from worker.local import LocalConfig, LocalStack, LocalWorker

QUICK_STOP = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}
TIMEOUT_S = 60.0

T = TypeVar("T")


class Stack:
    """A `LocalStack` whose event loop runs on a thread, so that it goes on whatever a test does.

    Leaving the context fails if a process of the stack had to be killed.
    """

    def __init__(
        self,
        *worker_flags: str,
        workers: int = 1,
        frontend_flags: tuple[str, ...] = (),
        environment: Mapping[str, str] = QUICK_STOP,
        **options: Any,
    ) -> None:
        self.log: list[str] = []
        self.local = LocalStack(
            LocalConfig(
                worker_flags=worker_flags,
                workers=workers,
                frontend_flags=frontend_flags,
                environment=environment,
                on_line=lambda name, line: self.log.append(f"{name} | {line}"),
                start_timeout_s=TIMEOUT_S,
                **options,
            )
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._call(self.local.start())
        except BaseException as error:
            error.add_note("\n".join(self.log))
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        left = self._close()
        assert left == [], f"processes {left} outlived the stack"

    def _close(self) -> list[int]:
        left = self._call(self.local.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return left

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S + 30)

    @property
    def url(self) -> str:
        return self.local.url

    @property
    def model(self) -> str:
        return self.local.model

    @property
    def workers(self) -> list[LocalWorker]:
        return self.local.workers

    def add_worker(self, *flags: str, environment: Mapping[str, str] | None = None, wait: bool = True) -> LocalWorker:
        return self._call(self.local.add_worker(*flags, environment=environment, wait=wait))

    def remove_worker(self, worker: LocalWorker, *, kill: bool = False) -> int:
        return self._call(self.local.remove_worker(worker, kill=kill))

    def wait_exit(self, worker: LocalWorker) -> int:
        """Wait until a worker ends by itself. Returns its exit code."""
        return self._call(worker.child.wait())

    def restart_frontend(self) -> None:
        self._call(self.local.restart_frontend())

    def discovered(self) -> list[str]:
        """Endpoints that stand in discovery; what else a worker registers goes with its lease, some 10 s later."""
        root = self.local.directory / "discovery/v1/instances"
        return sorted(path.name for path in root.rglob("*") if path.is_file())


@dataclass
class Reply:
    """What came back for one request, streamed or not."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """The body of an answer that is no success, or an error frame of a stream."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    chunks: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """The `logprobs` objects of the answer's choice, of each piece if it was streamed."""
    nvext: dict[str, Any] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Client:
    """Sends OpenAI requests to a stack, greedy unless a field says otherwise."""

    def __init__(self, url: str, model: str, http: httpx.AsyncClient) -> None:
        self._url, self._model, self._http = url, model, http

    async def chat(self, content: str | list[dict[str, Any]], stream: bool = False, **fields: Any) -> Reply:
        """`content` is the user's message, or a whole conversation."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return await self.post("/v1/chat/completions", {"messages": messages, **fields}, stream)

    async def complete(self, prompt: str | list[int], stream: bool = False, **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"prompt": prompt, **fields}, stream)

    async def post(self, path: str, body: dict[str, Any], stream: bool) -> Reply:
        body = {"model": self._model, "temperature": 0, "stream": stream, **body}
        if not stream:
            response = await self._http.post(self._url + path, json=body)
            return _plain(response)
        body["stream_options"] = {"include_usage": True}
        async with self._http.stream("POST", self._url + path, json=body) as response:
            return await _streamed(response)

    @asynccontextmanager
    async def open_stream(self, prompt: str | list[int], **fields: Any) -> AsyncIterator[AsyncIterator[str]]:
        """A streamed completion as raw lines; leaving the context disconnects."""
        body = {"model": self._model, "temperature": 0, "stream": True, "prompt": prompt, **fields}
        async with self._http.stream("POST", self._url + "/v1/completions", json=body) as response:
            yield response.aiter_lines()


@asynccontextmanager
async def client(stack: Stack) -> AsyncIterator[Client]:
    """A client with connections of its own."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=httpx.Limits()) as http:
        yield Client(stack.url, stack.model, http)


def _plain(response: httpx.Response) -> Reply:
    if response.status_code != 200:
        return Reply(response.status_code, error=response.text)
    body = response.json()
    choice = body["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    return Reply(
        200,
        message.get("content") or "",
        choice["finish_reason"],
        body.get("usage") or {},
        tool_calls=message.get("tool_calls") or [],
        logprobs=[choice["logprobs"]] if choice.get("logprobs") else [],
        nvext=body.get("nvext") or {},
    )


async def _streamed(response: httpx.Response) -> Reply:
    reply = Reply(response.status_code)
    if reply.status != 200:
        reply.error = (await response.aread()).decode()
        return reply
    event = ""
    async for line in response.aiter_lines():
        if line.startswith("event:"):
            event = line.partition(":")[2].strip()
        elif event == "error" or line.startswith('data: {"error"'):
            reply.error += line
        elif line.startswith("data: ") and line != "data: [DONE]":
            _take_frame(reply, json.loads(line[len("data: ") :]))
    return reply


def _take_frame(reply: Reply, frame: dict[str, Any]) -> None:
    reply.usage = frame.get("usage") or reply.usage
    reply.nvext |= frame.get("nvext") or {}
    for choice in frame.get("choices") or []:
        delta = choice.get("delta") or {"content": choice.get("text")}
        reply.text += delta.get("content") or ""
        reply.tool_calls += delta.get("tool_calls") or []
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        reply.chunks += 1
        reply.logprobs += [choice["logprobs"]] if choice.get("logprobs") else []


@dataclass(frozen=True)
class Metrics:
    """One reading of a /metrics page."""

    samples: list[Sample]

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` that carry `labels`; 0 if there is none, as with a counter not yet counted."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())

    def labels(self, name: str, label: str) -> set[str]:
        """The values that `label` takes among the samples of `name` that are not 0."""
        return {s.labels[label] for s in self.samples if s.name == name and s.value}


async def metrics(url: str) -> Metrics:
    """Read `url`/metrics."""
    async with httpx.AsyncClient(trust_env=False) as http:
        page = (await http.get(f"{url}/metrics")).text
    return Metrics([sample for family in text_string_to_metric_families(page) for sample in family.samples])


async def eventually(look: Callable[[], Coroutine[Any, Any, T]], want: Callable[[T], bool], within_s: float = 5.0) -> T:
    """Call `look` until `want` holds of what it returns. Returns the last value, wanted or not."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    value = await look()
    while not want(value) and loop.time() < deadline:
        await asyncio.sleep(0.02)
        value = await look()
    return value
