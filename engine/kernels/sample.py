"""Draws the next token of each row: greedy, temperature, top-k, top-p, min-p, each row by its own parameters and seed.

A token's weight is an integer, `2**40 * exp((logit - largest) / temperature)` rounded down. Integers add up to the same
sum in any order, so that a row's token depends on its logits, parameters, seed and position alone: not on its place in
the batch, on its mates, or on which threads came first.

What the filters leave is a beginning of the tokens in order of falling logit (equal logits: of rising token), and so is
what lies before the drawn token. A first pass finds how far down the row's last token of interest may lie, a second one
gathers the tokens that far; usually a few dozen of 150,000. They are compared each with each; where they are many, the
places where the sums cross the bounds are searched for instead (`engine.kernels.sample_bins`). Twelve launches,
whatever the rows ask for; of these the last eight have nothing to do where no row has many.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sample_bins import begin_search, search_rows
from engine.kernels.sample_search import (
    INTEREST,
    draw_of_few,
    farthest_kept,
    key,
    random_bits,
    value,
    weigh,
)
from engine.kernels.sample_space import BINS, GROUP, TILE, SampleSpace

FEW = 1024
"""Candidates that are compared each with each."""
_STEP = 8
_BLOCK = 1024
WARPS = 16
"""Of a program that has a row's candidates to itself."""


class SampleColumns(NamedTuple):
    """Parameters by row slot, on the device; see `engine.messages.Sampling`."""

    temperature: Tensor
    """float32."""
    top_k: Tensor
    """int32."""
    top_p: Tensor
    """float32."""
    min_p: Tensor
    """float32."""
    seed: Tensor
    """int64: the bits of the unsigned seed."""


@triton.jit
def _group_maxima(logits, maxima, vocab, row_stride, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
    tl.store(maxima + row * GROUPS + group, tl.max(key(values), 1), mask=group < GROUPS)


@triton.jit
def _kth_largest(keys, count, least, most):
    """The largest key that at least `count` of `keys` reach; `least` where fewer than `count` are above it."""
    low, high = least.to(tl.int64), most.to(tl.int64)
    for _ in range(32):
        middle = low + (high - low + 1) // 2
        enough = tl.sum((keys >= middle).to(tl.int32), 0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _reach(keys, exists, top, vocab, groups, temperature, top_k, top_p, min_p, bits):
    """How far below the largest logit a token may lie that has a part in the row's draw."""
    filtered = (top_k > 0) & (top_k < vocab)
    reach = tl.where(filtered, float("inf"), INTEREST * temperature)
    if filtered & (top_k <= groups):
        # At least top_k tokens are no smaller than the top_k-th of the groups' largest.
        reach = top - value(_kth_largest(keys, top_k, tl.min(keys, 0), tl.max(keys, 0)))
    if (min_p > 0) & ((top_k == 0) | (top_k >= vocab) | (top_p >= 1)):
        # With top-k and top-p, those below min_p still count in the sum that top_p is a part of.
        reach = tl.minimum(reach, farthest_kept(min_p, temperature))
    if (top_p < 1) | (min_p == 0):
        # Tokens that weigh less than share / vocabulary of the sum weigh less than the share together: those that top_p
        # drops, or without filters those that lie behind the drawn one. Half of it leaves room for rounding.
        share = tl.where(top_p < 1, 1 - top_p, (9007199254740992 - bits).to(tl.float32) * 1.1102230246251565e-16)
        gaps = tl.where(exists, top - value(keys), float("inf"))
        at_least = tl.sum(tl.exp2(-gaps * (1.4426950408889634 / temperature)), 0)
        bound = (tl.log(vocab.to(tl.float32)) - tl.log(0.5 * share * at_least)) * temperature
        reach = tl.where(filtered, reach, tl.minimum(reach, bound))
    return reach


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "tokens"])
def _begin_rows(
    logits,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    slots,
    positions,
    tops,
    reaches,
    rates,
    counts,
    tokens,
    vocab,
    row_stride,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    group = tl.arange(0, WIDTH)
    exists = group < GROUPS
    keys = tl.load(maxima + row * GROUPS + group, mask=exists, other=-2147483648)
    top_key = tl.max(keys, 0)
    first = tl.min(tl.where(keys == top_key, group, WIDTH - 1), 0)
    token = first * GROUP + tl.arange(0, GROUP)
    values = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=float("-inf"))
    tl.store(tokens + row, tl.min(tl.where((key(values) == top_key) & (token < vocab), token, vocab - 1), 0))
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    top = value(top_key)
    tl.store(tops + row, top)
    tl.store(counts + row, 0)
    if temperature > 0:
        bits = random_bits(tl.load(seeds + slot), tl.load(positions + row))
        top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
        tl.store(reaches + row, _reach(keys, exists, top, vocab, GROUPS, temperature, top_k, top_p, min_p, bits))
        tl.store(rates + row, 1.4426950408889634 / temperature)
    else:
        tl.store(rates + row, 0.0)


