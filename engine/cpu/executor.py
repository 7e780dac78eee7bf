"""Computes steps on the CPU. A step has run when `launch` returns, so `collect` never waits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cpu.arena import Arena, PlanArena
from engine.cpu.attention import PagedAttention
from engine.cpu.inputs import StepInputs
from engine.cpu.linear import Gemm
from engine.models.decoder import Decoder
from engine.plan import PlanCapacity, PlanError
from engine.sampling import LOGITS_ROWS, Sampler
from engine.step import StepPlan, StepResult

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

    parameters: frozenset[str] = frozenset()

    def __init__(self, parts: ExecutorParts) -> None:
        self.parts = parts
        self.tap: Tap | None = None
        """Sees the logits of every step; for tests."""
        self._pages = parts.kv.shape[0]
        self._inputs = StepInputs(parts.capacity, parts.plan_arena)
        self._attention = PagedAttention(parts.kv, parts.capacity, parts.activations)
        self._decoder = parts.decoder
        self._sampler = Sampler(parts.logits)
        self._logits = parts.logits.take("logits")
        self._sampled_hidden = parts.logits.take("sampled_hidden")
        half = parts.kv.dtype != torch.float32
        self._head_output = parts.logits.take("head_output") if half else self._logits

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        """Run `plan`. Raises `PlanError` or `ValueError` before anything is written if it does not fit."""
        self._check(plan)
        self._inputs.write(plan)
        if not plan.tokens:
            return StepResult()
        self._attention.begin(self._inputs.pages)
        hidden = self._decoder.forward(self._inputs.token_ids, self._inputs.positions, self._attention)
        failed = self._failed_rows(plan, hidden)
        tokens = self._sample(plan.sampled_rows, hidden, failed)
        return StepResult(tokens, failed_rows=frozenset(failed))

    def collect(self, handle: object) -> StepResult:
        """The result that `launch` returned."""
        if not isinstance(handle, StepResult):
            raise TypeError(f"collect got {type(handle).__name__}, but wants what launch returned")
        return handle

    def _check(self, plan: StepPlan) -> None:
        self.parts.capacity.check(plan, self._pages)
        vocab = self._decoder.config.vocab_size
        for chunk in plan.chunks:
            tokens = np.asarray(chunk.tokens)
            for token in (int(tokens.min()), int(tokens.max())):
                if not 0 <= token < vocab:
                    raise PlanError(f"token id in the chunk of row {chunk.row}", token, vocab - 1)

    def _failed_rows(self, plan: StepPlan, hidden: Tensor) -> set[int]:
        """Row slots with a token whose `hidden [tokens, hidden]` is not finite."""
        bad = not_finite(hidden)
        if not bad:
            return set()
        ends = self._inputs.pages.query_indptr[1:]
        slots = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        return {slots[row] for row in torch.searchsorted(ends, torch.tensor(bad), right=True).tolist()}

    def _sample(self, rows: list[int], hidden: Tensor, failed: set[int]) -> list[int]:
        """Logits and tokens of the step's sampled rows, a slice of rows at a time.

        Adds to `failed` the row slots whose logits are not finite; they get some token of the vocabulary.
        """
        sampled: list[int] = []
        ends = self._inputs.sampled_tokens_at
        for begin in range(0, len(rows), self._logits.shape[0]):
            end = min(begin + self._logits.shape[0], len(rows))
            count = end - begin
            last = torch.index_select(hidden, 0, ends[begin:end], out=self._sampled_hidden[:count])
            output = self._decoder.logits(last, self._head_output[:count])
            logits = self._logits[:count]
            if output.dtype != logits.dtype:
                logits.copy_(output)
            if self.tap is not None:
                self.tap(rows[begin:end], logits)
            failed.update(rows[begin + row] for row in not_finite(logits))
            tokens = self._sampler.sample(logits, self._inputs.sampling(begin, end))
            self._inputs.keep(begin, end, tokens)
            sampled += tokens.tolist()
        return sampled
