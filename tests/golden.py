"""The golden gate: greedy tokens and logits of an executor against `transformers`, float32, teacher-forced.

`reference` runs transformers once, `Driver` brings a prompt to the executor (chunked, warm, with mates) and `compare`
holds both against each other. Forcing transformers' tokens on the executor keeps the two texts aligned where the top-1
gap is too small to decide.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import CoreConfig
from engine.cpu.executor import CpuExecutor
from engine.cpu.lane import CpuLane, create_cpu_lane
from engine.messages import Sampling
from engine.step import Chunk, RowStart, StepPlan, StepResult
from kv.table import TableUpdate

MIN_GAP = 1e-3
"""A token must be the same wherever the best logit leads by more than this."""
MAX_ERROR = 1e-4
"""Largest |difference| of a logit, as a fraction of the largest |logit|."""
TOKENS = 64


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers says: `logits[i]` predicts `tokens[i]`, which follows the prompt and the tokens before it."""

    prompt: list[int]
    tokens: list[int]
    logits: Tensor

    def first(self, count: int) -> "Reference":
        """The same for the first `count` tokens only."""
        return Reference(self.prompt, self.tokens[:count], self.logits[:count])


class GateError(AssertionError):
    """The executor and transformers disagree."""


def reference_model(directory: Path) -> torch.nn.Module:
    """The model of `directory` in transformers, float32, plain attention."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def reference(
    model: torch.nn.Module, prompt: Sequence[int], count: int = TOKENS, draft: Sequence[int] = ()
) -> Reference:
    """Greedy continuation of `prompt` by `count` tokens with a KV cache, end tokens ignored.

    `draft` is a guess of it, verified in one pass: what it says after its first wrong token has no influence.
    """
    output = _forward(model, [*prompt, *draft[: count - 1]], None)
    logits = [row.float() for row in output.logits[0, len(prompt) - 1 :]]
    tokens = [int(row.argmax()) for row in logits]
    agreed = next((index for index, token in enumerate(draft[: count - 1]) if token != tokens[index]), len(tokens) - 1)
    cache = output.past_key_values
    if rejected := len(tokens) - 1 - agreed:
        cache.crop(-rejected)
    del tokens[agreed + 1 :], logits[agreed + 1 :]
    while len(tokens) < count:
        output = _forward(model, tokens[-1:], cache)
        logits.append(output.logits[0, -1].float())
        tokens.append(int(logits[-1].argmax()))
    return Reference(list(prompt), tokens, torch.stack(logits))


def _forward(model: torch.nn.Module, ids: list[int], cache: object) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer transformers rename past_key_values
        return model(torch.tensor([ids]), past_key_values=cache, use_cache=True)


def compare(expected: Reference, logits: Tensor, tokens: Sequence[int]) -> None:
    """Raise `GateError` at the first of the executor's `tokens` or `logits` `[tokens, vocab]` out of tolerance."""
    if len(tokens) != len(expected.tokens):
        raise GateError(f"{len(tokens)} tokens, but {len(expected.tokens)} expected")
    for index, (own, other) in enumerate(zip(logits, expected.logits, strict=True)):
        best = other.topk(2).values
        gap = float(best[0] - best[1])
        if tokens[index] != expected.tokens[index] and gap > MIN_GAP:
            raise GateError(f"token {index} is {tokens[index]}, not {expected.tokens[index]}; the gap is {gap:.2e}")
        error, bound = float((own - other).abs().max()), MAX_ERROR * float(other.abs().max())
        if not error <= bound:
            raise GateError(f"logits of token {index} differ by {error:.2e}, more than {bound:.2e}")


def lane(directory: Path, page_size: int = 16, **settings: object) -> CpuLane:
    """A small float32 CPU lane for the model in `directory`."""
    defaults = {"kv_cache_memory": "16MiB", "max_step_tokens": 1024, "max_bucket": 8, "threads": 1, "dtype": "float32"}
    return create_cpu_lane(
        CoreConfig(model=str(directory), kv_page_size=page_size, **{**defaults, **settings}), directory
    )


