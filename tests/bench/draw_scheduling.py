"""Draws the pictures of docs/scheduling.md: `python -m tests.bench.draw_scheduling docs/pictures`."""

import sys
from dataclasses import dataclass
from pathlib import Path

from engine.chunking import ChunkLimits, chunk_budgets
from engine.scheduling import SchedulerConfig
from tests.traffic import H200_COSTS, Arrival, Run, Traffic, poisson

WIDTH, HEIGHT, LEFT, TOP = 760, 190, 64, 28
COLOURS = ("#1f6feb", "#d29922", "#8250df", "#cf222e")


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: named series over time in seconds."""

    title: str
    unit: str
    series: dict[str, list[tuple[float, float]]]


def draw(panels: list[Panel], path: Path) -> None:
    """Write the panels, one below the other, as an SVG file."""
    height = HEIGHT * len(panels)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    for index, panel in enumerate(panels):
        parts += _panel(panel, index * HEIGHT)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(panel: Panel, top: int) -> list[str]:
    points = [point for line in panel.series.values() for point in line]
    end, peak = max(x for x, _ in points), max(y for _, y in points) or 1.0
    right, bottom = WIDTH - 16, top + HEIGHT - 30

    def place(x: float, y: float) -> str:
        return f"{LEFT + x / end * (right - LEFT):.1f},{bottom - y / peak * (bottom - top - TOP):.1f}"

    parts = [f'<text x="{LEFT}" y="{top + 16}" font-size="13" font-weight="bold">{panel.title}</text>']
    parts.append(f'<path d="M{place(0, peak)} L{place(0, 0)} L{place(end, 0)}" fill="none" stroke="#57606a"/>')
    parts.append(f'<text x="{LEFT - 6}" y="{top + TOP + 8}" font-size="11" text-anchor="end">{peak:.0f}</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{bottom}" font-size="11" text-anchor="end">0 {panel.unit}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 16}" font-size="11" text-anchor="end">{end:.2f} s</text>')
    for number, (name, line) in enumerate(panel.series.items()):
        colour, label = COLOURS[number % len(COLOURS)], right - 130 * number
        path = " L".join(place(x, y) for x, y in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        parts.append(f'<text x="{label}" y="{top + 16}" font-size="12" text-anchor="end" fill="{colour}">{name}</text>')
    return parts


def _line(run: Run, value: str) -> list[tuple[float, float]]:
    """A series as steps of a stair, at most about 600 of them."""
    every = max(1, len(run.samples) // 600)
    return [(sample.time, getattr(sample, value)) for sample in run.samples[::every]]


def _config(**changes: object) -> SchedulerConfig:
    limits = {"servable_length": 4096, "max_bucket": 32, "max_step_tokens": 2048, "max_chunk_tokens": 2048}
    return SchedulerConfig(page_size=16, max_queue=10_000, max_in_flight=2, **(limits | changes))


def admission(path: Path) -> None:
    """A burst meets 32 rows and a pool that holds about three quarters of what they grow to."""
    run = Traffic(_config(low_water_pages=8), 850).run(poisson(150, 120, 7, (64, 512), (64, 512)))
    draw(
        [
            Panel("Requests", "", {"waiting": _line(run, "waiting"), "active": _line(run, "active")}),
            Panel("Referenced pages, of 850", "pages", {"referenced": _line(run, "used_pages")}),
            Panel("Preemptions so far", "", {"preemptions": _line(run, "preemptions")}),
        ],
        path,
    )


def chunking(path: Path) -> None:
    """Sixteen streams, and a prompt of 3,000 tokens every 150 ms: with and without a target of 15 ms."""
    arrivals = [Arrival(0.0, 64, 160) for _ in range(16)] + [Arrival(0.15 * n + 0.1, 3000, 4) for n in range(6)]
    limits = ChunkLimits(max_step_tokens=2048, page_size=16, min_chunk_tokens=64, itl_target_s=0.015)
    panels = []
    for title, budgets in (("no target", ()), ("itl_target_ms: 15", chunk_budgets(H200_COSTS, limits, 32))):
        run = Traffic(_config(chunk_budgets=budgets), 4000).run(arrivals)
        gaps = [(b.time, 1e3 * (b.time - a.time)) for a, b in zip(run.samples, run.samples[1:], strict=False)]
        panels.append(Panel(f"Time between tokens of a stream, {title}", "ms", {"step": gaps}))
        panels.append(Panel(f"Prompt tokens of a step, {title}", "tokens", {"chunk": _line(run, "chunk_tokens")}))
    draw(panels, path)


def main(directory: str) -> None:
    """Draw everything into `directory`."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    admission(target / "admission.svg")
    chunking(target / "chunking.svg")


if __name__ == "__main__":
    main(sys.argv[1])
