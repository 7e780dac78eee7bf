"""Computes steps on a GPU, launched without waiting: `collect` waits for the copy of the sampled tokens alone."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.cuda.arena import DeviceArena
from engine.cuda.attention_plan import StepRows
from engine.cuda.choosing import NOTHING, Asked, TokenChooser, collected
from engine.cuda.decoder import CudaDecoder, StepAttention
from engine.cuda.driver import copy_stream
from engine.cuda.graphs import KINDS, DecodeGraphs, GraphKey
from engine.cuda.inputs import STAGES, Array, StepInputs, step_rows
from engine.messages import Logprobs
from engine.plan import PlanCapacity
from engine.step import OPTIONAL_PARAMETERS, Chunk, StepPlan, StepResult
from engine.step_checks import check_step_tokens

Tap = Callable[[Sequence[int], Tensor], None]
"""Gets the row slots of a slice of sampled rows and their logits, float32 `[rows, vocab]`, valid during the call."""

LOGITS_ROWS = 256
"""Rows whose logits are held at once: 156 MB of float32 at a vocabulary of 152k."""


class Attention(StepAttention, Protocol):
    """Attention of a step over the paged cache."""

    def begin(self, rows: StepRows, bucket: int | None = None, *, always_split: bool = False) -> None:
        """Plan a step; with `bucket`, its decode rows are filled up to so many with rows of one token.

        With `always_split`, all steps of a bucket have one variant. If the step does not fit, raises before anything is
        written.
        """
        ...

    @property
    def variant(self) -> Hashable:
        """What the launches for the decode rows of the step begun last depend on, beside the contents of buffers."""
        ...

    def probes(self, bucket: int, *, always_split: bool = False) -> list[StepRows]:
        """Short steps of decode rows, one for each variant that steps in the bucket have."""
        ...


def reserve_logits(arena: DeviceArena, capacity: PlanCapacity, vocab: int, hidden: int, dtype: torch.dtype) -> None:
    """Plan the logits of a slice of rows, what is needed to choose tokens from them, and where these are left."""
    # Whole vectors of 16 bytes: Triton compiles a kernel once more for a pointer that lies otherwise.
    all_rows = -(-capacity.max_rows // 4) * 4
    # By step in flight: sampled tokens, and how many tokens of each row are not finite.
    arena.reserve("results", (STAGES + 1, 2, all_rows), torch.int32)
    # A graph writes to one place, and then into the place of the step's turn.
    arena.reserve("bucket_results", (1, 2, all_rows), torch.int32)
    arena.reserve("sums", (all_rows,), torch.float32)
    rows = min(capacity.max_rows, LOGITS_ROWS)
    TokenChooser.reserve(arena, capacity, rows, vocab)
    behind = arena.during("choose")
    behind.reserve("sampled_hidden", (rows, hidden), dtype)
    behind.reserve("logits", (rows, vocab), torch.float32)


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
    padding: int
    """Rows computed beside the step's."""
    logprobs: Tensor | None
    """Of the sampled rows, on the host; None if none asks for them."""
    asked: Asked
    prompt_logprobs: Mapping[int, Logprobs]


