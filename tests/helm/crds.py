"""Custom resources against the schemas of their definitions, as an API server checks them, but offline."""

import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).with_name("schemas")
_NESTED_ONE = ("items", "not")
_NESTED_MANY = ("allOf", "anyOf", "oneOf")
_ANNOTATIONS = ("nullable", "description", "default", "example", "format")
_OPEN = ("x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource")
_INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]


def schema_of(obj: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of an object's kind, None if it is not a custom resource that is known here."""
    group, _, version = obj["apiVersion"].rpartition("/")
    path = SCHEMAS / f"{group}_{obj['kind'].lower()}_{version}.json"
    return json.loads(path.read_text()) if path.exists() else None


def problems(schema: dict[str, Any], obj: dict[str, Any]) -> list[str]:
    """What an API server would refuse, and the fields that it would drop without a word."""
    validator = jsonschema.Draft202012Validator(_root(schema))
    errors = sorted(validator.iter_errors(obj), key=lambda error: list(map(str, error.absolute_path)))
    return [f"{'.'.join(map(str, error.absolute_path)) or 'object'}: {error.message[:300]}" for error in errors]


def _root(schema: dict[str, Any]) -> dict[str, Any]:
    root = _json_schema(schema, closed=True)
    text = {"type": "string"}
    metadata = {"type": "object", "required": ["name"]}
    root["properties"] = root.get("properties", {}) | {"metadata": metadata, "apiVersion": text, "kind": text}
    return root


def _json_schema(schema: dict[str, Any], closed: bool) -> dict[str, Any]:
    """An OpenAPI v3 schema of Kubernetes as JSON Schema. Unknown fields are errors where it is `closed`: everywhere but
    below allOf and its like, which only add to what is known.
    """
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties"):
            result[key] = {name: _json_schema(part, closed) for name, part in value.items()}
        elif key in _NESTED_ONE or (key == "additionalProperties" and isinstance(value, dict)):
            result[key] = _json_schema(value, closed)
        elif key in _NESTED_MANY:
            result[key] = [_json_schema(part, closed=False) for part in value]
        elif key not in _ANNOTATIONS and not key.startswith("x-kubernetes-"):
            result[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = _INT_OR_STRING
    if schema.get("format") == "int32" and schema.get("type") == "integer":
        result.setdefault("minimum", -(2**31))
        result.setdefault("maximum", 2**31 - 1)
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    is_object = "properties" in schema and "additionalProperties" not in schema
    if closed and is_object and not any(schema.get(mark) for mark in _OPEN):
        result["additionalProperties"] = False
    return result
