"""Penalties on one row against transformers' processor and a float64 computation."""

import numpy as np
import pytest
import torch
import transformers

from engine.messages import Sampling
from engine.penalties import penalize

VOCAB = 500


def case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, prompt and output; tokens repeat, and the two share some."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(VOCAB) * 4).astype(np.float32)
    return logits, rng.integers(0, 90, 120).astype(np.int32), rng.integers(60, 140, 80).astype(np.int32)


def penalized(seed: int, sampling: Sampling) -> np.ndarray:
    logits, prompt, outputs = case(seed)
    penalize(logits, prompt, outputs, sampling)
    return logits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.5, 1.05, 1.3, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(seed, penalty):
    logits, prompt, outputs = case(seed)
    ids = torch.from_numpy(np.concatenate((prompt, outputs)))[None].long()
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, torch.from_numpy(logits)[None].clone())
    ours = penalized(seed, Sampling(repetition_penalty=penalty))
    np.testing.assert_allclose(ours, expected[0].numpy(), rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0), (0, 0.7), (-2, 2), (0.3, -0.4)])
def test_presence_and_frequency_count_the_output_alone(seed, presence, frequency):
    logits, _, outputs = case(seed)
    counts = np.bincount(outputs, minlength=VOCAB)
    expected = logits.astype(np.float64) - frequency * counts - presence * (counts > 0)
    ours = penalized(seed, Sampling(presence_penalty=presence, frequency_penalty=frequency))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_the_repetition_penalty_comes_before_the_others():
    logits = np.array([3.0, -2.0, 1.0], np.float32)
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    penalize(logits, np.array([1], np.int32), np.array([0, 0], np.int32), sampling)
    assert logits.tolist() == [3.0 / 2 - 2 * 0.5 - 1, -4.0, 1.0]


def test_without_penalties_nothing_changes():
    logits, _, _ = case(0)
    assert (penalized(0, Sampling()) == logits).all()


def test_an_empty_output_has_no_penalty():
    logits, prompt, _ = case(1)
    before = logits.copy()
    penalize(logits, prompt, prompt[:0], Sampling(presence_penalty=2.0, frequency_penalty=2.0))
    assert (logits == before).all()


@pytest.mark.parametrize("penalty", [1e-40, 1e-30, 1e38])
def test_extreme_penalties_leave_finite_logits(penalty):
    assert np.isfinite(penalized(2, Sampling(repetition_penalty=penalty))).all()
