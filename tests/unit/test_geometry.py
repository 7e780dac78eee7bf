"""The shape of a page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.geometry import DTYPE_BYTES, PAGE_SIZES, KvGeometry, PageSizeError, check_page_size

SMOLLM2 = KvGeometry(page_size=16, layers=30, kv_heads=3, head_dim=64, dtype="float32")


def test_bytes_of_a_known_model() -> None:
    assert SMOLLM2.page_shape == (30, 2, 16, 3, 64)
    assert SMOLLM2.token_bytes == 46_080
    assert SMOLLM2.page_bytes == 737_280


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_page_is_its_shape_in_elements(page_size: int, dtype: str) -> None:
    geometry = KvGeometry(page_size, layers=3, kv_heads=5, head_dim=8, dtype=dtype)
    layers, pair, slots, heads, dim = geometry.page_shape
    assert geometry.page_bytes == layers * pair * slots * heads * dim * DTYPE_BYTES[dtype]
    assert geometry.page_bytes == geometry.token_bytes * page_size


@pytest.mark.parametrize("page_size", [0, 1, 15, 32, 128, -16, True])
def test_other_page_sizes_are_refused_with_the_allowed_ones(page_size: int) -> None:
    with pytest.raises(PageSizeError, match=rf"kv_page_size is {page_size}, but must be 16 or 64 tokens"):
        check_page_size(page_size)
    with pytest.raises(PageSizeError):
        KvGeometry(page_size, layers=1, kv_heads=1, head_dim=1, dtype="float32")


def test_impossible_shapes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kv_heads is 0, but must be at least 1"):
        KvGeometry(16, layers=1, kv_heads=0, head_dim=64, dtype="float32")
    with pytest.raises(ValueError, match="dtype is 'int8', but must be one of float32"):
        KvGeometry(16, layers=1, kv_heads=1, head_dim=64, dtype="int8")


@given(tokens=st.integers(0, 1 << 20), page_size=st.sampled_from(PAGE_SIZES))
def test_pages_for_is_the_least_number_that_holds_the_tokens(tokens: int, page_size: int) -> None:
    pages = KvGeometry(page_size, layers=1, kv_heads=1, head_dim=1, dtype="float32").pages_for(tokens)
    assert pages * page_size >= tokens
    assert pages == 0 or (pages - 1) * page_size < tokens
