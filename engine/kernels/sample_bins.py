"""Draws from rows with too many candidates to compare each with each: their search spread over the whole GPU.

The tokens of interest of a row are put into bins of equal width by their distance from the largest logit; integer sums
of number and weight of each bin come from one pass over the logits. The last token that top-k keeps, the last one that
top-p keeps and the drawn one follow one another, each in the bin where its sum crosses its bound: the bin's tokens are
gathered in a pass and compared, which fixes the bound of the next search. The launches are the same whatever the rows
ask for; a row whose `scales` is 0 leaves them at once.
"""

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sample_search import (
    BEFORE_ALL,
    FARTHEST,
    INTEREST,
    crossing,
    extent,
    farthest_kept,
    limit,
    order_token,
    part_of,
    random_bits,
    rank_few,
    weigh,
)
from engine.kernels.sample_space import BINS, STATE, SampleSpace

if TYPE_CHECKING:
    from engine.kernels.sample import SampleColumns

PROGRAMS = 1024
"""Programs of a pass over all logits, or one for each row where the rows are more."""
PASS_TILE = 2048
"""Tokens that such a program reads at once: with 4096 it needs 170 registers, and one fits on an SM."""
SEARCHES = 3
_STATE = tl.constexpr(STATE)
_MASS = tl.constexpr(0)
_TARGET = tl.constexpr(1)
_BEFORE = tl.constexpr(2)
_BEFORE_WEIGHT = tl.constexpr(3)
_BIN = tl.constexpr(4)
_NEAR = tl.constexpr(5)


@triton.jit
def begin_search(row, reach, rate, whole, scales, searches, bin_counts, bin_weights, BINS: tl.constexpr):
    """Empty the bins of `row`, and choose their width so that they hold every token with a part in the draw."""
    bin = tl.arange(0, BINS)
    tl.store(bin_counts + row * BINS + bin, tl.zeros([BINS], tl.int32))
    tl.store(bin_weights + row * BINS + bin, tl.zeros([BINS], tl.int64))
    # Tokens beyond INTEREST weigh nothing: top-k may keep or drop them.
    span = tl.minimum(reach, INTEREST * 1.4426950408889634 / rate)
    tl.store(scales + row, BINS / tl.maximum(span, 1e-30))
    tl.store(searches + row * _STATE + _MASS, whole)
    tl.store(searches + row * _STATE + _NEAR, tl.zeros([], tl.int64))