class CudaExecutor:
    """`engine.step.Executor` on one GPU. Block table and last tokens stay on the device between steps."""

    parameters = OPTIONAL_PARAMETERS

    def __init__(self, parts: ExecutorParts) -> None:
        self.parts = parts
        self.tap: Tap | None = None
        """Sees the logits of every step; for tests."""
        self.inputs = parts.inputs
        self._logits = parts.logits.take("logits")
        self._sampled_hidden = parts.logits.take("sampled_hidden")
        self._vocab = parts.decoder.parts.config.vocab_size
        self._chooser = TokenChooser(parts.logits, parts.inputs, self._vocab)
        device = self._logits.device
        self._on_gpu = device.type == "cuda"
        self._results = parts.logits.take("results")
        self._host_results = torch.zeros(self._results.shape, dtype=torch.int32, pin_memory=self._on_gpu)
        self._copies = copy_stream(device) if self._on_gpu else None
        self._turn = 0
        self.graphs: DecodeGraphs | None = None
        """Captured decode steps; None launches all steps kernel by kernel."""
        self._bucket_results = parts.logits.take("bucket_results")
        self._sums = parts.logits.take("sums")
        self._launched_eagerly = 0

    @property
    def graph_steps(self) -> int:
        """Decode steps that a graph computed; a decode step has no chunks."""
        return 0 if self.graphs is None else self.graphs.replayed

    @property
    def eager_steps(self) -> int:
        """Decode steps that were launched kernel by kernel."""
        return self._launched_eagerly + (0 if self.graphs is None else self.graphs.eager)

    @torch.inference_mode()
    def capture(self, graphs: DecodeGraphs) -> None:
        """Capture every bucket, the largest first, and use the graphs from now on. No step may be in flight.

        Each has a graph for every way to compute steps that ask for tokens alone, and one for steps in which some row
        asks for more. The steps run once each, with all rows in the padding slot: nothing of the pool is touched but
        its page 0.
        """
        slot = self.parts.capacity.max_bucket
        for bucket, asks in product(reversed(graphs.ladder), KINDS):
            for rows in self.parts.attention.probes(bucket, always_split=asks):
                lengths = rows.decode_lengths.tolist()
                self._prepare(StepPlan(0, [], [], [slot] * len(lengths), lengths, []), rows, bucket, asks)
                graphs.capture(self._key(bucket, asks), partial(self._decode, bucket, asks))
        self.graphs = graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queue `plan`. Raises `PlanError` or `ValueError` before anything is written if it does not fit."""
        self._check(plan)
        rows, bucket = step_rows(plan), self._bucket(plan)
        asks = bucket is not None and self._asks(plan)
        self._prepare(plan, rows, bucket, asks)
        asked, prompt_logprobs = self._chooser.asked(plan), {}
        if bucket is not None and self.graphs is not None:
            self.graphs.run(self._key(bucket, asks), partial(self._decode, bucket, asks))
            if self.tap is not None:
                self.tap(plan.decode_rows, self._logits[: len(plan.decode_rows)])
            return self._fetch(plan, bucket - len(plan.decode_rows), asked, {})
        self._launched_eagerly += bool(plan.decode_rows) and not plan.chunks
        if plan.tokens:
            tokens = self.inputs.by_token
            hidden = self.parts.decoder.forward(
                tokens("token_ids"), tokens("positions"), tokens("slot_mapping"), self.parts.attention
            )
            self._count_faulty(hidden)
            self._sample(plan, hidden, asked)
            prompt_logprobs = self._read_prompts(plan, hidden)
        return self._fetch(plan, 0, asked, prompt_logprobs)

    def collect(self, handle: object) -> StepResult:
        """Wait for a launched step and return its tokens."""
        if not isinstance(handle, Launched):
            raise TypeError(f"collect got {type(handle).__name__}, but wants what launch returned")
        if handle.ready is not None:
            handle.ready.synchronize()
        faulty = frozenset(slot for slot, count in zip(handle.slots, handle.faulty.tolist(), strict=True) if count)
        logprobs = {} if handle.logprobs is None else collected(handle.logprobs, handle.asked.wishes)
        return StepResult(handle.tokens.tolist(), handle.padding, faulty, logprobs, handle.prompt_logprobs)

    def _check(self, plan: StepPlan) -> None:
        self.parts.capacity.check(plan, self.parts.pages)
        check_step_tokens(plan, self._vocab, self.parts.capacity)
        self._chooser.logprobs.check(plan)

    def _bucket(self, plan: StepPlan) -> int | None:
        """The bucket whose graph computes `plan`; None for a step that no graph computes."""
        if self.graphs is None or plan.chunks or not plan.decode_rows:
            return None
        bucket = self.graphs.ladder.bucket(len(plan.decode_rows))
        # A tap must see all logits of the step at once.
        return bucket if self.tap is None or bucket <= self._logits.shape[0] else None

    def _asks(self, plan: StepPlan) -> bool:
        """True if a row of the decode step may ask for more than a token."""
        return self._chooser.asked(plan) != NOTHING or any(start.row in plan.decode_rows for start in plan.starts)

    def _prepare(self, plan: StepPlan, rows: StepRows, bucket: int | None, asks: bool) -> None:
        """Plan the attention and bring the step to the device: all that comes before its first kernel."""
        if plan.tokens:
            # One way to compute the attention means one graph of this kind for each bucket.
            self.parts.attention.begin(rows, bucket, always_split=asks)
        self._turn = (self._turn + 1) % self._results.shape[0]
        self.inputs.write(plan, rows, turn=self._turn, bucket=bucket)
        self._chooser.start(plan.starts)

    def _key(self, bucket: int, asks: bool) -> GraphKey:
        return GraphKey(bucket, self.parts.attention.variant, asks)

    def _decode(self, bucket: int, asks: bool) -> None:
        """Compute the prepared decode step of `bucket` rows, its tokens and faults in the place of its turn.

        If it `asks`, also what rows may ask for beside a token: rows that do not, padding among them, are left alone.
        May be captured: it reads nothing of the host but these two, the step's variant of attention and addresses.
        """
        asked = Asked.anything(bucket) if asks else NOTHING
        self.inputs.derive(bucket)
        tokens = self.inputs.by_token
        hidden = self.parts.decoder.forward(
            tokens("token_ids"), tokens("positions"), tokens("slot_mapping"), self.parts.attention
        )
        chosen, faulty = self._bucket_results[0, :, :bucket]
        # A sum is finite or it is not: minus itself it is 0, or not a number.
        sums = torch.sum(hidden, dim=-1, dtype=torch.float32, out=self._sums[:bucket])
        torch.ne(torch.sub(sums, sums, out=sums), 0, out=faulty)
        for begin in range(0, bucket, self._logits.shape[0]):
            end = min(begin + self._logits.shape[0], bucket)
            logits = self._logits[: end - begin]
            project = partial(self._project, hidden[begin:end], logits)
            project()
            self._chooser.choose(logits, slice(begin, end), chosen[begin:end], asked, turn=None, again=project)
        turn = self.inputs.staged["result_turn"]
        self._results.index_copy_(0, turn, self._bucket_results)
        if asks:
            self._chooser.logprobs.place(turn)

    def _project(self, hidden: Tensor, logits: Tensor) -> None:
        """Write the logits of `hidden [rows, hidden]`."""
        head = self.parts.decoder.parts.weights.head
        if hidden.dtype == torch.float32:
            torch.mm(hidden, head.t(), out=logits)
        else:
            # Rounded to bfloat16, every second logit of a large vocabulary would tie with another.
            torch.mm(hidden, head.t(), out_dtype=torch.float32, out=logits)

    def _count_faulty(self, hidden: Tensor) -> None:
        """Count each row's tokens whose `hidden [tokens, hidden]` is not finite."""
        # Such a number makes the sum of its token so.
        counts = (~hidden.sum(dim=-1, dtype=torch.float32).isfinite()).cumsum(0, dtype=torch.int32)
        rows = self.inputs.rows
        ends = counts[self.inputs.staged["query_indptr"][1 : rows + 1] - 1]
        faulty = self._results[self._turn, 1, :rows]
        faulty.copy_(ends)
        faulty[1:] -= ends[:-1]

    def _sample(self, plan: StepPlan, hidden: Tensor, asked: Asked) -> None:
        """Logits and tokens of the step's sampled rows, a slice of rows at a time."""
        slots = plan.sampled_rows
        for begin in range(0, len(slots), self._logits.shape[0]):
            end = min(begin + self._logits.shape[0], len(slots))
            ends = self.inputs.sampled_rows("sampled_tokens_at", begin, end)
            last = torch.index_select(hidden, 0, ends, out=self._sampled_hidden[: end - begin])
            logits = self._logits[: end - begin]
            project = partial(self._project, last, logits)
            project()
            if self.tap is not None:
                self.tap(slots[begin:end], logits)
            tokens = self._results[self._turn, 0, begin:end]
            self._chooser.choose(logits, slice(begin, end), tokens, asked, turn=self._turn, again=project)

    def _read_prompts(self, plan: StepPlan, hidden: Tensor) -> dict[int, Logprobs]:
        """Log probabilities of the chunks' targets, by place in the plan's chunks. Waits for them."""
        begin, read = len(plan.decode_rows), {}
        for place, chunk in enumerate(plan.chunks):
            if chunk.targets:
                read[place] = self._read_targets(chunk, hidden[begin : begin + len(chunk.targets)])
            begin += len(chunk.tokens)
        return read

    def _read_targets(self, chunk: Chunk, hidden: Tensor) -> Logprobs:
        """A slice of rows at a time, as for sampling: a prompt's logits are never held at once."""
        read, count = Logprobs(b""), self._logits.shape[0]
        for begin in range(0, len(chunk.targets), count):
            targets = chunk.targets[begin : begin + count]
            logits = self._logits[: len(targets)]
            self._project(hidden[begin : begin + count], logits)
            read = read.joined(self._chooser.logprobs.read_now(logits, targets, chunk.top_logprobs))
        return read

    def _fetch(self, plan: StepPlan, padding: int, asked: Asked, prompt_logprobs: Mapping[int, Logprobs]) -> Launched:
        source, target = self._results[self._turn], self._host_results[self._turn]
        slots = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        tokens, faulty = target[0, : len(plan.sampled_rows)], target[1, : len(slots)]
        if self._copies is None:
            target.copy_(source)
            logprobs = self._fetch_logprobs(asked, len(tokens))
            return Launched(
                tokens.numpy().copy(), faulty.numpy().copy(), slots, None, padding, logprobs, asked, prompt_logprobs
            )
        self._copies.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            logprobs = self._fetch_logprobs(asked, len(tokens))
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return Launched(tokens.numpy(), faulty.numpy(), slots, ready, padding, logprobs, asked, prompt_logprobs)

    def _fetch_logprobs(self, asked: Asked, count: int) -> Tensor | None:
        return self._chooser.logprobs.fetch(self._turn, count) if asked.wishes else None