@triton.jit
def _gather(
    logits,
    tops,
    reaches,
    rates,
    counts,
    tile_weights,
    candidates,
    ids,
    vocab,
    row_stride,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    MANY: tl.constexpr,
):
    row = tl.program_id(0)
    rate = tl.load(rates + row)
    if rate > 0:
        tile = tl.program_id(1)
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < vocab
        values = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=inside, other=float("-inf"))
        distance = tl.load(tops + row) - values
        tl.store(tile_weights + row * TILES + tile, tl.sum(tl.where(inside, weigh(distance, rate), 0), 0))
        wanted = inside & (distance <= tl.load(reaches + row))
        count = tl.sum(wanted.to(tl.int32), 0)
        if count > 0:
            # The order in which tiles come here is not the same twice; nothing depends on it.
            place = tl.atomic_add(counts + row, count) + tl.cumsum(wanted.to(tl.int32), 0) - 1
            kept = wanted & (place < MANY)
            tl.store(candidates + row.to(tl.int64) * MANY + place, values, mask=kept)
            tl.store(ids + row.to(tl.int64) * MANY + place, token, mask=kept)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "tokens"])
def _draw(
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    slots,
    positions,
    tops,
    reaches,
    rates,
    counts,
    tile_weights,
    candidates,
    ids,
    scales,
    searches,
    bin_counts,
    bin_weights,
    tokens,
    vocab,
    TILES: tl.constexpr,
    TILES_WIDTH: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    STEP: tl.constexpr,
    BINS: tl.constexpr,
):
    """Draw the rows with few candidates, and begin the search of the others."""
    row = tl.program_id(0).to(tl.int64)
    rate = tl.load(rates + row)
    if rate > 0:
        slot, count, top = tl.load(slots + row), tl.load(counts + row), tl.load(tops + row)
        tile = tl.arange(0, TILES_WIDTH)
        whole = tl.sum(tl.load(tile_weights + row * TILES + tile, mask=tile < TILES, other=0), 0)
        if count <= FEW:
            tl.store(scales + row, 0.0)
            bits = random_bits(tl.load(seeds + slot), tl.load(positions + row))
            top_p, min_p = tl.load(top_ps + slot), tl.load(min_ps + slot)
            farthest = farthest_kept(min_p, tl.load(temperatures + slot))
            top_k = tl.load(top_ks + slot)
            top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
            row_values, row_ids = candidates + row * MANY, ids + row * MANY
            token = draw_of_few(
                row_values, row_ids, count, top, rate, whole, bits, top_k, top_p, farthest, FEW=FEW, STEP=STEP
            )
            # None is found where the logits are not finite: the largest stays.
            if token >= 0:
                tl.store(tokens + row, token)
        else:
            begin_search(row, tl.load(reaches + row), rate, whole, scales, searches, bin_counts, bin_weights, BINS=BINS)
    else:
        tl.store(scales + row, 0.0)


def gather_candidates(
    logits: Tensor, columns: SampleColumns, slots: Tensor, positions: Tensor, tokens: Tensor, space: SampleSpace
) -> None:
    """Write each row's largest logit's token to `tokens`, and to `space` what a draw from the others needs.

    Arguments as for `sample`.
    """
    rows, vocab = logits.shape
    groups, tiles, stride = space.maxima.shape[1], space.tile_weights.shape[1], logits.stride(0)
    facts = (space.tops, space.reach, space.rates, space.counts)
    sizes = {"GROUPS": groups, "GROUP": GROUP}
    _group_maxima[(rows, tiles)](logits, space.maxima, vocab, stride, TILE=TILE, **sizes)
    width = max(2, triton.next_power_of_2(groups))
    _begin_rows[(rows,)](
        logits,
        space.maxima,
        *columns,
        slots,
        positions,
        *facts,
        tokens,
        vocab,
        stride,
        WIDTH=width,
        num_warps=8,
        **sizes,
    )
    _gather[(rows, tiles)](
        logits,
        *facts,
        space.tile_weights,
        space.values,
        space.ids,
        vocab,
        stride,
        TILES=tiles,
        TILE=TILE,
        MANY=space.values.shape[1],
        num_warps=8,
    )


def candidate_sizes(space: SampleSpace) -> dict[str, int]:
    """Sizes that the kernels which read the candidates are compiled for."""
    tiles, many = space.tile_weights.shape[1], space.values.shape[1]
    width = max(2, triton.next_power_of_2(tiles))
    few = min(FEW, many)
    return {"TILES": tiles, "TILES_WIDTH": width, "FEW": few, "MANY": many, "STEP": _STEP, "BLOCK": _BLOCK}


def sample(
    logits: Tensor, columns: SampleColumns, slots: Tensor, positions: Tensor, tokens: Tensor, space: SampleSpace
) -> None:
    """Write the next token of each row to `tokens` (int32 `[rows]`), by the rules of `engine.sampling.Sampler`.

    `logits` is float32 `[rows, vocab]`, rows contiguous; `slots` and `positions`, int64 `[rows]`, name each row's place
    in `columns` and the position that its token will have. Greedy rows (temperature 0) take the largest logit, the
    lowest token among equals. A row whose logits are not finite gets some token of the vocabulary.
    """
    rows, vocab = logits.shape
    gather_candidates(logits, columns, slots, positions, tokens, space)
    sizes = candidate_sizes(space)
    block = sizes.pop("BLOCK")
    _draw[(rows,)](
        *columns,
        slots,
        positions,
        space.tops,
        space.reach,
        space.rates,
        space.counts,
        space.tile_weights,
        space.values,
        space.ids,
        space.scales,
        space.searches,
        space.bin_counts,
        space.bin_weights,
        tokens,
        vocab,
        BINS=BINS,
        num_warps=WARPS,
        **sizes,
    )
    sizes = {name: sizes[name] for name in ("FEW", "MANY", "STEP")} | {"BLOCK": block}
    search_rows(logits, columns, slots, positions, tokens, space, sizes)
