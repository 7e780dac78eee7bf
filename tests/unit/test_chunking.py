"""The chunk budget: a pure function of rows and a frozen table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chunking import ChunkLimits, StepCosts, chunk_budget, chunk_budgets

COSTS = StepCosts((0, 16, 64), (0, 256, 1024), ((0.0, 0.010, 0.040), (0.004, 0.014, 0.044), (0.008, 0.018, 0.048)))


def limits(itl_ms: float = 15.0, minimum: int = 64, page: int = 16, step: int = 2048) -> ChunkLimits:
    return ChunkLimits(step, page, minimum, itl_ms / 1000)


def test_a_table_is_interpolated_and_extended():
    assert COSTS.of(16, 256) == pytest.approx(0.014)
    assert COSTS.of(40, 640) == pytest.approx((0.029 + 0.033) / 2)
    assert COSTS.of(16, 2048) == pytest.approx(0.084)


def test_nobody_waits_for_a_token_when_no_row_is_active():
    assert chunk_budget(COSTS, limits(), 0) == 2048


def test_the_target_bounds_the_step():
    tokens = chunk_budget(COSTS, limits(itl_ms=14.0), 16)
    assert tokens == 256
    assert chunk_budget(COSTS, limits(itl_ms=24.0), 16) > tokens


def test_a_slow_lane_may_always_take_two_and_a_half_decode_steps():
    assert chunk_budget(COSTS, limits(itl_ms=1.0, minimum=1), 64) == 304  # 0.020 s = 0.008 + 0.012, and 307 tokens fit


def test_min_chunk_is_kept_where_pages_are_larger():
    assert chunk_budget(COSTS, limits(itl_ms=0.001, minimum=100, page=64), 16) == 128


def test_min_chunk_is_a_floor_and_the_step_a_ceiling():
    assert chunk_budget(COSTS, limits(itl_ms=1.0, minimum=512), 16) == 560  # 1.1 x 0.024 s, and 573 tokens fit
    assert chunk_budget(COSTS, limits(itl_ms=1e6, step=80), 16) == 64


def test_where_steps_with_chunks_have_a_floor_all_tokens_that_it_pays_for_are_computed():
    """Measured on an H200 with a slow host: 17 ms to launch a step with chunks, 4 ms for one without."""
    costs = StepCosts((1, 127), (0, 64, 256, 1024), ((0.003, 0.017, 0.017, 0.020), (0.009, 0.017, 0.018, 0.028)))
    for rows in (1, 16, 64):
        assert chunk_budget(costs, limits(itl_ms=10.0), rows) >= 256


@given(
    rows=st.integers(0, 80), itl=st.floats(0.1, 1000), minimum=st.integers(1, 700), page=st.sampled_from([16, 64]),
    step=st.integers(80, 4096),
)  # fmt: skip
def test_a_budget_is_whole_pages_within_the_step_and_grows_with_the_target(rows, itl, minimum, page, step):
    given_limits = limits(itl, minimum, page, step)
    tokens = chunk_budget(COSTS, given_limits, rows)
    assert 0 <= tokens <= step - rows
    assert tokens % page == 0 or tokens == step - rows
    assert tokens <= chunk_budget(COSTS, limits(itl * 2, minimum, page, step), rows)


def test_every_row_count_has_its_budget():
    budgets = chunk_budgets(COSTS, limits(), 64)
    assert len(budgets) == 65
    assert budgets[16] == chunk_budget(COSTS, limits(), 16)


@pytest.mark.parametrize(
    ("rows", "tokens", "seconds"),
    [((), (0, 1), ()), ((0,), (1, 2), ((1.0, 2.0),)), ((1, 0), (0, 1), ((1.0, 2.0),) * 2), ((0,), (0, 1), ((1.0,),))],
)
def test_a_table_that_is_no_table_is_refused(rows, tokens, seconds):
    with pytest.raises(ValueError, match="step-cost table"):
        StepCosts(rows, tokens, seconds)
