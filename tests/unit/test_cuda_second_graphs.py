"""Decode steps in buckets whose rows ask for penalties, `min_tokens` or log probabilities, beside eager ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.cuda.adjust import LogitsAdjuster
from engine.cuda.logprobs import DeviceLogprobs
from engine.cuda.sampling import DeviceSampler
from engine.messages import Sampling
from engine.step import RowContext, RowStart, StepPlan
from tests import golden
from tests.cuda_on_cpu import CudaDriver, cuda_lane_on_cpu
from tests.models import tiny_model

PROMPT = [7, 9, 9, 30, 31, 32, 33, 40, 41, 42, 300]
SLOTS = (4, 0, 6, 2, 1, 7)


class Asking(NamedTuple):
    """A request: parameters, and what its row start brings along."""

    sampling: Sampling = Sampling()
    context: RowContext | None = None


PENALIZED = Asking(Sampling(repetition_penalty=1.5, presence_penalty=1.8, logprobs=3), RowContext(PROMPT, [31, 31, 7]))
MIXED = [
    Asking(),
    PENALIZED,
    Asking(Sampling(temperature=0.8, top_k=20, frequency_penalty=1.5, seed=3), RowContext(PROMPT)),
    Asking(Sampling(min_tokens=3), RowContext(suppressed=list(range(0, 320, 2)), suppressed_until=len(PROMPT) + 3)),
    Asking(Sampling(logprobs=0)),
    Asking(Sampling(temperature=1.0, top_p=0.9, seed=9)),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", group=3)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's kernels take seconds in the interpreter."""

    def choose(self: DeviceSampler, logits: Tensor, inputs: object, rows: slice, out: Tensor) -> None:
        out.copy_(logits.argmax(-1))

    monkeypatch.setattr(DeviceSampler, "choose", choose)


def started(directory: Path, asked: Sequence[Asking], buckets: str | None) -> CudaDriver:
    """A driver whose rows have their prompts behind them; `lane` has the executor."""
    lane = cuda_lane_on_cpu(directory, buckets=buckets)
    driver: Any = CudaDriver(lane)
    driver.lane = lane
    begin(driver, SLOTS, asked)
    return driver  # type: ignore[no-any-return]


def begin(driver: golden.Driver, slots: Sequence[int], asked: Sequence[Asking]) -> None:
    """Start requests in `slots` with their prompts."""
    rows = []
    for slot, asking in zip(slots, asked, strict=False):
        rows.append(driver.start(slot))
        driver._starts[-1] = RowStart(slot, *asking)
    driver.step(chunks=[(row, PROMPT, True) for row in rows])


def decoded(driver: golden.Driver, steps: int, lag: int = 0) -> list[tuple[list[int], Any]]:
    """Tokens and log probabilities of steps launched `lag` ahead of what is read."""
    rows, handles, told = list(driver.rows.values()), [], []
    for step in range(steps + lag):
        if step < steps:
            for row in rows:
                driver.grow(row, row.length + 1)
                row.length += 1
            slots, lengths = [row.slot for row in rows], [row.length for row in rows]
            handles.append(driver.executor.launch(StepPlan(0, driver._starts, driver._table, slots, lengths, [])))
            driver._starts, driver._table = [], []
        if step >= lag:
            result = driver.executor.collect(handles.pop(0))
            told.append((result.tokens, result.logprobs))
    return told


def test_a_second_graph_computes_bit_by_bit_what_an_eager_step_does(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six rows in slices of four."""
    monkeypatch.setattr("engine.cuda.executor.LOGITS_ROWS", 4)
    told = []
    for buckets in (None, "6"):
        driver = started(directory, MIXED, buckets)
        driver.executor.tap = None
        told.append(decoded(driver, 3))
        assert driver.lane.reruns.replayed == driver.executor.graph_steps == (3 if buckets else 0)
        assert driver.executor.eager_steps == (0 if buckets else 3)
    assert told[0] == told[1]
    assert all(read.keys() == {1, 4} for _, read in told[0])
    # Suppressed, and then no more.
    assert all(tokens[3] % 2 for tokens, _ in told[0][:2])


@pytest.mark.usefixtures("greedy")
def test_rows_that_ask_for_nothing_and_padding_get_what_the_plain_graph_gives_them(directory: Path) -> None:
    logits, texts = [], []
    for last in (Asking(), PENALIZED):
        driver = started(directory, [Asking(), Asking(), last], "4")
        adjuster = driver.executor._chooser._adjuster
        marks = adjuster._marks.clone()
        texts.append([tokens for tokens, _ in decoded(driver, 4)])
        assert driver.executor.graph_steps == 4
        logits.append([torch.stack(driver.rows[slot].logits) for slot in SLOTS[:2]])
        changed = (adjuster._marks != marks).any(1).nonzero()[:, 0].tolist()
        assert changed == ([SLOTS[2]] if last is PENALIZED else [])
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    assert [tokens[:2] for tokens in texts[0]] == [tokens[:2] for tokens in texts[1]]
    assert [tokens[2] for tokens in texts[0]] != [tokens[2] for tokens in texts[1]]


@pytest.mark.usefixtures("greedy")
def test_a_step_takes_the_second_graph_only_while_a_row_asks(directory: Path) -> None:
    driver = started(directory, MIXED[3:4], "1,2")
    driver.executor.tap = None
    graphs = driver.executor.graphs
    assert graphs is not None
    assert [(key.bucket, key.asks) for key in graphs.captured()] == [
        (8, True),
        (8, False),
        (2, True),
        (2, False),
        (1, True),
        (1, False),
    ]
    taken = []
    right = graphs.run
    graphs.run = lambda key, work: (taken.append((key.bucket, key.asks)), right(key, work))  # type: ignore[assignment, func-returns-value]
    decoded(driver, 4)
    assert taken == [(1, True), (1, True), (1, False), (1, False)]


@pytest.mark.usefixtures("greedy")
def test_a_slot_that_asked_is_plain_for_its_next_request(directory: Path) -> None:
    texts = []
    for first in (PENALIZED, Asking()):
        driver = started(directory, [first, MIXED[4]], "2")
        decoded(driver, 2)
        begin(driver, SLOTS[:1], [Asking()])
        texts.append([tokens[0] for tokens, _ in decoded(driver, 3)])
    assert texts[0] == texts[1]


def flying(directory: Path, lag: int) -> list[tuple[list[int], Any]]:
    driver = started(directory, [PENALIZED, MIXED[4]], "2")
    driver.executor.tap = None
    return decoded(driver, 5, lag)


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.usefixtures("greedy")
def test_log_probabilities_of_steps_in_flight_do_not_mix(directory: Path, lag: int) -> None:
    assert flying(directory, lag) == flying(directory, 0)


@pytest.mark.usefixtures("greedy")
def test_a_result_turn_that_is_not_honoured_goes_red(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, expected = DeviceLogprobs.place, flying(directory, 0)
    monkeypatch.setattr(DeviceLogprobs, "place", lambda self, turn: right(self, torch.zeros_like(turn)))
    assert flying(directory, 1) != expected


@pytest.mark.usefixtures("greedy")
def test_stale_columns_go_red(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = flying(directory, 0)
    start = LogitsAdjuster.start

    def stale(self: LogitsAdjuster, starts: Sequence[RowStart]) -> None:
        kept = self._device_columns.clone()
        start(self, starts)
        self._device_columns.copy_(kept)

    monkeypatch.setattr(LogitsAdjuster, "start", stale)
    assert flying(directory, 0) != expected
