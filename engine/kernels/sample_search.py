"""Device functions of `engine.kernels.sample`: order and weight of a token, and the draw from a row's candidates."""

import triton
import triton.language as tl

INTEREST = tl.constexpr(28.5)
"""41 ln 2 and a little: a token this many temperatures below the largest has weight 0."""
FARTHEST = tl.constexpr(float("inf"))
BEFORE_ALL = tl.constexpr((1 << 63) - 1)
_AFTER_ALL = tl.constexpr(-(1 << 63))
_CUTS = tl.constexpr(8)
"""Parts that a search cuts its range into with each pass over the candidates; a power of two."""
_CUT_BITS = tl.constexpr(3)


@triton.jit
def key(values):
    """int32 that order as the float32 `values` do; both zeros are equal."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value(keys):
    """The float32 that `key` made `keys` of."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def weigh(distance, rate):
    """int64 weight of tokens `distance` below the largest logit; `rate` is log2(e) / temperature."""
    # A tiny temperature may make the rate infinite.
    share = tl.where(distance == 0, 1.0, tl.exp2(-distance * rate))
    return tl.where(distance >= 0, share * 1099511627776.0, 0.0).to(tl.int64)


@triton.jit
def farthest_kept(min_p, temperature):
    """How far below the largest logit a token may lie that min-p keeps."""
    return tl.where(min_p > 0, -tl.log(tl.where(min_p > 0, min_p, 1.0)) * temperature, FARTHEST)


