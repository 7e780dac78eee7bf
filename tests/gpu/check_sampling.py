"""Checks the sampler on a GPU: one JSON line for each result, exit code 1 if one is not ok.

    python -m tests.gpu.check_sampling [--only numbers,place,graph,frequencies,speed] [--replays 20]

numbers      tokens against float64, for several parameters and kinds of logits, at two vocabularies
place        the same row alone and at places of a batch, and again: the same token
graph        a captured draw, replayed after rows, parameters and positions have changed in place
frequencies  16,384 draws by Qwen3's parameters against their distribution, and against those of a wrong top-p
speed        time in a captured graph, greedy and drawing (bars: Qwen3's parameters cost less than 0.4 ms at 64 rows; no
             filter, top-p, min-p and a wide top-k less than 5 % of a step of Qwen3-4B)

What the spread search of `engine.kernels.sample_bins` should take, by its bytes and launches (before any measurement):
eight launches of 1.3 us more for all rows; for a searched row of 151,936 logits one pass with an atomic addition of 8
bytes for each candidate and, for each bound, a pass and two programs' work of 10 us. At 64 rows a pass reads 39 MB (12
us), 10 million additions take 60 us at one a clock and slice of L2: no filter 0.19 ms, top-p 0.22, a wide top-k, which
also counts, 0.31. At 1 row 0.06 to 0.10, at 256 rows 0.6 to 0.9.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cuda.arena import DeviceArena
from engine.cuda.sampling import DeviceSampler
from engine.sampling import uniform
from tests.gpu.harness import Results

VOCABS = (151_936, 49_152)
MOST_ROWS = 1024
NEAR = 1e-5
"""Sums of float32 weights may be off by so much: what lies nearer to a bound is not decided by the rule."""
BAR_MS = 0.4
"""5 % of a step of 64 users of Qwen3-4B."""
SEARCH_BARS_MS = {1: 0.19, 64: 0.31, 256: 0.7}
"""5 % of a step of Qwen3-4B by rows (3.8 and 6.3 ms at 1 and 64 on an H200): for rules that may need a search."""
SEARCHED = ("plain", "top_p", "open_top_p", "min_p", "wide_top_k")


class Rule(NamedTuple):
    """Parameters of a row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


QWEN3 = Rule(0.6, 20, 0.95)
RULES = {
    "greedy": Rule(0.0),
    "qwen3": QWEN3,
    "plain": Rule(),
    "hot": Rule(2.0),
    "top_p": Rule(0.7, 0, 0.9),
    "open_top_p": Rule(1.0, 0, 0.95),
    "top_k": Rule(1.0, 50),
    "wide_top_k": Rule(1.0, 2000, 0.9),
    "all_top_k": Rule(1.0, 151_936, 0.99),
    "min_p": Rule(1.0, 0, 1.0, 0.05),
    "all": Rule(1.3, 100, 0.9, 0.01),
}


class Rows:
    """Rows to sample, where the lane has them: columns by row slot, slots and positions by row."""

    def __init__(self, rules: list[Rule], first_seed: int = 1 << 63) -> None:
        count, device = len(rules), "cuda"
        self.rules = rules
        self.slots = torch.randperm(count, generator=torch.Generator().manual_seed(count)).to(device)
        columns = {
            "temperature": torch.tensor([rule.temperature for rule in rules]),
            "top_k": torch.tensor([rule.top_k for rule in rules], dtype=torch.int32),
            "top_p": torch.tensor([rule.top_p for rule in rules]),
            "min_p": torch.tensor([rule.min_p for rule in rules]),
            "seed": torch.arange(count) * 7 + (first_seed - (1 << 64) if first_seed >> 63 else first_seed),
        }
        self.by_row = {name: column.to(device) for name, column in columns.items()}
        self.staged = {name: torch.empty_like(column) for name, column in self.by_row.items()}
        self.positions = torch.arange(count, device=device) * 3
        self.tokens = torch.full((count,), -1, dtype=torch.int32, device=device)
        self.place()

    def place(self) -> None:
        """Write each row's parameters to its slot."""
        for name, column in self.by_row.items():
            self.staged[name][self.slots] = column

    def take(self, order: list[int]) -> "Rows":
        """These rows in another order, or some of them."""
        taken = Rows([self.rules[row] for row in order])
        for name, column in self.by_row.items():
            taken.by_row[name].copy_(column[order])
        taken.positions.copy_(self.positions[order])
        taken.place()
        return taken

    def sampled_rows(self, name: str, begin: int, end: int) -> Tensor:
        """As `StepInputs` has it."""
        return (self.slots if name == "sampled_slots" else self.positions)[begin:end]


