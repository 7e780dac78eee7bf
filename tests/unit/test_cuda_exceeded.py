"""A step that is one beyond any dimension is refused with both numbers, leaves no trace, and the next one is right."""

import pytest
import torch

import tests.interpreter  # noqa: F401
from engine.cuda import attention as module
from tests.exceeded import (
    ENOUGH,
    NEXT,
    Card,
    Excess,
    Heads,
    PlanningLane,
    capacity_of,
    excesses,
    refusal,
    step_capacity,
)
from tests.unit.test_cuda_attention import ArenaDevice, PagedModule

CARD = Card(sm_count=132, sm90=True)
STEP = step_capacity(Heads(32, 8, 128), 16)
EXCESSES = list(excesses(capacity_of(STEP, CARD)))


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "installed_version", lambda: "0.6.18.post1")
    monkeypatch.setattr(module, "TorchDevice", ArenaDevice)


def lane(tight: str | None = None, limit: int = 0) -> PlanningLane:
    modules = {"fa2": PagedModule(), "fa3": PagedModule()}
    return PlanningLane(capacity_of(STEP, CARD, tight, limit), modules, "cpu", torch.float32)


@pytest.mark.parametrize("excess", EXCESSES, ids=lambda excess: f"{excess.dimension}, bucket {excess.bucket}")
def test_one_beyond_is_refused_without_a_trace(excess: Excess) -> None:
    value, limit = excess.value, 0
    if value is None:
        value = refusal(lane(excess.tight, ENOUGH), excess).value
        limit = value - 1
        # Where it fits exactly, it is taken.
        assert lane(excess.tight, value).error(excess.plan) < 1e-5
    refusing = lane(excess.tight, limit)
    error = refusal(refusing, excess)
    assert (error.dimension, error.value, error.limit) == (excess.dimension, value, value - 1)
    assert str(error).startswith(f"{excess.dimension} is {value}, but at most {value - 1} fit")
    for plan in NEXT.values():
        assert refusing.error(plan) < 1e-5


def test_every_dimension_of_the_attention_plans_is_tried() -> None:
    limits = {"max_decode_tiles", "decode_partial_rows", "max_chunk_tiles", "chunk_partial_rows", "max_works"}
    assert {excess.tight for excess in EXCESSES} == {None, *limits}
