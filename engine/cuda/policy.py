"""Which kernel computes a step's rows, and into what chunks their KV is split: pure functions of rows and lengths.

The constants come from measurements on one H200 with FlashInfer 0.6.18.post1 (head dim 128, bf16; groups 4 and 5, page
16 and 64, batch 1 to 256, context 1024 and 4096); `tests/gpu/check_plan.py` measures them again on any card.
"""

from typing import Literal, NamedTuple

import numpy as np

from engine.cuda.planner import Array, AttentionShape, search_even_chunk_pages, summary

LONE_CTA_PENALTY = 1.12
"""How much slower a CTA reads that has its SM to itself than its share of a full card: 17.2 ns a token against 15.4
(16 rows, 8 KV heads, page 16: 128 CTAs unsplit against 256). Page 64 measured 1.07.
"""
MERGE_TOKENS = 200
"""Cost of writing and merging partial results, in tokens that a CTA reads meanwhile: 3 us at 15.4 ns a token."""
MERGE_TOKENS_PER_ROW = 2
"""The same for each further row: 80.7 us split against 76.0 whole at 64 rows, 286.9 against 278.0 at 256."""
FA3_SPEED = 1.85
"""FA3's prefill speed over FA2's when both fill the card (168.8 us against 91.3 for 2048 tokens; 1.7 to 2.0)."""
XQA_HEADS = (16, 128)
"""Rows x KV heads from and up to which XQA is taken. Beneath, FA2's split rows fill the card as well and XQA loses (one
row of 1024 tokens, 8 KV heads: 1.20 of FA2's time; 4 KV heads: 1.54); above, FA2 needs no split (256: 0.98 to 1.15).
"""
XQA_HEAD_TOKENS = {16: (32_768, 131_072), 64: (16_384, 262_144)}
"""Tokens x KV heads of a step from and up to which XQA is taken, by page size. Between the bounds it measured 0.73 to
0.97 of FA2's time; beneath 0.93 to 1.05 (page 16), above 0.96 to 1.15 (page 16) and 0.95 to 1.04 (page 64).
"""
XQA_GROUPS: dict[int, tuple[int, ...]] = {128: (4, 5)}
"""Groups for which XQA was measured to win, by head dim; on sm90, and it is taken there alone."""


class DecodeRows(NamedTuple):
    """What the choice for decode rows looks at. Lengths in tokens."""

    rows: int
    longest: int
    total: int


def splits(step: DecodeRows, shape: AttentionShape) -> bool:
    """True if the KV of decode rows is to be split.

    Compares two times, in tokens that one CTA reads. Whole rows take as long as the longest row, or as the card's
    bandwidth if there are enough of them, plus half of what the longest row has beyond the mean: on average it starts
    halfway. Split rows take the card's bandwidth and the merge. So one 32k row among short ones never runs whole, while
    even rows that fill the card are not split; FlashInfer's own search would leave both whole as soon as there are more
    rows than `split_budget`.
    """
    balanced = step.total * shape.kv_heads / shape.sm_count
    straggling = (step.longest - step.total / step.rows) / 2
    whole = max(step.longest * LONE_CTA_PENALTY, balanced + straggling)
    return whole > balanced + MERGE_TOKENS + MERGE_TOKENS_PER_ROW * step.rows


def decode_chunk_pages(pages: Array, shape: AttentionShape, row_tiles: int) -> int:
    """Pages of the KV chunks of split decode rows with `pages` pages (int64 `[rows]`), `row_tiles` query tiles each.

    FlashInfer's choice while it balances: the fewest pages that fill the card once. It has no good answer where the
    rows alone (nearly) fill the card and one is long. Then a chunk is half of what each of two CTAs an SM would get of
    all pages: some begin late, and only a small one is not waited for. There are at most `max_decode_tiles` tiles.
    """
    slots, least = 2 * shape.sm_count, shape.min_chunk_pages
    heads_of_a_page = row_tiles * shape.kv_heads
    if row_tiles * len(pages) > shape.split_budget:
        return max(-(-int(np.add.reduce(pages)) * heads_of_a_page // (2 * slots)), least)
    of = summary(pages)
    work = of.total * heads_of_a_page
    balanced = max(3 * work // (2 * slots), least)
    found = search_even_chunk_pages(pages, of, row_tiles, shape, balanced)
    return found if found <= balanced else max(-(-work // (2 * slots)), least)


def max_decode_tiles(rows: int, row_tiles: int, shape: AttentionShape) -> int:
    """Bound on the tiles of a decode plan that `decode_chunk_pages` splits; the grid of its graph.

    Rounding up costs each row one chunk; chunks of at least half a share are at most twice as many as `split_budget`.
    """
    return rows * row_tiles + 2 * shape.split_budget + 1


def has_xqa(head_dim: int, group: int, page_size: int) -> bool:
    """True if XQA is worth having for decode rows of this shape on sm90."""
    return group in XQA_GROUPS.get(head_dim, ()) and page_size in XQA_HEAD_TOKENS


def uses_xqa(step: DecodeRows, shape: AttentionShape) -> bool:
    """True if XQA was measured to be clearly the fastest kernel for such decode rows.

    It divides every row into the same number of parts, so it is taken for rows of similar length only (as measured).
    """
    if not has_xqa(shape.head_dim, shape.group, shape.page_size):
        return False
    even = step.longest * step.rows <= 1.5 * step.total
    fewest_heads, most_heads = XQA_HEADS
    fewest_tokens, most_tokens = XQA_HEAD_TOKENS[shape.page_size]
    return (
        even
        and fewest_heads <= step.rows * shape.kv_heads <= most_heads
        and fewest_tokens <= step.total * shape.kv_heads <= most_tokens
    )


def chunk_kernel(queries: Array, shape: AttentionShape) -> Literal["fa2", "fa3"]:
    """Kernel for prompt chunks of `queries` tokens (int64 `[rows]`) on sm90; elsewhere only FA2 runs.

    FA3 does not split KV: with few query tiles x heads it leaves SMs idle, and FA2, which does, wins once FA3 fills
    less than 1 / `FA3_SPEED` of the card.
    """
    tile_q = fa3_tile_q(shape.head_dim)
    works = int((-(-queries // tile_q)).sum()) * shape.heads
    return "fa3" if works * FA3_SPEED >= shape.sm_count else "fa2"


def fa3_tile_q(head_dim: int) -> int:
    """Query tokens of an FA3 tile (`PrefillSM90Plan`)."""
    return 192 if head_dim == 64 else 128
