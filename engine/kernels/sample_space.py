"""The device memory that sampling works in. Sizes alone, which are asked for where no Triton is."""

from typing import NamedTuple

from torch import Tensor

GROUP = 128
"""Tokens whose largest logit the first pass keeps: a top_k up to vocabulary / 128 bounds the candidates from these."""
TILE = 4096
"""Tokens of a program of the two passes over all logits: 16 KiB."""
MANY = 8192
"""Candidates of a row, or tokens of a bin, that are kept; a bin with more is searched in the logits."""
BINS = 4096
"""A bin is 0.007 temperatures wide at most: of 150,000 normally distributed logits, 400 lie in the fullest one."""
STATE = 6
"""Of a row's search: weight kept so far, bound, number or weight before the bin, weight before it, bin, weight that
min-p keeps. The bin is -1 where nothing crosses the bound.
"""


class SampleSpace(NamedTuple):
    """Device memory that `engine.kernels.sample.sample` works in, for `rows` rows or more; see `space_shapes`."""

    maxima: Tensor
    tops: Tensor
    reach: Tensor
    rates: Tensor
    counts: Tensor
    tile_weights: Tensor
    values: Tensor
    ids: Tensor
    scales: Tensor
    searches: Tensor
    members: Tensor
    bin_counts: Tensor
    bin_weights: Tensor


def space_shapes(rows: int, vocab: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor of a `SampleSpace`."""
    many = min(MANY, 1 << (vocab - 1).bit_length())
    return {
        "maxima": ((rows, -(-vocab // GROUP)), "int32"),
        "tops": ((rows,), "float32"),
        "reach": ((rows,), "float32"),
        "rates": ((rows,), "float32"),
        "counts": ((rows,), "int32"),
        "tile_weights": ((rows, -(-vocab // TILE)), "int64"),
        "values": ((rows, many), "float32"),
        "ids": ((rows, many), "int32"),
        "scales": ((rows,), "float32"),
        "searches": ((rows, STATE), "int64"),
        "members": ((rows,), "int32"),
        "bin_counts": ((rows, BINS), "int32"),
        "bin_weights": ((rows, BINS), "int64"),
    }
