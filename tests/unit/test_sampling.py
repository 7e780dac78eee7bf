"""The sampler against a float64 reference, and statistically."""

import numpy as np
import pytest
import torch
import transformers

from engine.cpu.arena import Arena
from engine.sampling import Sampler, SamplingRows, uniform

VOCAB = 3000


def sampler(vocab: int = VOCAB) -> Sampler:
    arena = Arena()
    Sampler.reserve(arena, vocab)
    arena.allocate()
    return Sampler(arena)


def rows(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, *, seed: int = 0
) -> SamplingRows:
    """`count` rows with the same parameters at positions 0, 1, 2, ..."""
    return SamplingRows(
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.full((count,), seed, dtype=torch.int64),
        torch.arange(count),
    )


def logits(count: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def reference(values: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, *, number: float) -> int:
    """Token by plain loops in float64; ties in the order of token ids."""
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if temperature == 0:
        return order[0]
    weights = [float(np.exp((np.float64(values[token]) - values[order[0]]) / temperature)) for token in order]
    if top_k:
        order, weights = order[:top_k], weights[:top_k]
    total, kept, running = sum(weights), [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if not kept or ((running < top_p * total or top_p == 1) and weight >= min_p):
            kept.append((token, weight))
        running += weight
    target, running = number * sum(weight for _, weight in kept), 0.0
    for token, weight in kept:
        running += weight
        if running > target:
            return token
    return kept[-1][0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.0, 5, 0.1, 0.5),
        (1.0, 0, 1.0, 0.0),
        (0.6, 20, 0.95, 0.0),
        (1.5, 100, 1.0, 0.0),
        (0.8, 2000, 0.9, 0.0),
        (0.7, 0, 0.5, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.3, 40, 0.9, 0.02),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1e-9, 0.0),
        (1.0, 0, 1.0, 1.0),
        (1e-4, 0, 1.0, 0.0),
        (2.0, VOCAB + 7, 0.99, 0.001),
    ],
)
def test_tokens_are_those_of_a_float64_reference(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    values = logits(24)
    asked = rows(24, temperature, top_k, top_p, min_p, seed=42)
    numbers = uniform(asked.seed, asked.position).tolist()
    exact = [float(torch.tensor(value)) for value in (temperature, top_p, min_p)]
    expected = [
        reference(row.numpy(), exact[0], top_k, exact[1], exact[2], number=number)
        for row, number in zip(values, numbers, strict=True)
    ]
    assert sampler().sample(values, asked).tolist() == expected


def test_the_lowest_token_wins_a_tie_of_a_greedy_row() -> None:
    values = torch.zeros((1, VOCAB))
    values[0, [17, 900, 2999]] = 4.0
    assert sampler().sample(values, rows(1, temperature=0.0)).tolist() == [17]


def test_a_row_does_not_depend_on_its_mates_or_its_place() -> None:
    values = logits(9).bfloat16().float()  # bfloat16 makes ties
    parameters = [(0.0, 0, 1.0, 0.0), (1.0, 20, 1.0, 0.0), (0.9, 0, 0.9, 0.0), (1.1, 700, 0.8, 0.0), (1.0, 0, 1.0, 0.1)]
    single = [rows(1, *parameters[index % 5], seed=index) for index in range(9)]
    alone = [sampler().sample(values[index : index + 1], one).item() for index, one in enumerate(single)]
    order = [4, 8, 1, 0, 7, 3, 6, 2, 5]
    together = SamplingRows(*(torch.cat(column) for column in zip(*(single[index] for index in order), strict=True)))
    assert sampler().sample(values[order], together).tolist() == [alone[index] for index in order]


def test_seed_and_position_alone_decide() -> None:
    values = logits(1).expand(64, -1)
    first = sampler().sample(values, rows(64, seed=5))
    assert first.tolist() == sampler().sample(values, rows(64, seed=5)).tolist()
    assert first.tolist() != sampler().sample(values, rows(64, seed=6)).tolist()
    assert len(set(first.tolist())) > 5


def test_numbers_are_the_published_splitmix64() -> None:
    """Position 0 of seed 0 is the finalizer applied twice; computed here in plain integers."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    gamma = 0x9E3779B97F4A7C15
    # First output of the generator of Steele, Lea and Flood for state 0, as its reference implementation prints it.
    assert mix(gamma) == 0xE220A8397B1DCDAF
    for seed, position in ((0, 0), (1, 5), (2**64 - 1, 3), (2**63, 40_000)):
        word = mix((mix((seed + gamma) % 2**64) + position * gamma) % 2**64)
        signed = seed - 2**64 if seed >= 2**63 else seed
        number = uniform(torch.tensor([signed]), torch.tensor([position]))
        assert number.dtype == torch.float64
        assert number.item() == (word >> 11) * 2.0**-53


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    count, cells = 100_000, 100
    steps = torch.arange(count)
    for numbers in (uniform(torch.zeros_like(steps), steps), uniform(steps, torch.full_like(steps, 77))):
        observed = torch.histc(numbers, cells, 0, 1).numpy()
        chi2 = float(((observed - count / cells) ** 2 / (count / cells)).sum())
        assert chi2 < 99 + 5 * (2 * 99) ** 0.5
        pairs = torch.stack((numbers[:-1], numbers[1:]))
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / count**0.5


def test_frequencies_are_the_softmax() -> None:
    count = 20_000
    values = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]])
    asked = rows(count, temperature=0.7, seed=9)
    drawn = sampler(5).sample(values.expand(count, -1), asked)
    expected = torch.softmax(values[0].double() / 0.7, 0) * count
    observed = torch.bincount(drawn, minlength=5)
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    assert chi2 < 4 + 5 * 8**0.5


@pytest.mark.parametrize("extreme", [1e30, -1e30])
def test_extreme_logits_give_a_token(extreme: float) -> None:
    values = logits(4)
    values[:, 3] = extreme
    drawn = sampler().sample(values, rows(4, temperature=1e-3, top_p=0.9)).tolist()
    assert (drawn == [3] * 4) == (extreme > 0)


def warped(values: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Probabilities of one row, float64, by transformers' warpers in its own order, which is ours."""
    scores = values[None].double() / temperature
    warpers = [
        transformers.TopKLogitsWarper(top_k) if top_k else None,
        transformers.TopPLogitsWarper(top_p) if top_p < 1 else None,
        transformers.MinPLogitsWarper(min_p) if min_p else None,
    ]
    for warper in filter(None, warpers):
        scores = warper(None, scores)
    return torch.softmax(scores, -1)[0]


DRAWS = 5000
BOUND = 5.0
"""Standard deviations of chi2: a sound sampler exceeds it in about one run of a million, and each run is the same."""


def deviation(expected: torch.Tensor, drawn: torch.Tensor) -> float:
    """How far the counts of `drawn` are from `expected`, in standard deviations of chi2; infinite for a token that
    cannot be drawn.
    """
    counts = torch.bincount(drawn, minlength=len(expected)).double()
    possible = expected > 0
    if counts[~possible].any():
        return float("inf")
    wanted = expected[possible] * DRAWS
    chi2 = ((counts[possible] - wanted) ** 2 / wanted).sum()
    freedom = max(1, int(possible.sum()) - 1)
    return float((chi2 - freedom) / (2 * freedom) ** 0.5)


def spread_logits() -> torch.Tensor:
    """60 tokens whose probabilities fall smoothly, so that a bound a little off takes in or leaves out a token."""
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    return torch.linspace(0, -5, 60)[order]


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.3, 30, 0.95, 0.02),
    (0.6, 20, 0.95, 0.0),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_frequencies_are_those_of_transformers_warpers(temperature, top_k, top_p, min_p) -> None:
    values = spread_logits()
    asked = rows(DRAWS, temperature, top_k, top_p, min_p, seed=4)
    drawn = sampler(60).sample(values.expand(DRAWS, -1), asked)
    assert deviation(warped(values, temperature, top_k, top_p, min_p), drawn) < BOUND


