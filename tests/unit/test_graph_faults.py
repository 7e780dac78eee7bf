"""What `tests/gpu/check_graphs.py` judges by: logits, and the tokens that were sampled from them."""

from typing import Any

import torch

from tests.gpu.check_graphs import MAX_REGRET, Distance

RIGHT = torch.tensor([[0.0, 5.0, 4.9, -3.0]]).repeat(1, 3)


def compared(token: int | None) -> dict[str, Any]:
    """A step with equal logits, of which the other side sampled `token`."""
    distance = Distance()
    distance.add(RIGHT, RIGHT)
    if token is not None:
        distance.differ(RIGHT[0], token)
    return distance.report()


def test_a_token_that_nobody_computed_is_red_though_the_logits_are_equal() -> None:
    report = compared(3)
    assert report["error_nats"] == 0.0
    assert report["token_regret_nats"] > MAX_REGRET
    assert not report["small"]
    assert not report["same_tokens"]


def test_a_near_tie_is_small_but_not_the_same() -> None:
    report = compared(2)
    assert report["small"]
    assert not report["same_tokens"]


def test_equal_steps_are_small_and_the_same() -> None:
    report = compared(None)
    assert report["small"]
    assert report["same_tokens"]