class Drawer:
    """The lane's sampler for one vocabulary."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        arena = DeviceArena(torch.device("cuda"))
        DeviceSampler.reserve(arena, MOST_ROWS, vocab)
        arena.allocate()
        self.arena = arena
        self.sampler = DeviceSampler(arena)

    def into(self, tokens: Tensor, logits: Tensor, rows: Rows) -> None:
        inputs: Any = SimpleNamespace(staged=rows.staged, sampled_rows=rows.sampled_rows)
        self.sampler.choose(logits, inputs, slice(0, len(logits)), tokens)

    def __call__(self, logits: Tensor, rows: Rows) -> Tensor:
        self.into(rows.tokens, logits, rows)
        return rows.tokens.clone()


def make_logits(kind: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    """`zipf` as a language model's, `normal` flat, `ties` of few distinct values."""
    generator = torch.Generator("cuda").manual_seed(seed)
    noise = torch.randn((rows, vocab), device="cuda", generator=generator)
    if kind == "zipf":
        ranks = torch.rand((rows, vocab), device="cuda", generator=generator).argsort(-1) + 1.0
        return 12 - 1.4 * ranks.log() + 0.5 * noise
    return noise if kind == "normal" else noise.bfloat16().float().mul(4).round().div(4)


def gap(logits: Tensor, rule: Rule, token: int, number: float) -> tuple[float, float]:
    """How far `token` lies from where the rule puts the draw `number`, and how much of it the filters hardly decide.

    Both in parts of the weight that the rule keeps, in float64.
    """
    values, order = logits.sort(descending=True, stable=True)
    place = int((order == token).nonzero())
    if rule.temperature == 0:
        return float(place), 0.0
    temperature, top_p, min_p = (float(torch.tensor(value)) for value in (rule.temperature, rule.top_p, rule.min_p))
    weights = ((values.double() - values[0].double()) / temperature).exp()
    if rule.top_k:
        weights[rule.top_k :] = 0
    before = weights.cumsum(0) - weights
    bound = top_p * weights.sum()
    keep, unsure = weights >= min_p, ((weights / min_p - 1).abs() < NEAR) & (min_p > 0)
    if rule.top_p < 1:
        keep &= before < bound
        unsure |= (before / bound - 1).abs() < NEAR
    kept = weights * keep
    total = kept.sum()
    low, high = kept[:place].sum() / total, kept[: place + 1].sum() / total
    return max(float(low) - number, number - float(high), 0.0), float(weights[unsure].sum() / total)


def judge(logits: Tensor, rows: Rows, tokens: Tensor) -> dict[str, float]:
    """The worst of the rows' gaps beyond what the filters leave open, and the most that these do."""
    numbers = uniform(rows.by_row["seed"], rows.positions).tolist()
    gaps = [gap(*row) for row in zip(logits, rows.rules, tokens.tolist(), numbers, strict=True)]
    return {"worst_gap": max(own - 2 * slack for own, slack in gaps), "slack": max(slack for _, slack in gaps)}


def check_numbers(results: Results, drawers: list[Drawer], args: argparse.Namespace) -> None:
    for drawer in drawers:
        for kind in ("zipf", "normal", "ties"):
            logits = make_logits(kind, 12, drawer.vocab)
            for name, rule in RULES.items():
                rows = Rows([rule] * len(logits))
                found = judge(logits, rows, drawer(logits, rows))
                candidates = int(drawer.arena.take("sample_counts")[: len(logits)].max())
                facts = {"vocab": drawer.vocab, "kind": kind, "rule": name, "candidates": candidates}
                ok = found["worst_gap"] < NEAR and found["slack"] < 0.1
                results.emit("numbers", **facts, **found, ok=ok)


def check_place(results: Results, drawers: list[Drawer], args: argparse.Namespace) -> None:
    for drawer in drawers:
        logits = torch.cat([make_logits(kind, 86, drawer.vocab, seed=1) for kind in ("zipf", "normal", "ties")])[:256]
        rules = list(RULES.values())
        rows = Rows([rules[row % len(rules)] for row in range(256)])
        whole = drawer(logits, rows)
        again = all(torch.equal(whole, drawer(logits, rows)) for _ in range(10))
        moved = 0
        for row in (*range(0, 20), *range(90, 110), *range(180, 200)):
            alone = drawer(logits[row : row + 1], rows.take([row]))
            moved += int(alone[0]) != int(whole[row])
        for place in (0, 7, 255):
            order = [(row + 100 + place) % 256 for row in range(256)]
            moved += int((drawer(logits[order], rows.take(order)) != whole[order]).sum())
        results.emit("place", vocab=drawer.vocab, rows=256, repeatable=again, moved=moved, ok=again and not moved)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`run` as a graph; it ran once before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def check_graph(results: Results, drawers: list[Drawer], args: argparse.Namespace) -> None:
    drawer, rules = drawers[0], list(RULES.values())
    logits = make_logits("zipf", 64, drawer.vocab)
    rows = Rows([Rule(0.0)] * 64)
    tokens = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    graph = captured(lambda: drawer.into(tokens, logits, rows))
    allocated, differs = torch.cuda.memory_stats()["allocation.all.allocated"], 0
    drawer.into(tokens, logits, rows)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    for turn in range(len(rules)):
        other = Rows([rules[(row + turn) % len(rules)] for row in range(64)], first_seed=turn)
        logits.copy_(make_logits("zipf", 64, drawer.vocab, seed=turn))
        rows.slots.copy_(other.slots)
        rows.positions.copy_(other.positions.add_(turn))
        for name, column in other.staged.items():
            rows.staged[name].copy_(column)
        graph.replay()
        differs += int((tokens != drawer(logits, other)).sum())
    results.emit("graph", replays=len(rules), differs=differs, allocations=allocated, ok=not differs and not allocated)


