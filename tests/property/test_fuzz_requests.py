"""Any dictionary as a request, through the backend and a real engine core: a sound stream or a refusal by name."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from dynamo._core import Context
from dynamo.llm.exceptions import InvalidArgument
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.models import tiny_model
from tests.property.messages import LONG
from tests.property.requests import Change, changed, changes, names, sound
from worker.backend import Backend
from worker.config import WorkerConfig

CONTEXT = 80
FUZZ = settings(
    max_examples=2000 if LONG else 40,
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
TIMEOUT_S = 60.0


class Serving:
    """A backend that has started, and its event loop."""

    def __init__(self, model: str) -> None:
        self.runner = asyncio.Runner()
        config = WorkerConfig(model=model, threads=1, kv_cache_memory="1MiB", context_limit=CONTEXT, max_bucket=8)
        self.backend = Backend(config)
        self.runner.run(self.backend.start(1))

    def ask(self, *requests: Any) -> list[list[dict[str, Any]] | BaseException]:
        """The chunks of each request, or what was raised; all run at once."""

        async def all_of() -> list[list[dict[str, Any]] | BaseException]:
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.gather(*map(self._one, requests), return_exceptions=True)

        return self.runner.run(all_of())

    async def _one(self, request: Any) -> list[dict[str, Any]]:
        return [chunk async for chunk in self.backend.generate(request, Context())]

    def referenced(self) -> int:
        """Pages that the core holds for requests, after it has had time to say so."""

        async def wait() -> int:
            stats = self.backend._live_client().stats
            for _ in range(100):
                stats = self.backend._live_client().stats
                if not (stats.referenced_pages or stats.waiting or stats.active or stats.draining):
                    break
                await asyncio.sleep(0.05)
            return stats.referenced_pages

        return self.runner.run(wait())

    def close(self) -> None:
        self.runner.run(self.backend.cleanup())
        self.runner.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    running = Serving(str(tiny_model(tmp_path_factory.mktemp("fuzz") / "tiny")))
    yield running
    running.close()


def check(plan: list[Change], outcome: list[dict[str, Any]] | BaseException) -> None:
    """A stream with one terminal chunk, the last; or a refusal that names a field."""
    if isinstance(outcome, BaseException):
        assert isinstance(outcome, InvalidArgument), repr(outcome)
        text = str(outcome)
        assert any(name in text for name in names(plan)), text
        assert len(text) < 600
        assert "\n" not in text
        text.encode()
        return
    assert ["finish_reason" in chunk for chunk in outcome] == [False] * (len(outcome) - 1) + [True]
    assert outcome[-1]["finish_reason"] in ("stop", "length")
    usage = outcome[-1]["completion_usage"]
    assert usage["completion_tokens"] == sum(len(chunk["token_ids"]) for chunk in outcome)
    assert usage["prompt_tokens"] + usage["completion_tokens"] <= CONTEXT
    json.dumps(outcome, allow_nan=False)


@FUZZ
@given(plans=st.lists(changes(), min_size=1, max_size=8))
@example(
    plans=[
        [(None, "token_ids", ("HUGE", "100,000 ids"))],
        [("stop_conditions", "stop_token_ids", ("HUGE", "100,000 ids"))],
    ]
)
@example(
    plans=[[("routing", "cache_salt", ("HUGE", "1 MB of text"))], [("sampling_options", "n", ("HUGE", "unprintable"))]]
)
@example(
    plans=[[("sampling_options", name, ("HUGE", "10^5000"))] for name in ("seed", "top_k", "temperature", "top_p")]
)
@example(plans=[[("sampling_options", "temperature", value)] for value in (5e-324, 3.5e38, 1.7e308, 10**400)])
def test_any_request_is_served_or_refused_by_name(serving, plans):
    outcomes = serving.ask(*map(changed, plans), sound())
    *odd, mate = outcomes
    for plan, outcome in zip(plans, odd, strict=True):
        check(plan, outcome)
    assert [chunk["finish_reason"] for chunk in mate if "finish_reason" in chunk] == ["length"]
    assert serving.backend.failure is None
    assert serving.referenced() == 0


def test_an_empty_request_is_refused(serving):
    (outcome,) = serving.ask({})
    assert isinstance(outcome, InvalidArgument), repr(outcome)
    assert "prompt" in str(outcome)
