"""The sampling kernels in Triton's interpreter: against float64, against the CPU's sampler, and statistically."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.interpreter  # noqa: F401
from engine.cpu.arena import Arena
from engine.kernels import sample as kernels
from engine.kernels import sample_space
from engine.kernels.sample import SampleColumns, sample
from engine.kernels.sample_space import SampleSpace, space_shapes
from engine.sampling import Sampler, SamplingRows, uniform

VOCAB = 700


class Rule(NamedTuple):
    """Parameters of a row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


RULES = [
    Rule(0.0, 5, 0.1, 0.5),
    Rule(),
    Rule(0.6, 20, 0.95),
    Rule(1.5, 200),
    Rule(0.8, 500, 0.9),
    Rule(0.7, 0, 0.5),
    Rule(1.0, 0, 1.0, 0.05),
    Rule(1.3, 40, 0.9, 0.02),
    Rule(1.3, 300, 1.0, 0.02),
    Rule(1.0, 0, 0.97, 0.01),
    Rule(1.0, 1),
    Rule(1.0, 0, 1e-9),
    Rule(1.0, 0, 1.0, 1.0),
    Rule(1e-4),
    Rule(2.0, VOCAB + 7, 0.99, 0.001),
]


@pytest.fixture(params=["few", "many", "more"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are compared, searched, or not gathered at all, whatever their number."""
    if request.param != "few":
        monkeypatch.setattr(kernels, "FEW", 2)
        monkeypatch.setattr(sample_space, "MANY", 2048 if request.param == "many" else 4)


def new_space(rows: int, vocab: int) -> SampleSpace:
    """As a lane has it, with leftovers of another step in it."""
    return SampleSpace(
        **{
            name: torch.full(shape, 77, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in space_shapes(rows, vocab).items()
        }
    )


def columns(rules: list[Rule], seeds: list[int]) -> SampleColumns:
    signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
    return SampleColumns(
        torch.tensor([rule.temperature for rule in rules]),
        torch.tensor([rule.top_k for rule in rules], dtype=torch.int32),
        torch.tensor([rule.top_p for rule in rules]),
        torch.tensor([rule.min_p for rule in rules]),
        torch.tensor(signed),
    )


def draw(logits: Tensor, rules: list[Rule], positions: list[int], seeds: list[int] | None = None) -> list[int]:
    """Tokens of rows in slots of their own."""
    rows, vocab = logits.shape
    tokens = torch.full((rows,), -5, dtype=torch.int32)
    slots = torch.arange(rows).flip(0)
    table = SampleColumns(*(column.flip(0) for column in columns(rules, seeds or [42] * rows)))
    sample(logits, table, slots, torch.tensor(positions), tokens, new_space(rows, vocab))
    return tokens.tolist()


def cpu_draw(logits: Tensor, rules: list[Rule], positions: list[int], seeds: list[int] | None = None) -> list[int]:
    arena = Arena()
    Sampler.reserve(arena, logits.shape[1])
    arena.allocate()
    table = columns(rules, seeds or [42] * len(rules))
    return Sampler(arena).sample(logits, SamplingRows(*table, torch.tensor(positions))).tolist()


def cumulated(logits: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray, float]:
    """Tokens that the rule keeps in order, their cumulated weights, and how near a filter came to deciding otherwise.

    In float64, by plain definitions.
    """
    temperature, top_p, min_p = (float(np.float32(number)) for number in (rule.temperature, rule.top_p, rule.min_p))
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits[order] - logits[order[0]]) / temperature)
    if rule.top_k:
        order, weights = order[: rule.top_k], weights[: rule.top_k]
    before = np.cumsum(weights) - weights
    bound = top_p * weights.sum()
    keep = ((before < bound) | (rule.top_p >= 1)) & (weights >= min_p)
    keep[0] = True
    near = [1.0]
    if rule.top_p < 1:
        near.append(np.abs(before[1:] / bound - 1).min())
    if rule.min_p > 0:
        near.append(np.abs(weights[1:] / min_p - 1).min())
    return order[keep], np.cumsum(weights[keep]), min(near)


def reference(logits: Tensor, rule: Rule, number: float) -> int | None:
    """The token, or None where a rounding of float32 may decide."""
    values = logits.double().numpy()
    if rule.temperature == 0:
        return int(values.argmax())
    order, sums, near = cumulated(values, rule)
    target = number * sums[-1]
    if min(near, np.abs(sums / target - 1).min()) < 1e-5:
        return None
    return int(order[np.searchsorted(sums, target, side="right")])


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.usefixtures("limits")
def test_tokens_are_those_of_a_float64_reference() -> None:
    logits, positions = random_logits(len(RULES)), list(range(len(RULES)))
    seeds = [(1 << 63) + 9] * len(positions)
    signed = torch.full((len(positions),), -(1 << 63) + 9)
    numbers = uniform(signed, torch.tensor(positions)).tolist()
    expected = [reference(*row) for row in zip(logits, RULES, numbers, strict=True)]
    got = draw(logits, RULES, positions, seeds)
    assert sum(token is None for token in expected) <= 1
    assert [own for own, token in zip(got, expected, strict=True) if token is not None] == [
        token for token in expected if token is not None
    ]


def test_tokens_are_those_of_the_cpu_lane() -> None:
    logits = random_logits(len(RULES), seed=3)
    positions = [7 * row for row in range(len(RULES))]
    seeds = [(1 << 64) - 1 - row for row in range(len(RULES))]
    assert draw(logits, RULES, positions, seeds) == cpu_draw(logits, RULES, positions, seeds)


@pytest.mark.usefixtures("limits")
def test_equal_logits_go_by_token() -> None:
    """Few distinct values, so that every bound falls among equals; exact in both samplers."""
    logits = torch.randint(0, 4, (6, 300), generator=torch.Generator().manual_seed(5)).float()
    logits[5] = -0.0
    logits[5, ::3] = 0.0
    rules = [Rule(1.0, 30), Rule(1.0, 250), Rule(1.0, 0, 0.5), Rule(1.0, 0, 1.0, 0.04), Rule(1.0, 40, 0.71), Rule(1.0)]
    numbers = uniform(torch.full((6,), 42), torch.arange(6)).tolist()
    expected = [reference(*row) for row in zip(logits, rules, numbers, strict=True)]
    assert None not in expected
    assert draw(logits, rules, list(range(6))) == expected


def test_the_lowest_token_wins_a_tie_of_a_greedy_row() -> None:
    logits = torch.full((2, VOCAB), -1.0)
    logits[0, [17, 300, 699]] = 4.0
    logits[1] = 0.0
    logits[1, :7] = -0.0
    logits[1, 3:5] = -1.0
    assert draw(logits, [Rule(0.0)] * 2, [0, 0]) == [17, 0]


@pytest.mark.usefixtures("limits")
def test_a_row_does_not_depend_on_its_mates_or_its_place() -> None:
    logits = random_logits(8, 400).bfloat16().float()  # bfloat16 makes ties
    rules = [Rule(0.0), Rule(1.0, 20), Rule(0.9, 0, 0.9), Rule(1.1, 300, 0.8), Rule(1.0, 0, 1.0, 0.1), Rule()]
    rules += [Rule(0.6, 20, 0.95), Rule(3.0)]
    seeds, positions = list(range(8)), [5, 0, 9, 1, 77, 3, 1000, 2]
    alone = [draw(logits[i : i + 1], rules[i : i + 1], positions[i : i + 1], seeds[i : i + 1])[0] for i in range(8)]
    order = [4, 1, 0, 7, 3, 6, 2, 5]
    together = draw(logits[order], [rules[i] for i in order], [positions[i] for i in order], [seeds[i] for i in order])
    assert together == [alone[i] for i in order]


def test_seed_and_position_alone_decide() -> None:
    logits = random_logits(1, 60).expand(12, -1).contiguous()
    rules, positions = [Rule(3.0)] * 12, list(range(12))
    first = draw(logits, rules, positions, [5] * 12)
    assert first == draw(logits, rules, positions, [5] * 12)
    assert first != draw(logits, rules, positions, [6] * 12)
    assert len(set(first)) > 4


def test_frequencies_are_those_of_the_rule_and_a_wrong_top_p_would_show() -> None:
    """Of these shares top-p 0.9 keeps four tokens; 0.85 keeps three and 0.95 five, each expected 10 times or more."""
    count, shares = 200, torch.tensor([0.5, 0.25, 0.1, 0.06, 0.05, 0.04])
    logits = (shares.log() * 0.7).expand(count, -1).contiguous()
    tokens = torch.tensor(draw(logits, [Rule(0.7, 0, 0.9)] * count, list(range(count)), [9] * count))
    observed = torch.bincount(tokens, minlength=6).double()
    kept = shares[:4].double() / shares[:4].sum()
    assert observed[4:].tolist() == [0, 0]
    assert observed[3] > 5
    chi2 = float(((observed[:4] - kept * count) ** 2 / (kept * count)).sum())
    assert chi2 < 3 + 5 * 6**0.5


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("extreme", [1e30, -1e30, -math.inf])
def test_extreme_logits_give_a_token(extreme: float) -> None:
    logits = random_logits(4, 300)
    logits[:, 3] = extreme
    drawn = draw(logits, [Rule(1e-3, 0, 0.9), Rule(1.0), Rule(1.0, 250), Rule(1.0, 0, 1.0, 1e-6)], [0, 1, 2, 3])
    assert (drawn == [3] * 4) == (extreme > 0)
    assert extreme > 0 or 3 not in drawn


@pytest.mark.usefixtures("limits")
def test_logits_that_are_not_finite_give_some_token_of_the_vocabulary() -> None:
    logits = random_logits(5, 130)
    logits[0] = math.nan
    logits[1, 4] = math.nan
    logits[2] = -math.inf
    logits[3, 7] = math.inf
    logits[4, :] = math.inf
    for rule in (Rule(0.0), Rule(1.0), Rule(1.0, 100, 0.9), Rule(1.0, 0, 1.0, 0.5)):
        assert all(0 <= token < 130 for token in draw(logits, [rule] * 5, [0] * 5))


def test_the_search_ends_on_the_last_of_many_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEW", 2)
    monkeypatch.setattr(sample_space, "MANY", 2)
    logits = torch.zeros(3, 700)
    rules, positions = [Rule(1.0), Rule(1.0, 600), Rule(1.0, 0, 0.5)], [0, 1, 2]
    numbers = uniform(torch.full((3,), 42), torch.arange(3)).tolist()
    expected = [math.floor(number * size) for number, size in zip(numbers, (700, 600, 350), strict=True)]
    assert draw(logits, rules, positions) == expected


@pytest.mark.parametrize("vocab", [2, 127, 128, 129, 4096, 4097])
def test_any_size_of_vocabulary(vocab: int) -> None:
    logits = random_logits(3, vocab, seed=vocab)
    rules = [Rule(0.0), Rule(1.0, 2), Rule(0.5, 0, 0.9)]
    assert draw(logits, rules, [0, 1, 2]) == cpu_draw(logits, rules, [0, 1, 2])


@pytest.mark.parametrize("step", [0.0, 0.25])
def test_rows_with_many_candidates_are_drawn_as_on_the_cpu(step: float) -> None:
    """More than `MANY`, over several tiles: one by one, and so many equals that a bin holds more than `FEW`."""
    vocab, rules = 9000, [Rule(), Rule(2.0), Rule(1.0, 0, 0.95), Rule(1.0, 2000, 0.9), Rule(1.0, 0, 1.0, 0.02)]
    rules += [Rule(3.0, 500, 0.99, 0.01), Rule(1.0, 8000, 1.0, 0.02), Rule(0.0)]
    logits = random_logits(len(rules), vocab, seed=11) / 3
    if step:
        logits = (logits / step).round() * step
    positions = list(range(len(rules)))
    numbers = uniform(torch.full((len(rules),), 42), torch.arange(len(rules))).tolist()
    expected = [reference(*row) for row in zip(logits, rules, numbers, strict=True)]
    got = draw(logits, rules, positions)
    assert sum(token is None for token in expected) <= 2
    assert [own for own, token in zip(got, expected, strict=True) if token is not None] == [
        token for token in expected if token is not None
    ]


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1e3])
def test_bins_hold_any_width_of_candidates(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEW", 2)
    logits = random_logits(3, 300)
    logits[:, 40:45] = 20.0
    rules = [Rule(temperature), Rule(temperature, 0, 0.9), Rule(temperature, 250, 0.9)]
    assert draw(logits, rules, [0, 1, 2]) == cpu_draw(logits, rules, [0, 1, 2])
