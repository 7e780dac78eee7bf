"""Decode steps as CUDA graphs against the same steps launched kernel by kernel, and what graphs cost and save.

    python -m tests.gpu.check_graphs [--shape qwen3-4b] [--only equal,second,long,lag,time,idle,allocations,faults]

`long` feeds both sides the same tokens for 600 steps and holds the graphs' logits against the other's. The bound is
what bfloat16 itself is off in the golden gate: 7 rows in a bucket of 8 take other matrix products than 7 rows.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine.config import CoreConfig
from engine.cuda.attention import FlashInferAttention
from engine.cuda.attention_plan import StepRows
from engine.cuda.executor import CudaExecutor
from engine.cuda.gpu import CudaGpu
from engine.cuda.graphs import DecodeGraphs, GraphKey
from engine.cuda.inputs import StepInputs
from engine.cuda.lane import CudaBuild, prepare
from engine.ladder import Ladder
from engine.messages import Sampling
from engine.models.config import ModelConfig, load_model_config
from engine.step import RowContext, RowStart, StepPlan
from tests.cuda_on_cpu import CudaDriver
from tests.golden import Row
from tests.gpu.harness import Results
from tests.gpu.shaped import shaped_weights, write_config

MAX_ERROR = 0.035
"""Nats: the mean error of transformers' bfloat16 over the best 8 tokens in the gate of Qwen3-4B's shape."""
MAX_REGRET = 0.20
MAX_BUCKET = 256
PAGE_SIZE = 16
PAGES = 21000
TOKENS = 600
SECOND_ROWS = (1, 7, 64, 256)
SECOND_TOKENS = 200
PLAIN_STEPS = 60


class Side(CudaDriver):
    """Keeps the logits of the last step alone."""

    seen: Tensor

    def _see(self, slots: Sequence[int], logits: Tensor) -> None:
        # The two sides share the arena that logits lie in.
        self.seen = logits.clone()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two executors on the same weights, each with inputs, plans and a cache of its own."""

    build: CudaBuild
    eager: CudaExecutor
    graphs: CudaExecutor

    def sides(self) -> tuple[Side, Side]:
        """Fresh drivers of both; pages are handed out from 1 on."""
        geometry = self.build.geometry
        return tuple(Side(SimpleNamespace(executor=one, geometry=geometry)) for one in (self.eager, self.graphs))


def make_executor(build: CudaBuild) -> CudaExecutor:
    """An executor with its own inputs, plan arena and cache; the cache holds noise, since zeros are faster."""
    from engine.kernels.step_head import write_step

    arena = torch.zeros_like(build.plan_arena)
    own = replace(build, inputs=StepInputs(build.capacity, build.device, write_step), plan_arena=arena)
    cache = own.cache(PAGES)
    for layer in range(cache.shape[1]):
        cache[:, layer].normal_(0, 0.5)
    return own.executor(cache)


