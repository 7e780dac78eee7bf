"""The chart's Grafana dashboard; `python -m tests.helm.dashboard` writes helm/pagelane/files/dashboard.json.

Panels are declared here, so that a difference shows what was meant and not what Grafana stores.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.helm.chart import CHART

FILE = CHART / "files" / "dashboard.json"
WIDTH, HEIGHT, ACROSS = 8, 8, 3
WORKERS = 'job=~"$job"'


class Panel(NamedTuple):
    """A chart over time: what it shows, in which unit of Grafana's, and its lines as PromQL and legend."""

    title: str
    unit: str
    lines: list[tuple[str, str]]


def rate(name: str, labels: str = "") -> str:
    """Per second, of all chosen workers together; with `labels`, by these."""
    by = f" by ({labels})" if labels else ""
    return f"sum{by} (rate(pagelane_{name}{{{WORKERS}}}[$__rate_interval]))"


def quantiles(name: str) -> list[tuple[str, str]]:
    """p50 and p99 of a histogram."""
    inner = f"sum by (le) (rate(pagelane_{name}_bucket{{{WORKERS}}}[$__rate_interval]))"
    return [(f"histogram_quantile({share}, {inner})", f"p{round(100 * share)}") for share in (0.5, 0.99)]


PADDING = f"{rate('padding_tokens_total')} / ({rate('padding_tokens_total')} + {rate('computed_tokens_total')})"

ROWS: dict[str, list[Panel]] = {
    "Latency": [
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("inter_token_latency_seconds")),
        Panel(
            "Tokens",
            "ops",
            [(rate("generated_tokens_total"), "generated"), (rate("computed_tokens_total"), "computed")],
        ),
    ],
    "Load": [
        Panel("Requests", "short", [(f"sum by (state) (pagelane_requests{{{WORKERS}}})", "{{state}}")]),
        Panel("Age of the oldest waiting request", "s", [(f"max(pagelane_queue_age_seconds{{{WORKERS}}})", "oldest")]),
        Panel(
            "Ends and refusals",
            "ops",
            [
                (rate("requests_finished_total", "reason"), "{{reason}}"),
                (rate("requests_refused_total", "reason"), "refused: {{reason}}"),
                (rate("queue_refusals_total", "reason"), "refused by the lane: {{reason}}"),
            ],
        ),
    ],
    "KV cache": [
        Panel("Pages by state", "short", [(f"sum by (state) (pagelane_kv_pages{{{WORKERS}}})", "{{state}}")]),
        Panel(
            "Share of prompt tokens from the cache",
            "percentunit",
            [(f"{rate('cached_prompt_tokens_total')} / {rate('prompt_tokens_total')}", "cached")],
        ),
        Panel(
            "Preemptions and what they cost",
            "ops",
            [
                (rate("preemptions_total"), "preemptions"),
                (rate("recomputed_tokens_total"), "tokens computed again"),
                (rate("bypasses_total"), "large requests passed"),
            ],
        ),
    ],
    "KV events": [
        Panel("Changes of the prefix index", "ops", [(rate("kv_blocks_total", "event"), "{{event}}")]),
        Panel("Told to the router", "ops", [(rate("kv_blocks_published_total", "event"), "{{event}}")]),
        Panel("Events not taken", "short", [(f"sum(pagelane_kv_event_errors_total{{{WORKERS}}})", "errors")]),
    ],
    "Steps": [
        Panel(
            "Time of a step, by kind",
            "s",
            [(f"{rate('step_seconds_total', 'kind')} / {rate('steps_total', 'kind')}", "{{kind}}")],
        ),
        Panel("Decode steps, by launch", "ops", [(rate("decode_launches_total", "launch"), "{{launch}}")]),
        Panel("Share of tokens that fill graphs up", "percentunit", [(PADDING, "padding")]),
    ],
    "Workers": [
        Panel(
            "Memory by part, planned where it differs",
            "bytes",
            [(f"max by (part) (pagelane_memory_bytes{{{WORKERS}}})", "{{part}}")],
        ),
        Panel("Workers that were told to end", "short", [(f"sum(pagelane_leaving{{{WORKERS}}})", "leaving")]),
        Panel(
            "After the warm-up (must stay 0)",
            "short",
            [
                (f"sum(pagelane_allocations_after_warmup_total{{{WORKERS}}})", "allocations"),
                (f"sum(pagelane_compilations_after_warmup_total{{{WORKERS}}})", "compilations"),
            ],
        ),
    ],
}


def _panels() -> Iterator[dict[str, Any]]:
    number, down = 1, 0
    source = {"type": "prometheus", "uid": "${datasource}"}
    for title, panels in ROWS.items():
        yield {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": down, "w": 24, "h": 1}}
        number, down = number + 1, down + 1
        for place, panel in enumerate(panels):
            yield {
                "id": number,
                "type": "timeseries",
                "title": panel.title,
                "datasource": source,
                "gridPos": {"x": WIDTH * place, "y": down, "w": WIDTH, "h": HEIGHT},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + line), "datasource": source, "expr": expression, "legendFormat": legend}
                    for line, (expression, legend) in enumerate(panel.lines)
                ],
            }
            number += 1
        down += HEIGHT


def render() -> str:
    """The dashboard as Grafana reads it."""
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "job",
            "label": "Workers",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": "label_values(pagelane_kv_usable_pages, job)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
        },
    ]
    dashboard = {
        "uid": "pagelane",
        "title": "Pagelane",
        "tags": ["pagelane", "dynamo"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": list(_panels()),
    }
    return json.dumps(dashboard, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(render())
