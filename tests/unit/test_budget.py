"""From bytes to pages, and from pages to the length of a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.budget import KvBudget, KvBudgetError, KvCapacity, SizeError, parse_size, servable_length
from kv.geometry import PAGE_SIZES, KvGeometry

GEOMETRY = KvGeometry(page_size=16, layers=2, kv_heads=2, head_dim=8, dtype="float32")
PAGE = GEOMETRY.page_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096), ("1B", 1), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 << 29), (" 3 kb ", 3000), ("2tib", 2 << 40), ("0.1GB", 100_000_000), ("1.9999B", 1),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1GiB", "1e9", "1.MiB", ".5MiB", "12XB", "1,5GB", "1GiB2", "inf", "0x10", "٣MiB"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SizeError, match=r"is no size: .* such as 512MiB") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.5"])
def test_nothing_is_no_size(text: str) -> None:
    with pytest.raises(SizeError, match="is 0 bytes, but a size is at least 1 byte"):
        parse_size(text)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@given(memory=st.integers(0, 1 << 22))
def test_a_budget_spends_what_it_has_on_whole_pages(page_size: int, memory: int) -> None:
    geometry = KvGeometry(page_size, layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")
    if memory < 2 * geometry.page_bytes:
        with pytest.raises(KvBudgetError):
            KvBudget(geometry, memory)
        return
    budget = KvBudget(geometry, memory)
    assert 0 <= memory - budget.bytes < geometry.page_bytes
    assert budget.bytes == budget.total_pages * geometry.page_bytes
    assert budget.capacity == KvCapacity(budget.total_pages - 1, page_size)
    assert budget.capacity.tokens == (budget.total_pages - 1) * page_size


def test_the_padding_page_is_not_usable() -> None:
    assert KvBudget(GEOMETRY, 2 * PAGE).capacity.usable_pages == 1
    with pytest.raises(KvBudgetError, match=rf"gets {2 * PAGE - 1} bytes .* 0 usable .* at least {2 * PAGE} bytes"):
        KvBudget(GEOMETRY, 2 * PAGE - 1)


def test_a_floor_in_tokens_is_met_or_refused_with_the_bytes_it_takes() -> None:
    assert KvBudget(GEOMETRY, 4 * PAGE, floor_tokens=48).capacity.tokens == 48
    with pytest.raises(
        KvBudgetError, match=rf"3 usable pages .* 4 are needed for 49 tokens: .* {5 * PAGE} bytes"
    ) as error:
        KvBudget(GEOMETRY, 4 * PAGE, floor_tokens=49)
    assert KvBudget(GEOMETRY, 5 * PAGE, floor_tokens=49).capacity.usable_pages == 4
    assert str(error.value).endswith("or lower the context limit")


def test_servable_length_is_the_smaller_of_model_and_pool() -> None:
    capacity = KvCapacity(usable_pages=10, page_size=64)
    assert servable_length(8192, capacity) == 640
    assert servable_length(512, capacity) == 512
