"""Makes the table of docs/page-size.md of what `tests.gpu.compare_pages` measured.

python -m tests.gpu.page_table tests/gpu/results/pages.jsonl
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_NAMES = {
    ("decode", "ms"): "decode step at {at} streams of 1024 tokens, ms",
    ("decode", "plan_us"): "CPU time of the scheduler's plan at {at} streams, us",
    ("decode", "attention_us"): "CPU time of the attention's plan at {at} streams, us",
    ("decode", "launch_us"): "CPU time of the launch, the attention's plan in it, at {at} streams, us",
    ("warm ttft", "ms"): "warm first token of a prompt of {at}, ms",
    ("warm ttft", "cached"): "of {at}, cached",
    ("small pool", "tokens_per_s"): "pool of 37,824 tokens, {at} users, tokens/s",
    ("small pool", "preemptions"): "preemptions in it, {at} users",
    ("small pool", "cached_tokens"): "prompt tokens that its prefix cache had, {at} users",
}


def raw_rows(lines: Iterable[str]) -> list[Row]:
    """The measurements in a results file."""
    return [row for row in map(json.loads, lines) if row.get("check") == "raw"]


def pairs_of(rows: Sequence[Row], what: str, at: int, number: str) -> list[tuple[float, float]]:
    """What pages of 16 and of 64 gave, pair by pair."""
    by_pair: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["what"] == what and row["at"] == at and number in row:
            by_pair[row["pair"]][row["page"]] = row[number]
    return [(pair[16], pair[64]) for pair in by_pair.values() if len(pair) == 2]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown lines: medians of both, and the median and range of the ratios of the pairs."""
    yield "| | 16 | 64 | 64 over 16, median of pairs (lowest to highest) |"
    yield "|---|---|---|---|"
    for (what, number), name in _NAMES.items():
        for at in sorted({row["at"] for row in rows if row["what"] == what}):
            pairs = pairs_of(rows, what, at, number)
            if not pairs:
                continue
            small, large = (statistics.median(column) for column in zip(*pairs, strict=True))
            yield f"| {name.format(at=at)} | {shown(small)} | {shown(large)} | {ratios(pairs)} |"


def shown(value: float) -> str:
    """Three digits; whole numbers as they are."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def ratios(pairs: Sequence[tuple[float, float]]) -> str:
    """64 over 16, where that has a meaning."""
    found = [large / small for small, large in pairs if small]
    if not found:
        return ""
    if len(found) == 1 or min(found) == max(found):
        return f"{statistics.median(found):.2f}"
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}; {len(found)} pairs)"


def main() -> None:
    """Print the table."""
    print("\n".join(table(raw_rows(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))))


if __name__ == "__main__":
    main()
