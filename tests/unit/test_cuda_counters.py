"""What a warm GPU lane counts, on stand-ins for the card."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from engine.cuda import counters
from engine.cuda.counters import LOOK_S, CudaCounters
from engine.step import DeviceCounters


class Card:
    """An executor that counts its steps, a driver that counts allocations, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.allocations, self.asked = 0.0, 40, 0
        device = {"token_ids": torch.zeros(1)}
        self.executor: Any = SimpleNamespace(graph_steps=70, eager_steps=3, inputs=SimpleNamespace(device=device))
        monkeypatch.setattr(counters, "device_allocations", self._allocations)
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)

    def _allocations(self, _: torch.device) -> int:
        self.asked += 1
        return self.allocations

    def counters(self) -> CudaCounters:
        return CudaCounters(self.executor, lambda: self.now)


def test_what_was_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    count = card.counters()
    assert count() == DeviceCounters()
    card.executor.graph_steps, card.executor.eager_steps, card.allocations = 75, 4, 42
    card.now += LOOK_S
    assert count() == DeviceCounters(graph_steps=5, eager_steps=1, allocations_after_warmup=2)


def test_the_driver_is_not_asked_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    count = card.counters()
    for _ in range(1000):
        card.now += LOOK_S / 100
        count()
    assert card.asked <= 11


def test_every_kernel_that_is_compiled_or_loaded_counts_and_other_hooks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    card, seen = Card(monkeypatch), []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **details: seen.append(details))
    count = card.counters()
    hook = knobs.runtime.jit_post_compile_hook
    assert hook is not None
    hook(key="one")  # type: ignore[call-arg]
    hook(key="two")  # type: ignore[call-arg]
    assert count().compilations_after_warmup == 2
    assert seen == [{"key": "one"}, {"key": "two"}]
