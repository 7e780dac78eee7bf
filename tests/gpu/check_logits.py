"""Checks penalties and log probabilities on a GPU: one JSON line for each result, exit code 1 if one is not ok.

    python -m tests.gpu.check_logits [--only penalties,logprobs,speed] [--replays 20]

penalties  logits of rows with penalties and suppressed tokens against `engine.penalties`, over drawn tokens
logprobs   of sampled and of prompt tokens, and the likeliest ones', against float64
speed      time that both add to a step in which every row asks for them
"""

import argparse
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cuda.adjust import LogitsAdjuster
from engine.cuda.arena import DeviceArena
from engine.cuda.logprobs import MOST, DeviceLogprobs, Sizes, packed
from engine.cuda.sampling import DeviceSampler
from engine.messages import Logprobs, Sampling
from engine.penalties import penalize
from engine.step import RowContext, RowStart
from tests.gpu.check_sampling import captured, make_logits, milliseconds
from tests.gpu.harness import Results

VOCABS = (151_936, 49_152)
SLOTS = 257
SAMPLINGS = [
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.5, presence_penalty=-1.5),
    Sampling(frequency_penalty=0.7, presence_penalty=0.4),
    Sampling(repetition_penalty=1.1, frequency_penalty=-2.0, min_tokens=3),
    Sampling(min_tokens=2),
]


