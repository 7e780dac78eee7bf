"""The part of values.schema.json that says what worker.config may hold, made from the worker's own config structs.

`python -m tests.helm.config_schema` writes it into the chart; a test tells when that is due.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from kv.geometry import PAGE_SIZES
from worker.config import WorkerConfig

SCHEMA = Path(__file__).parents[2] / "helm" / "pagelane" / "values.schema.json"
PART = "workerConfig"
"""Name of the part in `$defs`."""

SIZES = ("kv_cache_memory", "gpu_memory_limit")
_SIZE_PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*([kKmMgGtT][iI]?)?[bB]\s*$|^\s*[0-9]+\s*$"
_NULL = {"type": "null"}


def worker_config_schema() -> dict[str, Any]:
    """JSON schema of `worker.config`: the structs' own, with what `worker.config.check` demands of single keys.

    Helm drops a bare null from a user's values, so that a key that may be null also takes the word "null", as the
    worker's flags do; and a schema of alternatives has no message that says what is wrong, so there are none.
    """
    schema: dict[str, Any] = msgspec.json.schema(WorkerConfig)["$defs"]["WorkerConfig"]
    properties = {key: _without_alternatives(field) for key, field in schema["properties"].items()}
    properties["kv_page_size"] = properties["kv_page_size"] | {"enum": list(PAGE_SIZES)}
    properties["endpoint_types"]["pattern"] = r"^\s*(chat|completions)\s*(,\s*(chat|completions)\s*)*$"
    for key in SIZES:
        properties[key]["pattern"] = _or_null(_SIZE_PATTERN) if "null" in properties[key]["type"] else _SIZE_PATTERN
    return {
        "type": "object",
        "description": "The worker's YAML. Made by python -m tests.helm.config_schema.",
        "properties": properties,
        "required": ["model"],
        "additionalProperties": False,
    }


def _without_alternatives(field: dict[str, Any]) -> dict[str, Any]:
    """`anyOf` of one type and null as a list of types: each keyword concerns values of its own type only."""
    alternatives = field.pop("anyOf", None)
    if alternatives is None:
        return field
    if _NULL in alternatives:
        alternatives.remove(_NULL)
    kind: dict[str, Any] = alternatives[0]
    field.pop("default", None)  # null, which Helm would drop
    if "enum" in kind:
        return field | {"enum": [*kind["enum"], "null", None]}
    if kind["type"] == "string":
        return field | kind | {"type": ["string", "null"]}
    return field | kind | {"type": [kind["type"], "string", "null"], "pattern": "^null$"}


def _or_null(pattern: str) -> str:
    return f"({pattern})|^null$"


def with_part(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with the part as it must be."""
    return schema | {"$defs": schema["$defs"] | {PART: worker_config_schema()}}


def text_of(schema: dict[str, Any]) -> str:
    """The file's text."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text_of(with_part(json.loads(SCHEMA.read_text()))))
