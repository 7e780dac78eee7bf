"""What a CUDA lane does at its start that needs no GPU: refusals, their order, and what its memory is measured by."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import use_cuda
from engine.config import CoreConfig
from engine.cuda import lane as module
from engine.cuda.flashinfer_raw import FlashInferError
from engine.cuda.lane import check_card, prepare
from engine.cuda.logprobs import MOST
from engine.models.config import load_model_config
from tests.fake_gpu import FakeGpu
from tests.models import tiny_model
from worker.parameters import MAX_LOGPROBS


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


@pytest.mark.parametrize("refusal", ["the card", "its modules"])
def test_refusals_come_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    model = load_model_config(tiny_model(tmp_path))
    major = 7 if refusal == "the card" else 9
    gpu = FakeGpu(total=1 << 36)
    gpu.card = replace(gpu.card, capability=(major, 0))

    def missing(needs: Any) -> Any:
        raise FlashInferError("modules are missing")

    monkeypatch.setattr(module, "load_modules", missing)
    loaded: list[str] = []

    def load(*_: Any) -> Any:
        loaded.append("weights")
        raise AssertionError

    with pytest.raises(ValueError, match=r"sm70" if refusal == "the card" else "modules are missing"):
        prepare(CoreConfig(model=str(tmp_path)), model, torch.bfloat16, gpu, load)
    assert not loaded
