"""The golden gate on the GPU: the lane's logits against `transformers` in float32 on the same card.

python -m tests.gpu.gate qwen3-4b [qwen3-8b ...] [--quick]
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.models.config import load_model_config
from tests.gpu import lanes, oracle
from tests.gpu.faults import FAULTS, planted
from tests.gpu.harness import Results
from tests.gpu.shaped import shaped_weights, write_config

MAX_RATIO = 1.25
MAX_REGRET = 0.20
TARGET_NATS = 4.2
PREFIX = 2048


def lengths(quick: bool) -> list[int]:
    """Prompt lengths: from 1 to 300 tokens, page boundaries among them; the two long ones come last."""
    short = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]
    if not quick:
        generator = torch.Generator().manual_seed(1)
        short += torch.randint(1, 301, (48 - len(short),), generator=generator).tolist()
    return [*short, 4097, 8192]


class Gate:
    """One model's reference, and judgement on everything that is held against it."""

    def __init__(self, results: Results, name: str, directory: Path, weights: dict[str, Tensor], quick: bool) -> None:
        self.results, self.name, self.directory, self.weights = results, name, directory, weights
        self.cases = oracle.cases(load_model_config(directory).vocab_size, lengths(quick), seed=5)
        self.short = len(self.cases) - 2
        common = self.cases[-1].prompt[:PREFIX]
        tails = oracle.cases(load_model_config(directory).vocab_size, [1, 15, 16, 64, 100, 37, 200, 5], seed=6)
        self.sharing = [oracle.Case([*common, *tail.prompt], tail.forced) for tail in tails]

    def refer(self) -> None:
        """Run transformers in float32, then in bfloat16."""
        model = oracle.load(self.directory, self.weights)
        self._calibrate(model)
        self.reference = [oracle.logprobs(model, case) for case in [*self.cases, *self.sharing]]
        attention = oracle.attention_entropy(model, self.cases[11])
        nats = sum(map(oracle.entropy, self.reference)) / len(self.reference)
        half = oracle.halve(model)
        self.yardsticks = [oracle.logprobs(half, case) for case in [*self.cases, *self.sharing]]
        self.results.emit(
            f"{self.name}: reference",
            logit_entropy_nats=nats,
            attention_entropy_share=attention,
            ok=2 <= nats <= 5 and attention < 0.5,
        )

    def _calibrate(self, model: torch.nn.Module) -> None:
        """Scale the final norm so that logits have the entropy that is wanted; the weights follow."""
        logprob = torch.cat([oracle.logprobs(model, case) for case in self.cases[4:12]])
        low, high = 0.05, 20.0
        for _ in range(30):
            middle = (low * high) ** 0.5
            nats = oracle.entropy((logprob * middle).log_softmax(-1))
            low, high = (middle, high) if nats > TARGET_NATS else (low, middle)
        norm = self.weights["model.norm.weight"]
        norm.mul_(low)
        model.model.norm.weight.data.copy_(norm)

    def judge(self, check: str, own: Sequence[Tensor], which: slice, wants: bool = True) -> None:
        """Emit the error of `own` on the cases `which`; `wants` False means that the gate has to go red."""
        error = oracle.error(self.reference[which], own)
        yardstick = oracle.error(self.reference[which], self.yardsticks[which])
        ratio = error.top8 / yardstick.top8
        passed = ratio <= MAX_RATIO and error.regret <= MAX_REGRET
        self.results.emit(
            f"{self.name}: {check}",
            top8_error=error.top8,
            transformers_bf16_error=yardstick.top8,
            ratio=ratio,
            regret=error.regret,
            transformers_bf16_regret=yardstick.regret,
            cases=len(own),
            ok=passed is wants,
        )

    def check_page_size(self, page_size: int) -> None:
        """Everything that the gate asks of one page size."""
        lane = lanes.build(self.directory, self.weights, page_size)
        cases, short = self.cases, self.cases[: self.short]
        ways: list[tuple[str, Callable[[], list[Tensor]], slice]] = [
            ("cold, whole, alone", partial(lanes.alone, lane, cases, 8192), slice(len(cases))),
            (
                "cold, chunks of 1024, alone",
                partial(lanes.alone, lane, cases[self.short :], 1024),
                slice(self.short, len(cases)),
            ),
            ("cold, chunks of 48, alone", partial(lanes.alone, lane, short[::4], 48), slice(0, self.short, 4)),
            ("warm", partial(lanes.warm, lane, cases[::2]), slice(0, len(cases), 2)),
            ("batched, chunks of 64", partial(lanes.batched, lane, short, 64), slice(self.short)),
            ("batched, one step", partial(lanes.together, lane, short), slice(self.short)),
            (
                "batched with the long ones, chunks of 2048",
                partial(lanes.batched, lane, cases[-8:], 2048),
                slice(len(cases) - 8, len(cases)),
            ),
        ]
        for way, compute, which in ways:
            with self.results.part(f"{self.name}: page {page_size}: {way}: ran"):
                self.judge(f"page {page_size}: {way}", compute(), which)
        with self.results.part(f"{self.name}: page {page_size}: repeat: ran"):
            some = [*short[:6], cases[-1]]
            pair = [lanes.alone(lane, some, 8192) for _ in range(2)] + [lanes.batched(lane, some, 64) for _ in range(2)]
            equal = [all(map(torch.equal, *pair[at : at + 2])) for at in (0, 2)]
            self.results.emit(
                f"{self.name}: page {page_size}: repeated run is bit-identical", equal=equal, ok=all(equal)
            )

    def check_sharing(self, page_size: int) -> None:
        """Rows that share a prefix, in a pool far smaller than their page lists together, and the same without."""
        tokens = PREFIX + sum(len(case.prompt) - PREFIX + oracle.STEPS + page_size for case in self.sharing)
        which = slice(len(self.cases), None)
        with self.results.part(f"{self.name}: page {page_size}: shared prefix: ran"):
            lane = lanes.build(self.directory, self.weights, page_size, kv_tokens=tokens + page_size)
            listed = sum(-(-(len(case.prompt) + oracle.STEPS) // page_size) for case in self.sharing)
            self.results.emit(
                f"{self.name}: page {page_size}: page lists exceed the pool",
                listed=listed,
                pool=tokens // page_size + 1,
                ok=listed > tokens // page_size + 1,
            )
            own = lanes.shared(lane, self.sharing, PREFIX, 48)
            self.judge(f"page {page_size}: shared prefix", own, which)
            lane = lanes.build(self.directory, self.weights, page_size)
            self.judge(f"page {page_size}: the same unshared", lanes.batched(lane, self.sharing, 2048), which)

    def check_faults(self, page_size: int) -> None:
        """Every planted fault has to turn the gate red."""
        some = self.cases[-6:]
        which = slice(len(self.cases) - 6, len(self.cases))
        with self.results.part(f"{self.name}: no fault: ran"):
            lane = lanes.build(self.directory, self.weights, page_size)
            self.judge("no fault is green", lanes.batched(lane, some, 2048), which)
            del lane
        for fault in FAULTS:
            with self.results.part(f"{self.name}: fault {fault.__name__}: ran"), planted(fault):
                lane = lanes.build(self.directory, self.weights, page_size)
                self.judge(f"fault {fault.__name__} is red", lanes.batched(lane, some, 2048), which, wants=False)
                del lane


def main() -> None:
    """Run the gate for the shapes that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--quick", action="store_true", help="14 prompts instead of 50")
    parser.add_argument("--no-faults", action="store_true")
    arguments = parser.parse_args()
    results = Results(f"gate-{'-'.join(arguments.shapes)}")
    for name in arguments.shapes:
        with results.part(f"{name}: all"), tempfile.TemporaryDirectory() as folder:
            directory = write_config(name, Path(folder))
            gate = Gate(results, name, directory, shaped_weights(load_model_config(directory)), arguments.quick)
            gate.refer()
            torch.cuda.empty_cache()
            for page_size in (16, 64):
                gate.check_page_size(page_size)
                gate.check_sharing(page_size)
                torch.cuda.empty_cache()
            if not arguments.no_faults:
                gate.check_faults(16)
            del gate
        torch.cuda.empty_cache()
    results.emit("summary", failed=results.failed)


if __name__ == "__main__":
    main()
