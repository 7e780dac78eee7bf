"""The load driver's rows beside the peer's: a picture for each model, and a table on standard output.

    python -m tests.bench.plot_rows docs/pictures

Reads `rows-MODEL-TOKENS.jsonl` of tests/gpu/results and `vllm-MODEL.jsonl` of tests/bench/results. Of Pagelane, each
setting of max_step_tokens stands by itself, of the peer the better of its two at every row.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
MODELS = ("qwen3-4b", "qwen3-14b")
OWN = ("Pagelane 2048", "Pagelane 8192")
PEER = "vLLM"
ENGINES = (*OWN, PEER)
COLOURS = dict(zip(ENGINES, ("#1f6feb", "#79b8ff", "#9a9a9a"), strict=True))
WIDTH, PANEL = 760, 150


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a row."""

    key: str
    title: str
    more_is_better: bool = False


LOAD = re.compile(r"c(\d+) 1024/128$")
MEASURES = {
    "users": (
        Measure("out_tok_s", "output tokens/s", more_is_better=True),
        Measure("tpot_p50", "TPOT p50, ms"),
        Measure("ttft_p50", "TTFT p50, ms"),
        Measure("itl_p99", "ITL p99, ms"),
    ),
    "prompt": (Measure("cold_p50", "TTFT cold, ms"), Measure("warm_p50", "TTFT warm, ms")),
    "mixed": (
        Measure("itl_p99", "ITL p99 of 16 streams while prompts of 4096 arrive, ms"),
        Measure("long_ttft_p50", "TTFT of those prompts, ms"),
    ),
    "prefill": (Measure("prefill_tok_s", "prefill of 64 prompts of 2048, tokens/s", more_is_better=True),),
}
Key = tuple[str, int]
"""Kind of row, as in `MEASURES`, and its users or prompt tokens."""


def key_of(point: str) -> Key | None:
    """What a row's name says; the driver names the same row a little differently over time."""
    if found := LOAD.search(point):
        return "users", int(found[1])
    if found := re.search(r"warm-ttft (\d+)$", point):
        return "prompt", int(found[1])
    return next(((kind, 0) for kind in ("mixed", "prefill") if f" {kind} " in point), None)


def read(paths: Sequence[Path]) -> dict[Key, list[dict[str, Any]]]:
    """Rows of an engine by what they are of."""
    rows: dict[Key, list[dict[str, Any]]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("check") == "row" and (key := key_of(row["point"])) is not None:
                rows.setdefault(key, []).append(row)
    return rows


@dataclass(frozen=True, slots=True)
class Bar:
    """A number of both engines at one point."""

    measure: Measure
    label: str
    values: dict[str, float]
    """By engine."""
    setting: int | None
    """max_num_batched_tokens of the peer's run."""

    def gain(self, engine: str) -> float | None:
        """How many times better than the peer: above 1 is better, whichever way the number counts."""
        if engine not in self.values or PEER not in self.values:
            return None
        ratio = self.values[engine] / self.values[PEER]
        return ratio if self.measure.more_is_better else 1 / ratio


def bars(rows: dict[str, dict[Key, list[dict[str, Any]]]]) -> Iterator[Bar]:
    """Everything that there is to compare, in the order of `MEASURES`."""
    for kind, measures in MEASURES.items():
        points = sorted({key[1] for of in rows.values() for key in of if key[0] == kind})
        for measure in measures:
            for point in points:
                values, setting = {}, None
                for engine, of in rows.items():
                    found = [row for row in of.get((kind, point), []) if measure.key in row]
                    if found:
                        choose = max if measure.more_is_better else min
                        best = choose(found, key=lambda row: row[measure.key])
                        values[engine] = best[measure.key]
                        setting = best["max_step_tokens"] if engine == PEER else setting
                unit = {"users": f"{point} user{'s' * (point > 1)}", "prompt": f"{point} tokens"}.get(kind, "")
                yield Bar(measure, unit, values, setting)


def table(model: str, found: Sequence[Bar]) -> Iterator[str]:
    """Markdown lines."""
    yield f"| {model} | {OWN[0]} | {OWN[1]} | vLLM 0.23 (its setting) | times better, {OWN[0]} | {OWN[1]} |"
    yield "|---|---|---|---|---|---|"
    for bar in found:
        cells = [f"{bar.values[name]:.4g}" if name in bar.values else "" for name in ENGINES]
        if bar.setting is not None:
            cells[-1] += f" ({bar.setting})"
        gains = ["" if (gain := bar.gain(name)) is None else f"{gain:.2f}" for name in OWN]
        yield f"| {bar.measure.title}{f', {bar.label}' if bar.label else ''} | {' | '.join([*cells, *gains])} |"


def picture(model: str, found: Sequence[Bar]) -> str:
    """An SVG of grouped bars, one panel a measure; each panel has its own scale."""
    titles = list(dict.fromkeys(bar.measure.title for bar in found))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {PANEL * -(-len(titles) // 2) + 40}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="20" font-size="14" font-weight="bold">{model} on one H200</text>',
    ]
    for place, engine in enumerate(ENGINES):
        x = WIDTH - 330 + 115 * place
        parts.append(f'<rect x="{x}" y="10" width="10" height="10" fill="{COLOURS[engine]}"/>')
        parts.append(f'<text x="{x + 14}" y="19">{engine}</text>')
    for place, title in enumerate(titles):
        own = [bar for bar in found if bar.measure.title == title]
        parts += _panel(own, 12 + place % 2 * (WIDTH // 2), 40 + place // 2 * PANEL)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(own: Sequence[Bar], left: int, top: int) -> Iterator[str]:
    width, height = WIDTH // 2 - 24, PANEL - 56
    peak = max((value for bar in own for value in bar.values.values()), default=1.0)
    yield f'<text x="{left}" y="{top + 12}" font-weight="bold">{own[0].measure.title}</text>'
    step = width / len(own)
    bar_width = min(26.0, step / (len(ENGINES) + 0.5))
    for place, bar in enumerate(own):
        middle, bottom = left + step * (place + 0.5), top + 32 + height
        for index, engine in enumerate(ENGINES):
            if engine not in bar.values:
                continue
            tall = height * bar.values[engine] / peak
            x = middle + (index - len(ENGINES) / 2) * bar_width
            yield (
                f'<rect x="{x:.1f}" y="{bottom - tall:.1f}" width="{bar_width - 1:.1f}" height="{tall:.1f}" '
                f'fill="{COLOURS[engine]}"/>'
            )
            yield (
                f'<text x="{x + bar_width / 2:.1f}" y="{bottom - tall - 2:.1f}" font-size="7" '
                f'text-anchor="middle">{_shown(bar.values[engine])}</text>'
            )
        yield f'<text x="{middle:.1f}" y="{bottom + 13}" font-size="9" text-anchor="middle">{bar.label}</text>'


def _shown(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Write the pictures into the folder that is named, and print the tables."""
    folder = Path(sys.argv[1])
    for model in MODELS:
        files = {name: TESTS / "gpu" / "results" / f"rows-{model}-{name.split()[1]}.jsonl" for name in OWN}
        if not any(path.exists() for path in files.values()):
            print(f"no rows of {model}")
            continue
        files[PEER] = TESTS / "bench" / "results" / f"vllm-{model}.jsonl"
        found = list(bars({name: read([path]) for name, path in files.items() if path.exists()}))
        (folder / f"rows-{model}.svg").write_text(picture(model, found), encoding="utf-8")
        print("\n".join([*table(model, found), ""]))


if __name__ == "__main__":
    main()
