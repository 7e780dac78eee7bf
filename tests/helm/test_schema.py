"""values.schema.json: made from the worker's config structs, of one mind with the worker and with values.yaml."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.helm.chart import CHART
from tests.helm.config_schema import PART, SCHEMA, text_of, with_part, worker_config_schema
from worker.config import ConfigError
from worker.flags import FIELDS, load_config

CONFIGS = sorted((CHART.parents[1] / "configs").glob("*.yaml"))
PARTS = json.loads(SCHEMA.read_text())

WRONG: dict[str, list[Any]] = {
    "kv_page_size": [32, "16", 16.5],
    "max_bucket": [0, -1, 2**31, "many"],
    "context_limit": [1, "long"],
    "gpu_memory_utilization": [0, 1.5, "0.9"],
    "gpu_memory_limit": ["24Gi", "24G", ""],
    "kv_cache_memory": ["lots", "5 apples", 512],
    "endpoint_types": ["chat;completions", ""],
    "reservation": ["pessimistic"],
    "pipeline_depth": [3],
    "cuda_graphs": [True, "on"],
    "drain_timeout_s": [-1],
    "served_model_name": [""],
    "threads": [0, 2000],
}
"""Values of worker.config that both the schema and the worker refuse."""

RIGHT: dict[str, list[Any]] = {
    "kv_page_size": [16, 64],
    "gpu_memory_limit": ["24GiB", "24 gb", "1.5TiB"],
    "kv_cache_memory": ["512MiB", "4096", "4096b", " 2 GiB "],
    "endpoint_types": ["chat", "completions, chat"],
    "graph_buckets": ["1,2,4"],
    "context_limit": [2, 40960],
    "threads": [1],
    "itl_target_ms": [12.5],
}


def refused_by_schema(key: str, value: Any) -> bool:
    validator = jsonschema.Draft202012Validator(worker_config_schema())
    return not validator.is_valid({"model": "org/name", key: value})


def refused_by_worker(key: str, value: Any, folder: Path) -> bool:
    path = folder / "worker.yaml"
    path.write_text(json.dumps({"model": "org/name", "max_step_tokens": 2**31 - 1, key: value}))
    try:
        load_config(["--config", str(path)], {})
    except ConfigError:
        return True
    return False


def test_the_part_for_the_worker_is_current() -> None:
    assert SCHEMA.read_text() == text_of(with_part(PARTS)), "run python -m tests.helm.config_schema"


def test_it_has_the_keys_of_the_worker() -> None:
    assert set(PARTS["$defs"][PART]["properties"]) == set(FIELDS)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_what_the_worker_refuses_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    assert refused_by_schema(key, value)
    assert refused_by_worker(key, value, tmp_path)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in RIGHT.items() for value in values])
def test_what_the_worker_takes_is_taken(key: str, value: Any, tmp_path: Path) -> None:
    assert not refused_by_schema(key, value)
    assert not refused_by_worker(key, value, tmp_path)


def test_an_unknown_key_is_refused() -> None:
    assert refused_by_schema("kv_page_sise", 16)


@pytest.mark.parametrize("key", [key for key in FIELDS if FIELDS[key].default is None])
def test_a_key_that_may_be_null_takes_the_word(key: str) -> None:
    assert not refused_by_schema(key, "null")
    assert not refused_by_schema(key, None)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_pass(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), worker_config_schema())


def test_every_value_is_known_to_the_schema_and_every_property_has_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    config = values["worker"].pop("config")
    assert set(config) <= set(FIELDS)
    expected = _properties(PARTS) - {"global"}
    assert {path for path in expected if not path.startswith("worker.config")} == _paths(values)


def test_every_value_is_read_by_a_template() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    values = _properties(PARTS) - {"global"}
    assert [path for path in values if not re.search(rf"\.{path.rpartition('.')[2]}\b", templates)] == []


def _properties(schema: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted names of everything that is declared, down to what has no properties of its own."""
    if "properties" not in schema:
        return {prefix}
    names = ((f"{prefix}.{key}" if prefix else key, part) for key, part in schema["properties"].items())
    return set().union(*(_properties(part, name) for name, part in names))


def _paths(values: Any, prefix: str = "") -> set[str]:
    """Dotted names of the values, down to where the schema stops telling names."""
    declared = _properties(PARTS)
    if prefix in declared:
        return {prefix}
    assert isinstance(values, dict), f"the schema does not know {prefix}"
    return set().union(*(_paths(part, f"{prefix}.{key}" if prefix else key) for key, part in values.items()))
