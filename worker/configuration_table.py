"""The table of docs/configuration.md; `python -m worker.configuration_table docs/configuration.md` renews it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.config import CoreConfig
from worker.config import ENVIRONMENT
from worker.flags import FIELDS, allowed, description

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def _rows(keys: Iterator[str]) -> Iterator[str]:
    yield "| key | may be | default | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        default = FIELDS[key].default
        shown = "required" if default is msgspec.NODEFAULT else f"`{msgspec.json.encode(default).decode()}`"
        variable = f" Also by `{ENVIRONMENT[key]}`." if key in ENVIRONMENT else ""
        yield f"| `{key}` | {allowed(key)} | {shown} | {description(key)}{variable} |"


def render() -> str:
    """The tables, as Markdown: first what the engine core is told, then what is Dynamo's side."""
    core = set(CoreConfig.__struct_fields__)
    lines = ["## Model, memory and scheduling", ""]
    lines += _rows(key for key in FIELDS if key in core)
    lines += ["", "## Serving through Dynamo", ""]
    lines += _rows(key for key in FIELDS if key not in core)
    return "\n".join([*lines, ""])


def renewed(page: str) -> str:
    """`page` with its table replaced."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{render()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