class Lane:
    """The lane's parts for one vocabulary."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        arena = DeviceArena(torch.device("cuda"))
        DeviceSampler.reserve(arena, 256, vocab)
        LogitsAdjuster.reserve(arena, SLOTS, vocab)
        DeviceLogprobs.reserve(arena, Sizes(SLOTS, 256, 256, vocab))
        arena.allocate()
        self.sampler, self.adjuster = DeviceSampler(arena), LogitsAdjuster(arena)
        self.logprobs = DeviceLogprobs(arena, self.sampler, vocab)


def inputs_of(slots: list[int], positions: list[int]) -> Any:
    """As `StepInputs` has them."""
    staged = {"sampled_slots": torch.tensor(slots).cuda(), "sampled_positions": torch.tensor(positions).cuda()}
    return SimpleNamespace(sampled_rows=lambda name, begin, end: staged[name][begin:end])


def check_penalties(results: Results, lanes: list[Lane], args: argparse.Namespace) -> None:
    for lane in lanes:
        rng, rows = np.random.default_rng(lane.vocab), 20
        slots = [int(slot) for slot in rng.permutation(SLOTS - 1)[:rows]]
        samplings = [SAMPLINGS[row % len(SAMPLINGS)] for row in range(rows)]
        contexts = [
            RowContext(
                rng.integers(0, lane.vocab, 3000).tolist() if sampling.penalizes else (),
                rng.integers(0, 500, 300).tolist() if sampling.penalizes else (),
                (7, lane.vocab - 1) if sampling.min_tokens else (),
                100 + sampling.min_tokens if sampling.min_tokens else 0,
            )
            for sampling in samplings
        ]
        lane.adjuster.start([RowStart(*start) for start in zip(slots, samplings, contexts, strict=True)])
        drawn: list[list[int]] = [[] for _ in range(rows)]
        worst, wrong = 0.0, 0
        for step in range(4):
            logits = make_logits("zipf", rows, lane.vocab, seed=step)
            expected = logits.cpu().numpy()
            for row, (sampling, context) in enumerate(zip(samplings, contexts, strict=True)):
                outputs = np.array([*context.outputs, *drawn[row]], np.int64)
                penalize(expected[row], np.array(context.prompt, np.int64), outputs, sampling)
                if 100 + step < context.suppressed_until:
                    expected[row, list(context.suppressed)] = -np.inf
            inputs = inputs_of(slots, [100 + step] * rows)
            lane.adjuster.adjust(logits, inputs, slice(0, rows))
            got = logits.cpu().numpy()
            finite = np.isfinite(expected)
            wrong += int((np.isfinite(got) != finite).sum())
            error = np.abs(got - expected, where=finite, out=np.zeros_like(got)) / (1 + np.abs(expected))
            worst = max(worst, float(error[finite].max()))
            tokens = logits.argmax(-1)
            lane.adjuster.keep(inputs, slice(0, rows), tokens.int())
            for row, token in enumerate(tokens.tolist()):
                drawn[row].append(token)
        results.emit("penalties", vocab=lane.vocab, worst=worst, wrong_infinities=wrong, ok=worst < 1e-5 and not wrong)


def errors(read: Logprobs, logits: Tensor, targets: list[int], top: int) -> tuple[float, int]:
    """Largest difference to float64, and tokens that are not the likeliest ones in their order."""
    expected = logits.double().log_softmax(-1)
    own = torch.frombuffer(bytearray(read.own), dtype=torch.float32).cuda()
    worst = float((own - expected[range(len(targets)), targets]).abs().max())
    if not top:
        return worst, 0
    ids = torch.frombuffer(bytearray(read.top_ids), dtype=torch.int32).view(-1, top).long().cuda()
    values = torch.frombuffer(bytearray(read.top), dtype=torch.float32).view(-1, top).cuda()
    order = logits.sort(descending=True, stable=True).indices[:, :top]
    return max(worst, float((values - expected.gather(1, ids)).abs().max())), int((ids != order).sum())


def check_logprobs(results: Results, lanes: list[Lane], args: argparse.Namespace) -> None:
    for lane in lanes:
        for kind in ("zipf", "normal", "ties"):
            for top in (0, 1, 5, MOST):
                rows = 30
                logits = make_logits(kind, rows, lane.vocab, seed=top)
                targets = torch.randint(0, lane.vocab, (rows,)).tolist()
                prompt = errors(lane.logprobs.read_now(logits, targets, top), logits, targets, top)
                slots = list(range(200, 200 + rows))
                lane.logprobs.start([RowStart(slot, Sampling(logprobs=top)) for slot in slots])
                ids = torch.tensor(targets, dtype=torch.int32, device="cuda")
                lane.logprobs.read(logits, inputs_of(slots, slots), slice(0, rows), ids, 1)
                fetched = lane.logprobs.fetch(1, rows)
                torch.cuda.synchronize()
                sampled = errors(packed(fetched, top), logits, targets, top)
                facts = {"vocab": lane.vocab, "kind": kind, "top": top, "prompt": prompt, "sampled": sampled}
                ok = all(worst < 2e-5 and not moved for worst, moved in (prompt, sampled))
                results.emit("logprobs", **facts, ok=ok)


def check_speed(results: Results, lanes: list[Lane], args: argparse.Namespace) -> None:
    lane = lanes[0]
    for rows in (1, 64, 256):
        slots = list(range(rows))
        context = RowContext(list(range(2000)), (), (3,), 1 << 20)
        sampling = Sampling(repetition_penalty=1.1, logprobs=5)
        starts = [RowStart(slot, sampling, context) for slot in slots]
        lane.adjuster.start(starts)
        lane.logprobs.start(starts)
        logits, inputs = make_logits("zipf", rows, lane.vocab), inputs_of(slots, slots)
        tokens = torch.zeros(rows, dtype=torch.int32, device="cuda")
        window = slice(0, rows)
        took = {
            "adjust": milliseconds(captured(partial(lane.adjuster.adjust, logits, inputs, window)), args.replays),
            "count": milliseconds(captured(partial(lane.adjuster.keep, inputs, window, tokens)), args.replays),
            "logprobs": milliseconds(
                captured(partial(lane.logprobs.read, logits, inputs, window, tokens, 0)), args.replays
            ),
        }
        results.emit("speed", rows=rows, vocab=lane.vocab, ms=took)


CHECKS = {"penalties": check_penalties, "logprobs": check_logprobs, "speed": check_speed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHECKS))
    parser.add_argument("--replays", type=int, default=20)
    args = parser.parse_args()
    results = Results("logits")
    lanes = [Lane(vocab) for vocab in VOCABS]
    for name in args.only.split(","):
        with results.part(name):
            CHECKS[name](results, lanes, args)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
