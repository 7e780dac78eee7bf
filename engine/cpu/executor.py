"""Computes steps on the CPU. A step has run when `launch` returns, so `collect` never waits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cpu.adjust import LogitsAdjuster
from engine.cpu.arena import Arena, PlanArena
from engine.cpu.attention import PagedAttention
from engine.cpu.inputs import StepInputs
from engine.cpu.linear import Gemm
from engine.logprobs import LogprobReader
from engine.messages import Logprobs
from engine.models.decoder import Decoder
from engine.plan import PlanCapacity
from engine.sampling import LOGITS_ROWS, Sampler
from engine.step import OPTIONAL_PARAMETERS, Chunk, StepPlan, StepResult
from engine.step_checks import check_step_tokens

Tap = Callable[[Sequence[int], Tensor], None]
"""Gets the row slots of a slice of sampled rows and their logits, float32 `[rows, vocab]`, valid during the call."""


def logits_rows(capacity: PlanCapacity) -> int:
    """Rows whose logits are held at once."""
    return min(capacity.max_rows, LOGITS_ROWS)


def reserve_logits(arena: Arena, capacity: PlanCapacity, vocab: int, hidden: int, dtype: torch.dtype) -> None:
    """Plan the logits of a slice of rows and the sampler's scratch."""
    rows = logits_rows(capacity)
    arena.reserve("sampled_hidden", (rows, hidden), dtype)
    arena.reserve("logits", (rows, vocab), torch.float32)
    if dtype != torch.float32:
        arena.reserve("head_output", (rows, vocab), dtype)
    Sampler.reserve(arena, vocab)


def not_finite(values: Tensor) -> list[int]:
    """Which rows of `values [rows, n]` hold a number that is not finite."""
    # Such a number makes the sum of its row so: adding up is some hundred times cheaper than looking at each.
    if bool(values.sum(dim=-1, dtype=torch.float32).isfinite().all()):
        return []
    return (~values.isfinite().all(dim=-1)).nonzero().flatten().tolist()


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """What a `CpuExecutor` computes with; `engine.cpu.lane` builds it."""

    capacity: PlanCapacity
    kv: Tensor
    """`[pages, layers, 2, page_size, kv_heads, head_dim]`; page 0 is the padding page."""
    plan_arena: PlanArena
    activations: Arena
    logits: Arena
    decoder: Decoder
    gemm: Gemm


class CpuExecutor:
    """`engine.step.Executor` on the CPU."""

    parameters = OPTIONAL_PARAMETERS

    def __init__(self, parts: ExecutorParts) -> None:
        self.parts = parts
        self.tap: Tap | None = None
        """Sees the logits of every step; for tests."""
        self._pages = parts.kv.shape[0]
        self._inputs = StepInputs(parts.capacity, parts.plan_arena)
        self._attention = PagedAttention(parts.kv, parts.capacity, parts.activations)
        self._decoder = parts.decoder
        self._sampler = Sampler(parts.logits)
        self._adjuster = LogitsAdjuster(parts.plan_arena)
        self._reader = LogprobReader(parts.logits)
        self._logits = parts.logits.take("logits")
        self._sampled_hidden = parts.logits.take("sampled_hidden")
        half = parts.kv.dtype != torch.float32
        self._head_output = parts.logits.take("head_output") if half else self._logits

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        """Run `plan`. Raises `PlanError` or `ValueError` before anything is written if it does not fit."""
        self._check(plan)
        self._inputs.write(plan)
        for start in plan.starts:
            self._adjuster.start(start)
        if not plan.tokens:
            return StepResult()
        self._attention.begin(self._inputs.pages)
        hidden = self._decoder.forward(self._inputs.token_ids, self._inputs.positions, self._attention)
        failed = self._failed_rows(plan, hidden)
        logprobs: dict[int, Logprobs] = {}
        tokens = self._sample(plan.sampled_rows, hidden, failed, logprobs)
        prompt_logprobs = self._read_prompts(plan, hidden)
        return StepResult(tokens, 0, frozenset(failed), logprobs, prompt_logprobs)

    def collect(self, handle: object) -> StepResult:
        """The result that `launch` returned."""
        if not isinstance(handle, StepResult):
            raise TypeError(f"collect got {type(handle).__name__}, but wants what launch returned")
        return handle

    def _check(self, plan: StepPlan) -> None:
        self.parts.capacity.check(plan, self._pages)
        check_step_tokens(plan, self._decoder.config.vocab_size, self.parts.capacity)

    def _failed_rows(self, plan: StepPlan, hidden: Tensor) -> set[int]:
        """Row slots with a token whose `hidden [tokens, hidden]` is not finite."""
        bad = not_finite(hidden)
        if not bad:
            return set()
        ends = self._inputs.pages.query_indptr[1:]
        slots = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        return {slots[row] for row in torch.searchsorted(ends, torch.tensor(bad), right=True).tolist()}

    def _sample(self, rows: list[int], hidden: Tensor, failed: set[int], logprobs: dict[int, Logprobs]) -> list[int]:
        """Logits and tokens of the step's sampled rows, a slice of rows at a time.

        Adds to `failed` the row slots whose logits are not finite; they get some token of the vocabulary. Adds to
        `logprobs`, by place, what rows ask for.
        """
        sampled: list[int] = []
        ends = self._inputs.sampled_tokens_at
        for begin in range(0, len(rows), self._logits.shape[0]):
            end = min(begin + self._logits.shape[0], len(rows))
            slots = rows[begin:end]
            last = torch.index_select(hidden, 0, ends[begin:end], out=self._sampled_hidden[: end - begin])
            logits = self._head(last)
            if self.tap is not None:
                self.tap(slots, logits)
            failed.update(slots[row] for row in not_finite(logits))
            parameters = self._inputs.sampling(begin, end)
            undo = self._adjuster.adjust(logits, slots, parameters.position)
            tokens = self._sampler.sample(logits, parameters)
            self._inputs.keep(begin, end, tokens)
            sampled += tokens.tolist()
            self._adjuster.keep(slots, sampled[begin:])
            self._adjuster.restore(logits, undo)
            for row, top in self._adjuster.wishes(slots):
                logprobs[begin + row] = self._reader.read(logits[row : row + 1], tokens[row : row + 1], top)
        return sampled

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits, float32 `[rows, vocab]`, of at most a slice of rows; valid until the next call."""
        output = self._decoder.logits(hidden, self._head_output[: len(hidden)])
        logits = self._logits[: len(hidden)]
        if output.dtype != logits.dtype:
            logits.copy_(output)
        return logits

    def _read_prompts(self, plan: StepPlan, hidden: Tensor) -> dict[int, Logprobs]:
        """Log probabilities of the chunks' targets, by place in the plan's chunks."""
        begin, read = len(plan.decode_rows), {}
        for place, chunk in enumerate(plan.chunks):
            if chunk.targets:
                read[place] = self._read_targets(chunk, hidden[begin : begin + len(chunk.targets)])
            begin += len(chunk.tokens)
        return read

    def _read_targets(self, chunk: Chunk, hidden: Tensor) -> Logprobs:
        """A slice of rows at a time, as for sampling: a prompt's logits are never held at once."""
        targets, count = torch.from_numpy(np.asarray(chunk.targets, dtype=np.int64)), self._logits.shape[0]
        read = Logprobs(b"")
        for begin in range(0, len(targets), count):
            logits = self._head(hidden[begin : begin + count])
            read = read.joined(self._reader.read(logits, targets[begin : begin + count], chunk.top_logprobs))
        return read
