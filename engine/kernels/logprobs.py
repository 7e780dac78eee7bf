"""Log probabilities of chosen tokens and of the likeliest ones: log_softmax, from the candidates of a draw."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sample import WARPS, SampleColumns, candidate_sizes, gather_candidates
from engine.kernels.sample_search import extent, nth, rank_few
from engine.kernels.sample_space import SampleSpace


class LogprobColumns(NamedTuple):
    """By row slot, on the device, as `gather_candidates` reads them: what a row asks for, as a draw that would need it.

    A row that asks has temperature 1, and as top_k the number of likeliest tokens that it wants, at least 1; a row that
    does not has temperature 0.
    """

    wishes: SampleColumns
    tops: Tensor
    """int32: how many of the likeliest tokens are wanted."""


@triton.jit
def list_many(values, ids, gathered, size, top, rate, wished, log_total, top_ids, top_values, BLOCK: tl.constexpr):
    """Write the `wished` likeliest of many candidates and their log probabilities, one search for each."""
    least, greatest, _, _ = extent(values, ids, gathered, size, top, rate, float("inf"), BLOCK=BLOCK)
    for place in range(0, wished):
        token, logit = nth(values, ids, gathered, size, top, rate, least, greatest, place, BLOCK=BLOCK)
        tl.store(top_ids + place, token)
        tl.store(top_values + place, logit - top - log_total)


@triton.jit(do_not_specialize_on_alignment=["slots", "targets", "own", "top_ids", "top_values"])
def _read_logprobs(
    logits,
    wanted,
    slots,
    targets,
    tops,
    rates,
    counts,
    tile_weights,
    candidates,
    ids,
    own,
    top_ids,
    top_values,
    vocab,
    row_stride,
    out_stride,
    TILES: tl.constexpr,
    TILES_WIDTH: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rate = tl.load(rates + row)
    if rate > 0:
        count, top, wished = tl.load(counts + row), tl.load(tops + row), tl.load(wanted + tl.load(slots + row))
        tile = tl.arange(0, TILES_WIDTH)
        whole = tl.sum(tl.load(tile_weights + row * TILES + tile, mask=tile < TILES, other=0), 0)
        # The largest token's own weight is 2**40.
        log_total = tl.log(whole.to(tl.float32) * 9.094947017729282e-13)
        target = tl.load(targets + row)
        tl.store(own + row * out_stride, tl.load(logits + row * row_stride + target) - top - log_total)
        row_values, row_ids = candidates + row * MANY, ids + row * MANY
        out = row * out_stride
        if count <= FEW:
            exists, token, distance, _, rank, _ = rank_few(row_values, row_ids, count, top, rate, FEW=FEW, STEP=STEP)
            listed = exists & (rank < wished)
            tl.store(top_ids + out + rank, token, mask=listed)
            tl.store(top_values + out + rank, -distance - log_total, mask=listed)
        else:
            gathered, size = count, count
            if count > MANY:
                row_values = logits + row * row_stride
                gathered, size = 0, vocab
            list_many(
                row_values,
                row_ids,
                gathered,
                size,
                top,
                rate,
                wished,
                log_total,
                top_ids + out,
                top_values + out,
                BLOCK,
            )


class LogprobOutputs(NamedTuple):
    """Where log probabilities go, with one stride from row to row; rows that ask for none are left as they are."""

    own: Tensor
    """float32 `[rows]`: of the targets."""
    top_ids: Tensor
    """int32 `[rows, n]`: the likeliest tokens, the likeliest first and the lowest first among equals."""
    top: Tensor
    """float32 `[rows, n]`: theirs."""


def read_logprobs(
    logits: Tensor,
    columns: LogprobColumns,
    slots: Tensor,
    targets: Tensor,
    outputs: LogprobOutputs,
    space: SampleSpace,
    unused: Tensor,
) -> None:
    """Log probabilities under `logits` (float32 `[rows, vocab]`, rows contiguous) of `targets` (int32 `[rows]`).

    `slots`, int64 `[rows]`, names each row's place in `columns`; `unused` is an int32 `[rows]` that may be overwritten.
    """
    rows, vocab = logits.shape
    # The position decides about draws alone, and of these nothing is drawn.
    gather_candidates(logits, columns.wishes, slots, slots, unused, space)
    _read_logprobs[(rows,)](
        logits,
        columns.tops,
        slots,
        targets,
        space.tops,
        space.rates,
        space.counts,
        space.tile_weights,
        space.values,
        space.ids,
        *outputs,
        vocab,
        logits.stride(0),
        outputs.own.stride(0),
        num_warps=WARPS,
        **candidate_sizes(space),
    )
