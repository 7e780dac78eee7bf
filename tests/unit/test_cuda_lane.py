"""What a CUDA lane does at its start that needs no GPU: refusals, their order, and what its memory is measured by."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.build import use_cuda
from engine.config import CoreConfig
from engine.cuda import lane as module
from engine.cuda.flashinfer_raw import FlashInferError
from engine.cuda.lane import check_card, pool_budget, prepare
from engine.cuda.logprobs import MOST
from engine.models.config import load_model_config
from engine.plan import PlanCapacity
from engine.step import StepPlan
from kv.budget import KvBudgetError
from kv.geometry import KvGeometry
from tests.models import tiny_model
from worker.parameters import MAX_LOGPROBS

GIB = 1 << 30
GEOMETRY = KvGeometry(16, 36, 8, 128, "bfloat16")


@pytest.mark.parametrize(("built", "reason"), [(None, r": torch .* is built without CUDA; set"), ("13.0", "; set")])
def test_a_missing_gpu_is_told_from_a_torch_that_knows_none(
    monkeypatch: pytest.MonkeyPatch, built: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    assert not use_cuda("auto")
    with pytest.raises(ValueError, match=f"torch finds no GPU here{reason}"):
        use_cuda("cuda")


def test_as_many_likeliest_tokens_are_kept_as_a_client_may_ask_for() -> None:
    """One more would be refused at the launch, which ends every request of the step."""
    assert MOST >= MAX_LOGPROBS


def test_a_card_that_is_too_old_is_refused_by_its_name() -> None:
    for major, minor in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 1)):
        check_card("a card", major, minor)
    with pytest.raises(ValueError, match=r"GPU is a Tesla T4 \(sm75\), but the CUDA lane runs from sm80 on: .* cpu"):
        check_card("Tesla T4", 7, 5)


def test_a_pool_that_finds_no_room_says_who_has_the_rest_and_what_to_change() -> None:
    assert pool_budget(GEOMETRY, 0.5, 8 * GIB, 10 * GIB).memory_bytes == 3 * GIB
    with pytest.raises(KvBudgetError, match=r"gpu_memory_utilization is 0.5 of 10240 MiB, .* have 6144 MiB: raise it"):
        pool_budget(GEOMETRY, 0.5, 4 * GIB, 10 * GIB)


@pytest.mark.parametrize("refusal", ["the card", "its modules"])
def test_refusals_come_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    model = load_model_config(tiny_model(tmp_path))
    major = 7 if refusal == "the card" else 9
    card = SimpleNamespace(name="a card", major=major, minor=0, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)

    def missing(needs: Any) -> Any:
        raise FlashInferError("modules are missing")

    monkeypatch.setattr(module, "load_modules", missing)
    loaded: list[str] = []

    def load(*_: Any) -> Any:
        loaded.append("weights")
        raise AssertionError

    with pytest.raises(ValueError, match=r"sm70" if refusal == "the card" else "modules are missing"):
        prepare(CoreConfig(model=str(tmp_path)), model, torch.bfloat16, torch.device("cuda"), load)
    assert not loaded


class Steps:
    """An executor that notes what it is asked for."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, plan: StepPlan) -> None:
        self.notes.append(f"a step of {len(plan.chunks)} chunks and {len(plan.decode_rows)} rows")


@pytest.mark.parametrize("graphs", [None, 7])
def test_what_steps_take_for_a_moment_is_held_when_the_memory_is_measured(
    monkeypatch: pytest.MonkeyPatch, graphs: int | None
) -> None:
    """Capturing empties the allocator's cache, and the pool would get what the next step without a graph needs."""
    notes: list[str] = []

    def capture(_: Steps) -> int | None:
        if graphs is not None:
            notes.append("emptied")
        return graphs

    def measure(_: torch.device) -> tuple[int, int]:
        notes.append("measured")
        return 3, 4

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: notes.append("emptied"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", measure)
    build: Any = SimpleNamespace(
        capacity=PlanCapacity(4, 64, 128, 16, 4, 2, 64),
        device=torch.device("cuda"),
        cache=lambda pages: None,
        executor=lambda kv: Steps(notes),
        capture=capture,
    )
    assert module._profile(build) == (3, 4, graphs)
    last_emptied = len(notes) - 1 - notes[::-1].index("emptied")
    assert notes[last_emptied + 1 :] == ["a step of 4 chunks and 0 rows", "a step of 0 chunks and 4 rows", "measured"]