def check_frequencies(results: Results, drawers: list[Drawer], args: argparse.Namespace) -> None:
    drawer, batches = drawers[0], 16
    logits = make_logits("zipf", 1, drawer.vocab, seed=4) * 0.5
    observed = torch.zeros(drawer.vocab, device="cuda", dtype=torch.float64)
    for batch in range(batches):
        rows = Rows([QWEN3] * MOST_ROWS, first_seed=batch)
        rows.by_row["seed"].fill_(11)
        rows.place()
        rows.positions.copy_(torch.arange(MOST_ROWS, device="cuda") + batch * MOST_ROWS)
        tokens = drawer(logits.expand(MOST_ROWS, -1), rows)
        observed += torch.bincount(tokens, minlength=drawer.vocab)

    def excess(top_p: float) -> tuple[float, int]:
        """Standard deviations of chi2 above its mean, and draws that the rule cannot give."""
        weights, order = (logits[0].double() / QWEN3.temperature).softmax(-1).topk(QWEN3.top_k)
        kept = weights * (weights.cumsum(0) - weights < top_p * weights.sum())
        expected = kept / kept.sum() * batches * MOST_ROWS
        likely = expected >= 5
        seen, degrees = observed[order], int(likely.sum()) - 1
        chi2 = float(((seen - expected)[likely] ** 2 / expected[likely]).sum())
        return (chi2 - degrees) / (2 * degrees) ** 0.5, int(batches * MOST_ROWS - seen[kept > 0].sum())

    (own, outside), wrong = excess(QWEN3.top_p), [excess(top_p) for top_p in (0.85, 0.9, 1.0)]
    detects = all(deviation > 10 or impossible for deviation, impossible in wrong)
    ok = own < 5 and outside == 0 and detects
    results.emit("frequencies", draws=batches * MOST_ROWS, own=own, outside=outside, wrong_top_p=wrong, ok=ok)


def milliseconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Median over replays."""
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def check_speed(results: Results, drawers: list[Drawer], args: argparse.Namespace) -> None:
    for drawer in drawers:
        for count in (1, 64, 256):
            # Several batches one after another, together several times the L2 cache where the rows are many.
            copies = max(1, min(8, 300_000_000 // (count * drawer.vocab * 4)))
            batches = [make_logits("zipf", count, drawer.vocab, seed=copy) for copy in range(copies)]
            took = {
                name: milliseconds(captured(partial(draw_all, drawer, batches, Rows([rule] * count))), args.replays)
                for name, rule in RULES.items()
            }
            took["argmax"] = milliseconds(captured(partial(argmax_all, batches)), args.replays)
            took = {name: whole / copies for name, whole in took.items()}
            extra = took["qwen3"] - took["greedy"]
            slow = [name for name in SEARCHED if took[name] > SEARCH_BARS_MS[count]]
            facts = {"vocab": drawer.vocab, "rows": count, "copies": copies, "ms": took, "above_bar": slow}
            ok = extra < (2 if count > 64 else 1) * BAR_MS and not slow
            results.emit("speed", **facts, extra_ms=extra, ok=ok)


def draw_all(drawer: Drawer, batches: list[Tensor], rows: Rows) -> None:
    """Sample each batch."""
    for logits in batches:
        drawer.into(rows.tokens, logits, rows)


def argmax_all(batches: list[Tensor]) -> None:
    """What greedy rows would take alone."""
    for logits in batches:
        logits.argmax(dim=-1)


CHECKS = {
    "numbers": check_numbers,
    "place": check_place,
    "graph": check_graph,
    "frequencies": check_frequencies,
    "speed": check_speed,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHECKS))
    parser.add_argument("--replays", type=int, default=20)
    args = parser.parse_args()
    results = Results("sampling")
    drawers = [Drawer(vocab) for vocab in VOCABS]
    for name in args.only.split(","):
        with results.part(name):
            CHECKS[name](results, drawers, args)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
