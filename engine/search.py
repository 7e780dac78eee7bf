"""Finds the largest number with which something still fits. Pure."""

from collections.abc import Callable


def largest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that fits, if whatever is below one that fits does too; None for none."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
