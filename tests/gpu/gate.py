"""The golden gate on the GPU: the lane's logits against `transformers` in float32 on the same card.

    python -m tests.gpu.gate qwen3-4b [qwen3-8b ...] [--dtype float16] [--no-graphs] [--quick]
    python -m tests.gpu.gate --model DIR_OR_GGUF [--dtype float16]

The first form draws weights for a shape. The second takes a model's own, rounded
to the lane's type, and text in place of random tokens.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.cuda.lane import DTYPES
from engine.models.config import ModelConfig, load_model_config
from engine.models.gguf_import import cached_import
from engine.models.weights import fill_weights, load_weights
from tests.gpu import lanes, oracle
from tests.gpu.faults import FAULTS, no_q_norm, planted
from tests.gpu.harness import Results
from tests.gpu.lanes import Subject
from tests.gpu.oracle import Case
from tests.gpu.shaped import shaped_weights, write_config

MAX_RATIO = 1.25
MAX_REGRET = 0.20
TARGET_NATS = 4.2
PREFIX = 2048
TAILS = (1, 15, 16, 64, 100, 37, 200, 5)
"""Lengths of what follows the shared prefix."""


def lengths(quick: bool, longest: int = 8192) -> list[int]:
    """Prompt lengths: from 1 to 300 tokens, page boundaries among them; the two long ones come last."""
    short = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]
    if not quick:
        generator = torch.Generator().manual_seed(1)
        short += torch.randint(1, 301, (48 - len(short),), generator=generator).tolist()
    return [*short, 4097, longest]


class Gate:
    """One model's reference, and judgement on everything that is held against it."""

    def __init__(
        self, results: Results, subject: Subject, weights: dict[str, Tensor], cases: list[Case], shared: list[Case]
    ) -> None:
        """`weights` are the reference's. The last two of `cases` are the long ones; `shared` begin with one prefix."""
        self.results, self.subject, self.weights = results, subject, weights
        self.name = subject.name if subject.dtype == torch.bfloat16 else f"{subject.name} {subject.dtype}"
        self.cases, self.sharing = cases, shared
        self.short = len(cases) - 2

    def refer(self, calibrate: bool) -> None:
        """Run transformers in float32, then in the lane's type. `calibrate` scales logits, for drawn weights."""
        model = oracle.load(self.subject.directory, self.weights)
        if calibrate:
            self._calibrate(model)
        self.reference = [oracle.logprobs(model, case) for case in [*self.cases, *self.sharing]]
        attention = oracle.attention_entropy(model, self.cases[11])
        nats = sum(map(oracle.entropy, self.reference)) / len(self.reference)
        half = oracle.halve(model, self.subject.dtype)
        self.yardsticks = [oracle.logprobs(half, case) for case in [*self.cases, *self.sharing]]
        self.results.emit(
            f"{self.name}: reference",
            logit_entropy_nats=nats,
            attention_entropy_share=attention,
            ok=not calibrate or (2 <= nats <= 5 and attention < 0.5),
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
            transformers_error=yardstick.top8,
            ratio=ratio,
            regret=error.regret,
            transformers_regret=yardstick.regret,
            cases=len(own),
            ok=passed is wants,
        )

    def check_page_size(self, page_size: int) -> None:
        """Everything that the gate asks of one page size."""
        lane = lanes.build(self.subject, page_size)
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
            lane = lanes.build(self.subject, page_size, kv_tokens=tokens + page_size)
            listed = sum(-(-(len(case.prompt) + oracle.STEPS) // page_size) for case in self.sharing)
            self.results.emit(
                f"{self.name}: page {page_size}: page lists exceed the pool",
                listed=listed,
                pool=tokens // page_size + 1,
                ok=listed > tokens // page_size + 1,
            )
            own = lanes.shared(lane, self.sharing, PREFIX, 48)
            self.judge(f"page {page_size}: shared prefix", own, which)
            lane = lanes.build(self.subject, page_size)
            self.judge(f"page {page_size}: the same unshared", lanes.batched(lane, self.sharing, 2048), which)

    def check_faults(self, page_size: int) -> None:
        """Every planted fault has to turn the gate red."""
        some = self.cases[-6:]
        # Some faults ask the device for numbers, which a capture forbids.
        subject = replace(self.subject, graphs=False)
        which = slice(len(self.cases) - 6, len(self.cases))
        with self.results.part(f"{self.name}: no fault: ran"):
            lane = lanes.build(subject, page_size)
            self.judge("no fault is green", lanes.batched(lane, some, 2048), which)
            del lane
        normed = load_model_config(self.subject.directory).qk_norm
        for fault in FAULTS:
            if fault is no_q_norm and not normed:
                continue
            with self.results.part(f"{self.name}: fault {fault.__name__}: ran"), planted(fault):
                lane = lanes.build(subject, page_size)
                self.judge(f"fault {fault.__name__} is red", lanes.batched(lane, some, 2048), which, wants=False)
                del lane


def drawn(results: Results, name: str, folder: Path, dtype: torch.dtype, quick: bool) -> Gate:
    """The gate of a shape with random weights and random tokens."""
    directory = write_config(name, folder)
    model = load_model_config(directory)
    weights = shaped_weights(model)

    def load(_: ModelConfig, parts: Mapping[str, Tensor]) -> None:
        for key, part in parts.items():
            part.copy_(weights[key])

    cases = oracle.cases(model.vocab_size, lengths(quick), seed=5)
    tails = oracle.cases(model.vocab_size, TAILS, seed=6)
    return Gate(results, Subject(name, directory, load, dtype), weights, cases, sharing(cases[-1], tails))


def real(results: Results, model: Path, dtype: torch.dtype, quick: bool) -> Gate:
    """The gate of a model's own weights, on this repository's text."""
    directory = cached_import(model) if model.is_file() else model
    config = load_model_config(directory)
    device = torch.device("cuda", 0)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    root = Path(__file__).parents[2]
    texts = [path.read_text() for folder in ("docs", "engine") for path in sorted((root / folder).rglob("*.[mp][dy]"))]
    tokens = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids]
    limit = min(config.context_limit, 8400)
    cases = oracle.text_cases(tokens, lengths(quick, min(8192, limit - oracle.STEPS)), seed=5)
    tails = oracle.text_cases(tokens, TAILS, seed=6)
    subject = Subject(model.stem, directory, partial(fill_weights, directory), dtype, limit)
    # Rounded as a checkpoint in that type is: what is judged is the computation.
    weights = {name: value.float() for name, value in load_weights(directory, config, dtype, device).items()}
    return Gate(results, subject, weights, cases, sharing(cases[-1], tails))


def sharing(prefix: Case, tails: Sequence[Case]) -> list[Case]:
    """Cases that begin with the same `PREFIX` tokens."""
    return [Case([*prefix.prompt[:PREFIX], *tail.prompt], tail.forced) for tail in tails]


def run(gate: Gate, calibrate: bool, faults: bool) -> None:
    """Everything that is asked of one model."""
    gate.refer(calibrate)
    torch.cuda.empty_cache()
    for page_size in (16, 64):
        gate.check_page_size(page_size)
        gate.check_sharing(page_size)
        torch.cuda.empty_cache()
    if faults:
        gate.check_faults(16)


def main() -> None:
    """Run the gate for the shapes or the model that is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--model", type=Path, help="a model's directory or GGUF file")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="14 prompts instead of 50")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument(
        "--no-graphs", action="store_true", help="launch decode steps kernel by kernel; the faults' always are"
    )
    parser.add_argument("--xqa", action="store_true", help="decode rows on XQA where it is the faster one")
    arguments = parser.parse_args()
    dtype = DTYPES[arguments.dtype]
    names = [*arguments.shapes, *([arguments.model.stem] if arguments.model else [])]
    marks = [*([arguments.dtype] if dtype == torch.float16 else []), *(["xqa"] if arguments.xqa else [])]
    marks += ["eager"] if arguments.no_graphs else []
    results = Results("-".join(["gate", *names, *marks]))
    for name in names:
        with results.part(f"{name}: all"), tempfile.TemporaryDirectory() as folder:
            known = name in arguments.shapes
            if known:
                gate = drawn(results, name, Path(folder), dtype, arguments.quick)
            else:
                gate = real(results, arguments.model, dtype, arguments.quick)
            gate.subject = replace(gate.subject, xqa=arguments.xqa, graphs=not arguments.no_graphs)
            run(gate, known, not arguments.no_faults)
            del gate
        torch.cuda.empty_cache()
    results.emit("summary", failed=results.failed)


if __name__ == "__main__":
    main()
