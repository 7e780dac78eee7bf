"""Computes steps on a GPU, launched without waiting: `collect` waits for the copy of the sampled tokens alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.cuda.arena import DeviceArena
from engine.cuda.attention_plan import StepRows
from engine.cuda.decoder import CudaDecoder, StepAttention
from engine.cuda.inputs import STAGES, Array, StepInputs, step_rows
from engine.cuda.sampling import DeviceSampler
from engine.plan import PlanCapacity, PlanError
from engine.step import StepPlan, StepResult

Tap = Callable[[Sequence[int], Tensor], None]
"""Gets the row slots of a slice of sampled rows and their logits, float32 `[rows, vocab]`, valid during the call."""

LOGITS_ROWS = 256
"""Rows whose logits are held at once: 156 MB of float32 at a vocabulary of 152k."""


class Attention(StepAttention, Protocol):
    """Attention of a step over the paged cache."""

    def begin(self, rows: StepRows) -> None:
        """Plan a step. Raises before anything is written if it does not fit."""
        ...


def reserve_logits(arena: DeviceArena, capacity: PlanCapacity, vocab: int, hidden: int, dtype: torch.dtype) -> None:
    """Plan the logits of a slice of rows, and the sampler's scratch."""
    rows = min(capacity.max_rows, LOGITS_ROWS)
    arena.reserve("sampled_hidden", (rows, hidden), dtype)
    arena.reserve("logits", (rows, vocab), torch.float32)
    DeviceSampler.reserve(arena, rows, vocab)


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """What a `CudaExecutor` computes with; `engine.cuda.lane` builds it."""

    capacity: PlanCapacity
    pages: int
    """Pages of the pool, the padding page 0 included."""
    inputs: StepInputs
    attention: Attention
    decoder: CudaDecoder
    logits: DeviceArena


class Launched(NamedTuple):
    """A step in flight: where its tokens will be on the host, and the event that says they are there."""

    tokens: Array
    """int32 `[sampled rows]`."""
    faulty: Array
    """int32 `[rows]`: tokens of each row of the step whose numbers are not finite."""
    slots: list[int]
    """Row slot of each row of the step."""
    ready: "torch.cuda.Event | None"


class CudaExecutor:
    """`engine.step.Executor` on one GPU. Block table and last tokens stay on the device between steps."""

    parameters: frozenset[str] = frozenset()

    def __init__(self, parts: ExecutorParts) -> None:
        self.parts = parts
        self.tap: Tap | None = None
        """Sees the logits of every step; for tests."""
        self.inputs = parts.inputs
        self._logits = parts.logits.take("logits")
        self._sampled_hidden = parts.logits.take("sampled_hidden")
        self._sampler = DeviceSampler(parts.logits)
        self._vocab = parts.decoder.parts.config.vocab_size
        device = self._logits.device
        self._on_gpu = device.type == "cuda"
        rows = parts.capacity.max_rows
        # By step in flight: sampled tokens, and how many tokens of each row are not finite.
        self._results = torch.zeros((STAGES + 1, 2, rows), dtype=torch.int32, device=device)
        self._host_results = torch.zeros((STAGES + 1, 2, rows), dtype=torch.int32, pin_memory=self._on_gpu)
        self._copies = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._turn = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queue `plan`. Raises `PlanError` or `ValueError` before anything is written if it does not fit."""
        self._check(plan)
        rows = step_rows(plan)
        if plan.tokens:
            self.parts.attention.begin(rows)
        self.inputs.write(plan, rows)
        self._turn = (self._turn + 1) % self._results.shape[0]
        if plan.tokens:
            tokens = self.inputs.by_token
            hidden = self.parts.decoder.forward(
                tokens("token_ids"), tokens("positions"), tokens("slot_mapping"), self.parts.attention
            )
            self._count_faulty(hidden)
            self._sample(plan, hidden)
        return self._fetch(plan)

    def collect(self, handle: object) -> StepResult:
        """Wait for a launched step and return its tokens."""
        if not isinstance(handle, Launched):
            raise TypeError(f"collect got {type(handle).__name__}, but wants what launch returned")
        if handle.ready is not None:
            handle.ready.synchronize()
        faulty = frozenset(slot for slot, count in zip(handle.slots, handle.faulty.tolist(), strict=True) if count)
        return StepResult(handle.tokens.tolist(), failed_rows=faulty)

    def _check(self, plan: StepPlan) -> None:
        self.parts.capacity.check(plan, self.parts.pages)
        for chunk in plan.chunks:
            tokens = np.asarray(chunk.tokens)
            for token in (int(tokens.min()), int(tokens.max())):
                if not 0 <= token < self._vocab:
                    raise PlanError(f"token id in the chunk of row {chunk.row}", token, self._vocab - 1)

    def _count_faulty(self, hidden: Tensor) -> None:
        """Count each row's tokens whose `hidden [tokens, hidden]` is not finite."""
        # Such a number makes the sum of its token so.
        counts = (~hidden.sum(dim=-1, dtype=torch.float32).isfinite()).cumsum(0, dtype=torch.int32)
        rows = self.inputs.rows
        ends = counts[self.inputs.staged["query_indptr"][1 : rows + 1] - 1]
        faulty = self._results[self._turn, 1, :rows]
        faulty.copy_(ends)
        faulty[1:] -= ends[:-1]

    def _sample(self, plan: StepPlan, hidden: Tensor) -> None:
        """Logits and tokens of the step's sampled rows, a slice of rows at a time."""
        slots = plan.sampled_rows
        head = self.parts.decoder.parts.weights.head
        for begin in range(0, len(slots), self._logits.shape[0]):
            end = min(begin + self._logits.shape[0], len(slots))
            ends = self.inputs.sampled_rows("sampled_tokens_at", begin, end)
            last = torch.index_select(hidden, 0, ends, out=self._sampled_hidden[: end - begin])
            logits = self._logits[: end - begin]
            if last.dtype == torch.float32:
                torch.mm(last, head.t(), out=logits)
            else:
                # Rounded to bfloat16, every second logit of a large vocabulary would tie with another.
                torch.mm(last, head.t(), out_dtype=torch.float32, out=logits)
            if self.tap is not None:
                self.tap(slots[begin:end], logits)
            tokens = self._results[self._turn, 0, begin:end]
            self._sampler.choose(logits, self.inputs, slice(begin, end), tokens)
            self.inputs.keep(begin, end, tokens)

    def _fetch(self, plan: StepPlan) -> Launched:
        source, target = self._results[self._turn], self._host_results[self._turn]
        slots = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        tokens, faulty = target[0, : len(plan.sampled_rows)], target[1, : len(slots)]
        if self._copies is None:
            target.copy_(source)
            return Launched(tokens.numpy().copy(), faulty.numpy().copy(), slots, None)
        self._copies.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return Launched(tokens.numpy(), faulty.numpy(), slots, ready)