@triton.jit
def _bin_tile(logits, row, tile, top, reach, scale, vocab, row_stride, BINS: tl.constexpr, TILE: tl.constexpr):
    """Tokens of a tile, their logits and distances, whether they are in a bin, and in which."""
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < vocab
    values = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf"))
    distance = top - values
    place = distance * scale
    # The last bin takes what rounding puts behind it.
    binned = inside & (distance <= reach) & (place < BINS + 1)
    return token, values, distance, binned, tl.minimum(tl.where(binned, place, 0.0).to(tl.int32), BINS - 1)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _fill_bins(
    logits,
    temperatures,
    top_ks,
    min_ps,
    slots,
    tops,
    reaches,
    rates,
    scales,
    searches,
    bin_counts,
    bin_weights,
    vocab,
    row_stride,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    if scale > 0:
        slot = tl.load(slots + row)
        top, reach, rate = tl.load(tops + row), tl.load(reaches + row), tl.load(rates + row)
        top_k = tl.load(top_ks + slot)
        counted = (top_k > 0) & (top_k < vocab)
        farthest = farthest_kept(tl.load(min_ps + slot), tl.load(temperatures + slot))
        for tile in range(tl.program_id(1), TILES, tl.num_programs(1)):
            _, _, distance, binned, bin = _bin_tile(
                logits, row, tile, top, reach, scale, vocab, row_stride, BINS=BINS, TILE=TILE
            )
            weight = weigh(distance, rate)
            tl.atomic_add(bin_weights + row * BINS + bin, weight, mask=binned & (weight > 0), sem="relaxed")
            if counted:
                tl.atomic_add(bin_counts + row * BINS + bin, 1, mask=binned, sem="relaxed")
            if farthest < FARTHEST:
                near = tl.sum(tl.where(binned & (distance <= farthest), weight, 0), 0)
                tl.atomic_add(searches + row * _STATE + _NEAR, near, sem="relaxed")


@triton.jit
def _gather_bin(
    logits,
    tops,
    reaches,
    scales,
    searches,
    members,
    candidates,
    ids,
    vocab,
    row_stride,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    MANY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    if scale > 0:
        picked = tl.load(searches + row * _STATE + _BIN)
        if picked >= 0:
            top, reach = tl.load(tops + row), tl.load(reaches + row)
            for tile in range(tl.program_id(1), TILES, tl.num_programs(1)):
                token, values, _, binned, bin = _bin_tile(
                    logits, row, tile, top, reach, scale, vocab, row_stride, BINS=BINS, TILE=TILE
                )
                wanted = binned & (bin == picked)
                count = tl.sum(wanted.to(tl.int32), 0)
                if count > 0:
                    # In no fixed order, on which nothing depends.
                    first = tl.atomic_add(members + row, count, sem="relaxed")
                    place = first + tl.cumsum(wanted.to(tl.int32), 0) - 1
                    kept = wanted & (place < MANY)
                    tl.store(candidates + row * MANY + place, values, mask=kept)
                    tl.store(ids + row * MANY + place, token, mask=kept)


@triton.jit
def _find(
    logits,
    row_values,
    row_ids,
    count,
    vocab,
    top,
    rate,
    by_count,
    target,
    before,
    before_weight,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Token where the sum crosses `target`, one of the bin's `count`, and the weight of all up to and with it."""
    token, mass = -1, before_weight
    if count <= FEW:
        exists, own_ids, _distance, weight, rank, weight_before = rank_few(
            row_values, row_ids, count, top, rate, FEW=FEW, STEP=STEP
        )
        first = tl.where(by_count, rank.to(tl.int64), weight_before) + before
        last = first + tl.where(by_count, 1, weight)
        found = exists & (first <= target) & (target < last)
        token = tl.max(tl.where(found, own_ids, -1), 0)
        mass = before_weight + tl.sum(tl.where(found, weight_before + weight, 0), 0)
    else:
        gathered, size = count, count
        if count > MANY:
            row_values, gathered, size = logits, 0, vocab
            before, before_weight = before * 0, before_weight * 0
        least, greatest, _all, _near = extent(row_values, row_ids, gathered, size, top, rate, FARTHEST, BLOCK=BLOCK)
        order, crossed = crossing(
            row_values,
            row_ids,
            gathered,
            size,
            top,
            rate,
            least,
            greatest,
            by_count,
            target - before,
            BLOCK=BLOCK,
        )
        token, mass = order_token(order), before_weight + crossed
    return token, mass


@triton.jit
def _pick(state, counts, weights, by_count, target, BINS: tl.constexpr):
    """Write to `state` the bin where the sum crosses `target`, and what lies before it."""
    bin = tl.arange(0, BINS)
    weight = tl.load(weights + bin)
    measure = weight
    if by_count:
        measure = tl.load(counts + bin).to(tl.int64)
    before = tl.cumsum(measure, 0) - measure
    crossed = (before <= target) & (target < before + measure)
    picked = tl.max(tl.where(crossed, bin, -1), 0)
    tl.store(state + _TARGET, target)
    tl.store(state + _BEFORE, tl.sum(tl.where(crossed, before, 0), 0))
    tl.store(state + _BEFORE_WEIGHT, tl.sum(tl.where(bin < picked, weight, 0), 0))
    tl.store(state + _BIN, picked.to(tl.int64))


@triton.jit(do_not_specialize=["search"], do_not_specialize_on_alignment=["slots", "positions", "tokens"])
def _search(
    search,
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    slots,
    positions,
    tops,
    rates,
    scales,
    searches,
    members,
    bin_counts,
    bin_weights,
    candidates,
    ids,
    tokens,
    vocab,
    row_stride,
    BINS: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """End the search before `search` among its bin's tokens, and pick the bin of this one."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(scales + row) > 0:
        state, slot = searches + row * _STATE, tl.load(slots + row)
        top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
        mass = tl.load(state + _MASS)
        if search > 0:
            if tl.load(state + _BIN) >= 0:
                token, mass = _find(
                    logits + row * row_stride,
                    candidates + row * MANY,
                    ids + row * MANY,
                    tl.load(members + row),
                    vocab,
                    tl.load(tops + row),
                    tl.load(rates + row),
                    search == 1,
                    tl.load(state + _TARGET),
                    tl.load(state + _BEFORE),
                    tl.load(state + _BEFORE_WEIGHT),
                    FEW=FEW,
                    MANY=MANY,
                    STEP=STEP,
                    BLOCK=BLOCK,
                )
                if token >= 0:
                    tl.store(tokens + row, token)
            if (search == 2) & (farthest_kept(min_p, tl.load(temperatures + slot)) < FARTHEST):
                mass = tl.minimum(mass, tl.load(state + _NEAR))
            # What the loads above read must not be overwritten sooner.
            tl.debug_barrier()
            tl.store(state + _MASS, mass)
        by_count = search == 0
        target = part_of(random_bits(tl.load(seeds + slot), tl.load(positions + row)), mass)
        target = tl.where(by_count, top_k.to(tl.int64) - 1, tl.where(search == 1, limit(mass, top_p) - 1, target))
        wanted = (search == 2) | (by_count & (top_k > 0) & (top_k < vocab)) | ((search == 1) & (top_p < 1))
        # No sum reaches a bound beyond all.
        target = tl.where(wanted, target, BEFORE_ALL)
        if search < 3:
            _pick(state, bin_counts + row * BINS, bin_weights + row * BINS, by_count, target, BINS=BINS)
            tl.store(members + row, 0)


def search_rows(
    logits: Tensor,
    columns: "SampleColumns",
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
    space: "SampleSpace",
    sizes: dict[str, Any],
) -> None:
    """Draw the rows whose `scales` are above 0; arguments as for `engine.kernels.sample.sample`.

    `sizes` has FEW, MANY, STEP and BLOCK.
    """
    rows, vocab = logits.shape
    tiles, stride = triton.cdiv(vocab, PASS_TILE), logits.stride(0)
    grid = (rows, max(1, min(tiles, PROGRAMS // rows)))
    passes = {"TILES": tiles, "TILE": PASS_TILE, "BINS": BINS}
    bins = (space.bin_counts, space.bin_weights)
    filters = (columns.temperature, columns.top_k, columns.min_p)
    heads = (space.tops, space.reach, space.rates, space.scales, space.searches)
    _fill_bins[grid](logits, *filters, slots, *heads, *bins, vocab, stride, num_warps=8, **passes)
    for search in range(SEARCHES + 1):
        _search[(rows,)](
            search,
            logits,
            *columns,
            slots,
            positions,
            space.tops,
            space.rates,
            space.scales,
            space.searches,
            space.members,
            *bins,
            space.values,
            space.ids,
            tokens,
            vocab,
            stride,
            BINS=BINS,
            num_warps=16,
            **sizes,
        )
        if search < SEARCHES:
            _gather_bin[grid](
                logits,
                space.tops,
                space.reach,
                space.scales,
                space.searches,
                space.members,
                space.values,
                space.ids,
                vocab,
                stride,
                MANY=sizes["MANY"],
                num_warps=8,
                **passes,
            )