def make_pair(results: Results, shape: str, folder: Path) -> Pair:
    """Build both sides and capture the graphs of one."""
    directory = write_config(shape, folder)
    config = CoreConfig(
        model=str(directory),
        kv_page_size=PAGE_SIZE,
        max_bucket=MAX_BUCKET,
        max_step_tokens=2048,
        context_limit=8192,
    )
    model = load_model_config(directory)
    weights = shaped_weights(model)

    def load(_: ModelConfig, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            part.copy_(weights[name])

    build = prepare(config, model, torch.bfloat16, CudaGpu(), load)
    weights.clear()
    torch.cuda.empty_cache()
    pair = Pair(build, make_executor(build), make_executor(build))
    warm_up(pair)
    began = time.perf_counter()
    taken = build.capture(pair.graphs)
    seconds = time.perf_counter() - began
    graphs = pair.graphs.graphs
    results.emit(
        "capture",
        ok=graphs is not None and len(graphs) > 0,
        graphs=len(graphs or ()),
        buckets=len(graphs.ladder if graphs else ()),
        seconds=seconds,
        mib=(taken or 0) / 2**20,
        variants=sorted({str(key.attention)[:24] for key in graphs.captured()}) if graphs else [],
    )
    return pair


def warm_up(pair: Pair) -> None:
    """A prompt and a step on both sides: kernels are compiled and loaded."""
    for side in pair.sides():
        (row,) = start(side, [40])
        side.step([row])


def start(side: Side, lengths: Sequence[int], asking: Sequence[Sampling] = (Sampling(),)) -> list[Row]:
    """Rows in scattered slots with random prompts of the given lengths behind them, that ask for `asking` in turn."""
    generator = torch.Generator().manual_seed(7)
    vocab = side.executor.parts.decoder.parts.config.vocab_size
    rows, batch = [], []
    for place, length in enumerate(lengths):
        sampling = asking[place % len(asking)]
        row = side.start(place * 37 % MAX_BUCKET, sampling=sampling)
        tokens = torch.randint(10, vocab, (length,), generator=generator).tolist()
        if sampling.penalizes:
            side._starts[-1] = RowStart(row.slot, sampling, RowContext(tokens))
        rows.append(row)
        batch.append((row, tokens, True))
        if sum(len(tokens) for _, tokens, _ in batch) + 1024 > 2048 or place == len(lengths) - 1:
            side.step([], batch)
            batch = []
    return rows


def mixed_lengths(rows: int) -> list[int]:
    """Prompts of 1 to 400 tokens, page boundaries among them."""
    return [(1, 15, 16, 17, 400, 33, 64, 250)[place % 8] + place // 8 % 7 for place in range(rows)]


class Distance:
    """How far the graphs' logits and tokens are from the other side's, over many steps."""

    def __init__(self) -> None:
        self.steps = self.equal = self.differing_tokens = 0
        self._errors: list[Tensor] = []
        self._regrets: list[Tensor] = []
        self.token_regret = 0.0

    def differ(self, right: Tensor, token: int) -> None:
        """Weigh a token that the other side did not sample by its float32 logits `[vocab]`: how much less likely it is
        than the best one, in nats. Near ties differ in a bucket that does not fit; what no one computed is far off.
        """
        self.differing_tokens += 1
        self.token_regret = max(self.token_regret, float(right.max() - right[token]))

    def add(self, right: Tensor, own: Tensor) -> None:
        """Compare float32 `[rows, vocab]`."""
        right, own = right.log_softmax(-1), own.log_softmax(-1)
        best = right.topk(8, dim=-1)
        self._errors.append((own.gather(1, best.indices) - best.values).abs().mean())
        chosen = right.gather(1, own.argmax(-1, keepdim=True))[:, 0]
        self._regrets.append((best.values[:, 0] - chosen).max())
        self.steps += 1
        self.equal += torch.equal(right, own)

    def report(self) -> dict[str, Any]:
        """The numbers; `small`: logits and tokens lie within the bounds; `same_tokens`: no token differs."""
        errors, regrets = torch.stack(self._errors), torch.stack(self._regrets)
        mean, worst, regret = float(errors.mean()), float(errors.max()), float(regrets.max())
        return {
            "compared_steps": self.steps,
            "bit_equal_steps": self.equal,
            "differing_tokens": self.differing_tokens,
            "error_nats": mean,
            "worst_step_nats": worst,
            "regret_nats": regret,
            "token_regret_nats": self.token_regret,
            "small": mean <= MAX_ERROR and max(regret, self.token_regret) <= MAX_REGRET,
            "same_tokens": not self.differing_tokens,
        }


def follow(sides: tuple[Side, Side], rows: Sequence[list[Row]], steps: int, every: int = 1) -> Distance:
    """Decode on both sides along the first one's tokens; compare every `every`-th step's logits."""
    eager, graphs = sides
    distance = Distance()
    for step in range(steps):
        right, own = eager.step(rows[0]).tokens, graphs.step(rows[1]).tokens
        if step % every == 0:
            distance.add(eager.seen, graphs.seen)
        for place, (row, wanted, token) in enumerate(zip(rows[1], right, own, strict=True)):
            if wanted != token:
                distance.differ(eager.seen[place], token)
                graphs.force(row, wanted)
    return distance


@contextmanager
def uncaptured(pair: Pair) -> Iterator[None]:
    """The eager side computes in buckets too, by the same launches, but without graphs."""
    ladder = Ladder.of(MAX_BUCKET)
    pair.eager.graphs = DecodeGraphs(ladder, pair.build.gpu.recorder())
    try:
        yield
    finally:
        pair.eager.graphs = None


def check_equal(results: Results, pair: Pair) -> None:
    """A graph computes, bit by bit, what its launches compute without it."""
    for rows in (1, 5, 9, 64, 250):
        with results.part(f"equal, {rows} rows: ran"), uncaptured(pair):
            sides = pair.sides()
            mine = [start(side, mixed_lengths(rows)) for side in sides]
            distance = follow(sides, mine, 40)
            assert pair.eager.graphs is not None
            assert pair.graphs.graphs is not None
            results.emit(
                f"equal, {rows} rows",
                ok=distance.equal == distance.steps
                and distance.differing_tokens == 0
                and pair.graphs.graphs.eager == 0
                and pair.eager.graphs.eager == 40,
                missed_graphs=pair.graphs.graphs.eager,
                **distance.report(),
            )


ASKING = (
    Sampling(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logprobs=2, seed=3),
    Sampling(),
    Sampling(logprobs=4),
    Sampling(temperature=0.6, top_p=0.95, top_k=20, seed=5),
    Sampling(frequency_penalty=0.5, logprobs=0),
)
PLAIN = tuple(Sampling() if one.penalizes or one.logprobs is not None else one for one in ASKING)
"""The same rows, of which none asks for more than a token."""


def asking_texts(side: Side, rows: int, asking: Sequence[Sampling], steps: int) -> tuple[list[list[int]], list[Any]]:
    """What rows with these parameters generate at lag 1: tokens and log probabilities of each step."""
    side.executor.tap = None
    made = start(side, mixed_lengths(rows), asking)
    handles: list[object] = []
    told = []
    for _ in range(steps):
        handles.append(side.executor.launch(next_plan(side, made)))
        if len(handles) > 1:
            told.append(side.executor.collect(handles.pop(0)))
    told += [side.executor.collect(handle) for handle in handles]
    return [result.tokens for result in told], [result.logprobs for result in told]


@contextmanager
def split_attention() -> Iterator[None]:
    """Plain steps compute their attention as steps of second graphs do."""
    right = FlashInferAttention.begin

    def begin(self: FlashInferAttention, rows: StepRows, bucket: int | None = None, **_: Any) -> None:
        right(self, rows, bucket, always_split=bucket is not None)

    with patch.object(FlashInferAttention, "begin", begin):
        yield


def check_second(results: Results, pair: Pair) -> None:
    """The graphs for penalties and log probabilities compute what their launches compute, and rows that ask for nothing
    get the tokens of plain steps, whose attention is split here, too.

    One side after the other: what the sampler knows of a row lies where both have it.
    """
    for rows in SECOND_ROWS:
        with results.part(f"second graphs, {rows} rows: ran"), uncaptured(pair):
            right = asking_texts(pair.sides()[0], rows, ASKING, SECOND_TOKENS)
            replays, launched = pair.graphs.graph_steps, pair.graphs.eager_steps
            mine = asking_texts(pair.sides()[1], rows, ASKING, SECOND_TOKENS)
            replays, launched = pair.graphs.graph_steps - replays, pair.graphs.eager_steps - launched
            with split_attention():
                plain = asking_texts(pair.sides()[0], rows, PLAIN, PLAIN_STEPS)[0]
            untouched = [place for place in range(rows) if ASKING[place % len(ASKING)] in PLAIN]
            same_untouched = all(
                one[place] == other[place]
                for one, other in zip(plain, mine[0][:PLAIN_STEPS], strict=True)
                for place in untouched
            )
            results.emit(
                f"second graphs, {rows} rows of {SECOND_TOKENS} tokens at lag 1",
                # What is asked for changes what is chosen.
                ok=right == mine
                and same_untouched
                and plain != mine[0][:PLAIN_STEPS]
                and all(mine[1])
                and (replays, launched) == (SECOND_TOKENS, 0),
                same_tokens=right[0] == mine[0],
                same_logprobs=right[1] == mine[1],
                rows_that_ask_for_nothing=len(untouched),
                their_tokens_are_those_of_plain_steps=same_untouched,
                replays=replays,
                eager_steps=launched,
                steps_with_logprobs=sum(map(bool, mine[1])),
            )


def check_long(results: Results, pair: Pair) -> None:
    """600 tokens past many page boundaries, in and out of buckets that fit, against steps that know no buckets."""
    for rows in (1, 7, 64, 256):
        with results.part(f"long, {rows} rows: ran"):
            sides = pair.sides()
            lengths = [1500] if rows == 1 else mixed_lengths(rows)
            mine = [start(side, lengths) for side in sides]
            report = follow(sides, mine, TOKENS, max(1, rows // 32)).report()
            results.emit(f"long, {rows} rows of {TOKENS} tokens", ok=report["small"], **report)


def next_plan(side: Side, rows: Sequence[Row]) -> StepPlan:
    """The step after the last one, before its tokens are known."""
    for row in rows:
        side.grow(row, row.length + 1)
        row.length += 1
    plan = StepPlan(0, [], side._table, [row.slot for row in rows], [row.length for row in rows], [])
    side._table = []
    return plan


def check_lag(results: Results, pair: Pair) -> None:
    """Steps launched ahead of the tokens that are read give the same tokens."""
    texts = []
    for lag in (0, 1, 2):
        side = pair.sides()[1]
        rows = start(side, mixed_lengths(24))
        side.executor.tap = None
        handles: list[object] = []
        tokens = []
        for _ in range(150):
            handles.append(side.executor.launch(next_plan(side, rows)))
            if len(handles) > lag:
                tokens.append(side.executor.collect(handles.pop(0)).tokens)
        tokens += [side.executor.collect(handle).tokens for handle in handles]
        texts.append(tokens)
    equal = [texts[0] == text for text in texts]
    results.emit("lag 1 and 2 give the tokens of lag 0", ok=all(equal), equal=equal, steps=len(texts[0]))


def standing(side: Side, rows: int, length: int) -> list[Row]:
    """Rows of `length` tokens on the cache's noise."""
    made = [side.start(slot) for slot in range(rows)]
    for row in made:
        side.grow(row, length + 200)
        row.length = length
    side.executor.tap = None
    starts = [RowStart(row.slot, Sampling()) for row in made]
    plan = next_plan(side, made)
    side.executor.collect(side.executor.launch(replace(plan, starts=starts)))
    side._starts = []
    return made


def time_steps(side: Side, rows: int, lag: int) -> dict[str, float]:
    """Median milliseconds of a step from launch to launch, and of the launch alone, with `lag` steps ahead."""
    made = standing(side, rows, 1088)
    plans = [next_plan(side, made) for _ in range(44)]
    handles: list[object] = []
    times, launches = [], []
    began = time.perf_counter()
    for plan in plans:
        launching = time.perf_counter()
        handles.append(side.executor.launch(plan))
        launches.append(time.perf_counter() - launching)
        if len(handles) > lag:
            side.executor.collect(handles.pop(0))
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    torch.cuda.synchronize()
    return {"step_ms": 1e3 * statistics.median(times[6:]), "launch_ms": 1e3 * statistics.median(launches[6:])}


def check_time(results: Results, pair: Pair) -> None:
    """Step times of both sides, in turn."""
    for rows in (1, 16, 64, 256):
        for lag in (0, 1):
            with results.part(f"time, {rows} rows, lag {lag}: ran"):
                eager, graphs = (time_steps(side, rows, lag) for side in pair.sides())
                results.emit(
                    f"decode step, {rows} rows of 1088 tokens, lag {lag}",
                    ok=graphs["step_ms"] < eager["step_ms"] * 1.02,
                    graph_ms=graphs["step_ms"],
                    graph_launch_ms=graphs["launch_ms"],
                    eager_ms=eager["step_ms"],
                    eager_launch_ms=eager["launch_ms"],
                )


def check_idle(results: Results, pair: Pair) -> None:
    """Time from the end of one graph to the start of the next, copies of plan and inputs included, at lag 1."""
    for rows in (1, 64, 256):
        side = pair.sides()[1]
        made = standing(side, rows, 1088)
        plans = [next_plan(side, made) for _ in range(150)]
        marks: list[tuple[Any, Any]] = []
        right = DecodeGraphs.run

        def run(
            graphs: DecodeGraphs,
            key: GraphKey,
            work: Callable[[], None],
            marks: list[tuple[Any, Any]] = marks,
            right: Callable[..., None] = right,
        ) -> None:
            pair_of = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair_of[0].record()
            right(graphs, key, work)
            pair_of[1].record()
            marks.append(pair_of)

        handles: list[object] = []
        with patch.object(DecodeGraphs, "run", run):
            for plan in plans:
                handles.append(side.executor.launch(plan))
                if len(handles) > 1:
                    side.executor.collect(handles.pop(0))
        torch.cuda.synchronize()
        gaps = sorted(1e3 * one[1].elapsed_time(two[0]) for one, two in pairwise(marks[20:]))
        results.emit(
            f"idle between graphs, {rows} rows",
            p50_us=gaps[len(gaps) // 2],
            p99_us=gaps[int(len(gaps) * 0.99)],
            graph_ms=statistics.median(one.elapsed_time(two) for one, two in marks[20:]),
            ok=gaps[len(gaps) // 2] <= 30 and gaps[int(len(gaps) * 0.99)] <= 300,
        )


def check_allocations(results: Results, pair: Pair) -> None:
    """No memory is taken in 500 replays, page boundaries among them."""
    side = pair.sides()[1]
    rows = start(side, mixed_lengths(64))
    side.executor.tap = None
    for _ in range(20):
        side.executor.collect(side.executor.launch(next_plan(side, rows)))
    before = torch.cuda.memory_stats()
    for _ in range(500):
        side.executor.collect(side.executor.launch(next_plan(side, rows)))
    after = torch.cuda.memory_stats()
    names = ("allocation.all.allocated", "segment.all.allocated", "num_device_alloc", "num_alloc_retries")
    taken = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    results.emit("allocations in 500 replays", ok=not any(taken.values()), **taken)


def check_faults(results: Results, pair: Pair) -> None:
    """What has to turn red. Last, because a fault of the wrong kind may stop the card."""
    for name, steps in (("no fault", _whole), ("a row too few in the bucket", _few), ("stale plan arrays", _stale)):
        with results.part(f"fault: {name}: ran"):
            report = steps(pair)
            green = report["small"] and report["same_tokens"]
            results.emit(f"fault: {name}", ok=green is (name == "no fault"), **report)


def _whole(pair: Pair) -> dict[str, Any]:
    return _lengthened(pair, stale=False)


def _stale(pair: Pair) -> dict[str, Any]:
    return _lengthened(pair, stale=True)


def _lengthened(pair: Pair, stale: bool) -> dict[str, Any]:
    """Steps behind a second prompt of the longest row; the plan of the first step's lengths is kept if `stale`.

    Rows only grow: a stale plan that names tiles beyond a row would make the kernel read what is not there.
    """
    sides = pair.sides()
    rows = [start(side, [700, 30, 40, 50]) for side in sides]
    follow(sides, rows, 1)
    for side, (row, *_) in zip(sides, rows, strict=True):
        side.step([], [(row, list(range(1000, 1800)), True)])
    ring = pair.graphs.parts.attention.plans._ring  # type: ignore[attr-defined]
    if not stale:
        return follow(sides, rows, 12).report()
    with patch.object(ring, "submit", lambda used: None):
        return follow(sides, rows, 12).report()


def _few(pair: Pair) -> dict[str, Any]:
    """Five rows, but the graph of four."""
    graphs = pair.graphs.graphs
    assert graphs is not None
    right = CudaExecutor._key

    def wrong(self: CudaExecutor, bucket: int, asks: bool) -> GraphKey:
        key = right(self, bucket, asks)
        if self is not pair.graphs:
            return key
        fewer = [other for other in graphs.captured() if (other.bucket, other.asks) == (4, asks)]
        return next(other for other in fewer if _kernel(other) == _kernel(key))

    sides = pair.sides()
    rows = [start(side, mixed_lengths(5)) for side in sides]
    with patch.object(CudaExecutor, "_key", wrong):
        return follow(sides, rows, 12).report()


def _kernel(key: GraphKey) -> object:
    return key.attention[:2] if isinstance(key.attention, tuple) else key.attention


CHECKS = {
    "equal": check_equal,
    "second": check_second,
    "time": check_time,
    "idle": check_idle,
    "allocations": check_allocations,
    "lag": check_lag,
    "long": check_long,
    "faults": check_faults,
}


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--only", default=",".join(CHECKS))
    arguments = parser.parse_args()
    results = Results("graphs")
    with results.part("all"), tempfile.TemporaryDirectory() as folder:
        pair = make_pair(results, arguments.shape, Path(folder))
        for name, check in CHECKS.items():
            if name in arguments.only.split(","):
                with results.part(name):
                    check(results, pair)
    results.emit("summary", failed=results.failed)


if __name__ == "__main__":
    main()