@dataclass
class Row:
    """One request as the driver sees it."""

    slot: int
    pages: list[int]
    length: int = 0
    logits: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Driver:
    """Drives a `CpuExecutor` with hand-made step plans: rows, pages and tokens are the test's choice."""

    def __init__(self, lane: CpuLane) -> None:
        self.executor: CpuExecutor = lane.executor
        self.page_size = lane.geometry.page_size
        self.rows: dict[int, Row] = {}
        self._next_page = 1
        self._step = 0
        self._starts: list[RowStart] = []
        self._table: list[TableUpdate] = []
        self.executor.tap = self._see

    def _see(self, slots: Sequence[int], logits: Tensor) -> None:
        for slot, row in zip(slots, logits, strict=True):
            self.rows[slot].logits.append(row.clone())

    def start(self, slot: int, shared: Sequence[int] = (), sampling: Sampling | None = None) -> Row:
        """Give `slot` to a new request whose first pages, already computed, are `shared`."""
        row = Row(slot, list(shared), len(shared) * self.page_size)
        self.rows[slot] = row
        self._starts.append(RowStart(slot, sampling or Sampling()))
        self._table += [TableUpdate(slot, index, page) for index, page in enumerate(shared)]
        return row

    def grow(self, row: Row, length: int) -> None:
        """Give `row` the pages that `length` tokens need; the pages of neighbouring calls interleave in the pool."""
        while len(row.pages) * self.page_size < length:
            self._table.append(TableUpdate(row.slot, len(row.pages), self._next_page))
            row.pages.append(self._next_page)
            self._next_page += 1

    def step(self, decode: Sequence[Row] = (), chunks: Sequence[tuple[Row, Sequence[int], bool]] = ()) -> StepResult:
        """One step: `decode` rows go on by their last token, `chunks` are (row, tokens, samples)."""
        for row in decode:
            self.grow(row, row.length + 1)
            row.length += 1
        described = []
        for row, tokens, samples in chunks:
            self.grow(row, row.length + len(tokens))
            described.append(Chunk(row.slot, row.length, list(tokens), samples))
            row.length += len(tokens)
        plan = StepPlan(
            self._step,
            self._starts,
            self._table,
            [row.slot for row in decode],
            [row.length for row in decode],
            described,
        )
        self._starts, self._table, self._step = [], [], self._step + 1
        result = self.executor.collect(self.executor.launch(plan))
        for slot, token in zip(plan.sampled_rows, result.tokens, strict=True):
            self.rows[slot].tokens.append(token)
        return result

    def prefill(self, row: Row, prompt: Sequence[int], chunk: int, mates: Sequence[Row] = ()) -> None:
        """Compute what `row` lacks of `prompt` in chunks, with `mates` decoding along; the last one samples."""
        while row.length < len(prompt):
            part = prompt[row.length : row.length + chunk]
            self.step(mates, [(row, part, row.length + len(part) == len(prompt))])

    def force(self, row: Row, token: int) -> None:
        """Make `token` the one that `row` continues with."""
        self.executor.parts.plan_arena.array("last_tokens")[row.slot] = token

    def follow(self, row: Row, expected: Reference, mates: Sequence[Row] = ()) -> None:
        """Decode along `expected` until `row` has as many tokens, then `compare`."""
        while len(row.tokens) < len(expected.tokens):
            self.force(row, expected.tokens[len(row.tokens) - 1])
            self.step([row, *mates])
        compare(expected, torch.stack(row.logits), row.tokens)


def check_cold(lane: CpuLane, expected: Reference, chunk: int = 1000) -> None:
    """The gate for one request alone, its prompt in chunks of `chunk` tokens."""
    driver = Driver(lane)
    row = driver.start(0)
    driver.prefill(row, expected.prompt, chunk)
    driver.follow(row, expected)


def check_warm(lane: CpuLane, expected: Reference) -> None:
    """The gate for a request whose whole prompt pages but the last token's come from another request."""
    driver = Driver(lane)
    owner = driver.start(1)
    driver.prefill(owner, expected.prompt, 1000)
    driver.step([owner])
    shared = owner.pages[: (len(expected.prompt) - 1) // driver.page_size]
    row = driver.start(0, shared)
    driver.prefill(row, expected.prompt, 1000, [owner])
    driver.follow(row, expected, [owner])


def check_batched(lane: CpuLane, expected: Sequence[Reference], chunk: int = 16) -> None:
    """The gate for requests that start one after another and decode together; the later ones' chunks join the steps."""
    driver = Driver(lane)
    rows: list[Row] = []
    for slot, one in enumerate(expected):
        row = driver.start(slot + 1)
        while row.length < len(one.prompt):
            part = one.prompt[row.length : row.length + chunk]
            _step_forced(driver, rows, expected, [(row, part, row.length + len(part) == len(one.prompt))])
        rows.append(row)
    while any(len(row.tokens) < len(one.tokens) for row, one in zip(rows, expected, strict=True)):
        _step_forced(driver, rows, expected)
    for row, one in zip(rows, expected, strict=True):
        count = len(one.tokens)
        compare(one, torch.stack(row.logits[:count]), row.tokens[:count])


def _step_forced(
    driver: Driver,
    rows: Sequence[Row],
    expected: Sequence[Reference],
    chunks: Sequence[tuple[Row, Sequence[int], bool]] = (),
) -> None:
    running = [(row, one) for row, one in zip(rows, expected, strict=False) if len(row.tokens) < len(one.tokens)]
    for row, one in running:
        driver.force(row, one.tokens[len(row.tokens) - 1])
    driver.step([row for row, _ in running], chunks)