@triton.jit
def _mix(word):
    """The finalizer of splitmix64, as `engine.sampling` has it."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def random_bits(seed, position):
    """53 random bits, those of `engine.sampling.uniform`, as int64."""
    state = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 11).to(tl.int64)


@triton.jit
def _order(values, ids):
    """int64 that fall along the order of falling logit and rising token."""
    return (key(values).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def order_token(order):
    """The token that `_order` made `order` of."""
    return 0x7FFFFFFF - (order & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def part_of(bits, mass):
    """floor(mass * bits / 2**53), exactly; `mass` is below 2**62."""
    return tl.umulhi(bits << 10, mass << 1)


@triton.jit
def limit(mass, top_p):
    """Tokens with less than this before them are what top-p keeps; at least 1, so that the first one stays."""
    exact = top_p.to(tl.float64) * mass.to(tl.float64)
    whole = exact.to(tl.int64)
    return tl.where(top_p < 1, tl.maximum(whole + (whole.to(tl.float64) < exact).to(tl.int64), 1), BEFORE_ALL)


@triton.jit
def rank_few(values, ids, count, top, rate, FEW: tl.constexpr, STEP: tl.constexpr):
    """Of `count` <= FEW candidates: which exist, their tokens, distances and weights, and how many candidates of what
    weight come before each.
    """
    lane = tl.arange(0, FEW)
    exists = lane < count
    logit = tl.load(values + lane, mask=exists, other=float("-inf"))
    token = tl.load(ids + lane, mask=exists, other=0)
    order, distance = _order(logit, token), top - logit
    weight = tl.where(exists, weigh(distance, rate), 0)
    rank = tl.zeros([FEW], tl.int32)
    before = tl.zeros([FEW], tl.int64)
    for start in range(0, count, STEP):
        other = start + tl.arange(0, STEP)
        there = other < count
        other_logit = tl.load(values + other, mask=there, other=float("-inf"))
        other_order = _order(other_logit, tl.load(ids + other, mask=there, other=0))
        other_weight = tl.where(there, weigh(top - other_logit, rate), 0)
        earlier = (other_order[None, :] > order[:, None]) & there[None, :]
        rank += tl.sum(earlier.to(tl.int32), 1)
        before += tl.sum(tl.where(earlier, other_weight[None, :], 0), 1)
    return exists, token, distance, weight, rank, before


@triton.jit
def draw_of_few(
    values, ids, count, top, rate, whole, bits, top_k, top_p, farthest, FEW: tl.constexpr, STEP: tl.constexpr
):
    """Token drawn from `count` <= FEW candidates, -1 if there is none. `whole` is the weight of all tokens."""
    exists, token, distance, weight, rank, before = rank_few(values, ids, count, top, rate, FEW=FEW, STEP=STEP)
    kept = exists & ((rank < top_k) | (top_k == 0))
    mass = whole
    if top_k > 0:
        mass = tl.sum(tl.where(kept, weight, 0), 0)
    kept = kept & (before < limit(mass, top_p)) & (distance <= farthest)
    if (top_p < 1) | (farthest < FARTHEST):
        mass = tl.sum(tl.where(kept, weight, 0), 0)
    target = part_of(bits, mass)
    drawn = exists & (before <= target) & (target < before + weight)
    return tl.max(tl.where(drawn, token, -1), 0)


@triton.jit
def _read(values, ids, gathered, size, start, top, rate, BLOCK: tl.constexpr):
    """Order, distance and weight of the candidates from `start` on; behind the last one they come last and weigh 0."""
    place = start + tl.arange(0, BLOCK)
    inside = place < size
    logit = tl.load(values + place, mask=inside, other=float("-inf"))
    token = tl.where(place < gathered, tl.load(ids + place, mask=place < gathered, other=0), place)
    distance = top - logit
    order = tl.where(inside, _order(logit, token), _AFTER_ALL)
    return order, distance, tl.where(inside, weigh(distance, rate), 0)


@triton.jit
def extent(values, ids, gathered, size, top, rate, farthest, BLOCK: tl.constexpr):
    """Least and greatest order of the candidates, their weight, and the weight of those no farther than `farthest`."""
    least = tl.full([BLOCK], BEFORE_ALL, tl.int64)
    greatest = tl.full([BLOCK], _AFTER_ALL, tl.int64)
    all_weight = tl.zeros([BLOCK], tl.int64)
    near_weight = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        order, distance, weight = _read(values, ids, gathered, size, start, top, rate, BLOCK=BLOCK)
        least = tl.minimum(least, tl.where(order == _AFTER_ALL, BEFORE_ALL, order))
        greatest = tl.maximum(greatest, order)
        all_weight += weight
        near_weight += tl.where(distance <= farthest, weight, 0)
    return tl.min(least, 0), tl.max(greatest, 0), tl.sum(all_weight, 0), tl.sum(near_weight, 0)


@triton.jit
def _above(values, ids, gathered, size, top, rate, cuts, BLOCK: tl.constexpr):
    """Number and weight of the candidates above each of `cuts`."""
    counts = tl.zeros([_CUTS, BLOCK], tl.int32)
    weights = tl.zeros([_CUTS, BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        order, _, weight = _read(values, ids, gathered, size, start, top, rate, BLOCK=BLOCK)
        above = order[None, :] > cuts[:, None]
        counts += above.to(tl.int32)
        weights += tl.where(above, weight[None, :], 0)
    return tl.sum(counts, 1), tl.sum(weights, 1)


@triton.jit
def _at(column, place):
    """`column[place]`, 0 outside."""
    return tl.sum(tl.where(tl.arange(0, _CUTS) == place, column, 0), 0)


@triton.jit
def crossing(values, ids, gathered, size, top, rate, least, greatest, by_count, target, BLOCK: tl.constexpr):
    """Order of the candidate where the sum crosses `target`, and the weight up to and with it.

    It is the one with at most `target` before it and more with it: candidates if `by_count`, weight otherwise.
    """
    low, high, inside = least - 1, greatest, size
    above_count, above_weight = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    part = tl.arange(0, _CUTS)
    while inside > 1:
        # The two halves of a range of 2**64 must not overflow.
        width = tl.maximum((high >> _CUT_BITS) - (low >> _CUT_BITS), 1)
        cuts = tl.minimum(low + part.to(tl.int64) * width, high)
        counts, weights = _above(values, ids, gathered, size, top, rate, cuts, BLOCK=BLOCK)
        reached = tl.where(by_count, counts.to(tl.int64), weights) > target
        last = tl.max(tl.where(reached, part, 0), 0)
        if last + 1 < _CUTS:
            high = tl.max(tl.where(part == last + 1, cuts, _AFTER_ALL), 0)
            above_count, above_weight = _at(counts, last + 1), _at(weights, last + 1)
        low = tl.max(tl.where(part == last, cuts, _AFTER_ALL), 0)
        inside = _at(counts, last) - above_count
    found = tl.full([BLOCK], _AFTER_ALL, tl.int64)
    weight_of = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        order, _, weight = _read(values, ids, gathered, size, start, top, rate, BLOCK=BLOCK)
        it = (order > low) & (order <= high)
        found = tl.where(it, order, found)
        weight_of = tl.where(it, weight, weight_of)
    return tl.max(found, 0), above_weight + tl.sum(weight_of, 0)


@triton.jit
def nth(values, ids, gathered, size, top, rate, least, greatest, place, BLOCK: tl.constexpr):
    """Token and logit of the candidate that has `place` others before it."""
    order, _ = crossing(values, ids, gathered, size, top, rate, least, greatest, True, place, BLOCK=BLOCK)
    return order_token(order), value((order >> 32).to(tl.int32))