PLANTED = {
    "a top_p one token too wide": ((1.0, 0, 0.9, 0.0), (1.0, 0, 0.92, 0.0)),
    "a top_p one token too narrow": ((1.0, 0, 0.9, 0.0), (1.0, 0, 0.88, 0.0)),
    "no top_p": ((1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.0)),
    "a top_k one too large": ((0.7, 20, 1.0, 0.0), (0.7, 21, 1.0, 0.0)),
    "a temperature squared": ((0.7, 0, 1.0, 0.0), (0.49, 0, 1.0, 0.0)),
    "a min_p a little too large": ((1.0, 0, 1.0, 0.1), (1.0, 0, 1.0, 0.12)),
    "a min_p a little too small": ((1.0, 0, 1.0, 0.1), (1.0, 0, 1.0, 0.09)),
}


@pytest.mark.parametrize(("right", "wrong"), PLANTED.values(), ids=PLANTED)
def test_the_statistic_turns_red_for_a_wrong_filter(
    right: tuple[float, int, float, float], wrong: tuple[float, int, float, float]
) -> None:
    """By design: a sampler with a planted fault is told from a sound one by the same seeded draws."""
    values = spread_logits()
    sound, faulty = (
        sampler(60).sample(values.expand(DRAWS, -1), rows(DRAWS, *asked, seed=4)) for asked in (right, wrong)
    )
    assert deviation(warped(values, *right), sound) < BOUND < deviation(warped(values, *right), faulty)
