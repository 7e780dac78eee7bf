"""What `tests/gpu/check_graphs.py` judges by: logits, and the tokens that were sampled from them."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.cuda.adjust import LogitsAdjuster
from engine.cuda.logprobs import DeviceLogprobs
from engine.cuda.sampling import DeviceSampler
from engine.step import RowStart
from tests.cuda_on_cpu import cuda_lane_on_cpu
from tests.gpu import check_graphs
from tests.gpu.check_graphs import MAX_REGRET, Distance, Pair, check_second
from tests.models import tiny_model

RIGHT = torch.tensor([[0.0, 5.0, 4.9, -3.0]]).repeat(1, 3)


def compared(token: int | None) -> dict[str, Any]:
    """A step with equal logits, of which the other side sampled `token`."""
    distance = Distance()
    distance.add(RIGHT, RIGHT)
    if token is not None:
        distance.differ(RIGHT[0], token)
    return distance.report()


def test_a_token_that_nobody_computed_is_red_though_the_logits_are_equal() -> None:
    report = compared(3)
    assert report["error_nats"] == 0.0
    assert report["token_regret_nats"] > MAX_REGRET
    assert not report["small"]
    assert not report["same_tokens"]


def test_a_near_tie_is_small_but_not_the_same() -> None:
    report = compared(2)
    assert report["small"]
    assert not report["same_tokens"]


def test_equal_steps_are_small_and_the_same() -> None:
    report = compared(None)
    assert report["small"]
    assert report["same_tokens"]


def read(self: DeviceLogprobs, logits: torch.Tensor, *place: Any) -> None:
    """Of the chosen token alone: the kernels take seconds in the interpreter."""
    _, rows, tokens, turn = place
    results = self._bucket_results[0] if turn is None else self._results[turn]
    results[rows, :1] = logits.log_softmax(-1).gather(1, tokens[:, None].long())


@pytest.mark.parametrize("stale", [False, True])
def test_second_graphs_with_stale_columns_are_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool) -> None:
    """The check itself, on lanes without a GPU; tokens are the likeliest ones."""
    for name, value in {"MAX_BUCKET": 8, "SECOND_TOKENS": 3, "PLAIN_STEPS": 2, "SECOND_ROWS": (7,)}.items():
        monkeypatch.setattr(check_graphs, name, value)
    monkeypatch.setattr(check_graphs, "mixed_lengths", lambda rows: [3, 15, 16, 17, 5, 6, 7][:rows])
    monkeypatch.setattr(DeviceSampler, "choose", lambda self, logits, inputs, rows, out: out.copy_(logits.argmax(-1)))
    directory = tiny_model(tmp_path, "qwen3", group=3)
    eager, own = cuda_lane_on_cpu(directory), cuda_lane_on_cpu(directory, buckets="1")
    right = LogitsAdjuster.start

    def start(self: LogitsAdjuster, starts: Sequence[RowStart]) -> None:
        kept = self._device_columns.clone()
        right(self, starts)
        if stale and self is own.executor._chooser._adjuster:
            self._device_columns.copy_(kept)

    monkeypatch.setattr(LogitsAdjuster, "start", start)
    monkeypatch.setattr(DeviceLogprobs, "read", read)
    build: Any = SimpleNamespace(gpu=SimpleNamespace(recorder=lambda: None), geometry=own.geometry)
    lines: list[dict[str, Any]] = []
    results: Any = SimpleNamespace(part=nullcontext, emit=lambda name, **line: lines.append(line))
    check_second(results, Pair(build, eager.executor, own.executor))
    assert [line["ok"] for line in lines] == [not stale], lines
