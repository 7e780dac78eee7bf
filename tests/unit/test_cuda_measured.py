"""The table of what only a run tells of a lane's memory: known lanes, bounds for others, and how rows come in."""

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import CoreConfig
from engine.cuda.measured import MIB, TABLE, Key, MeasuredTable, Rest, Row, Shape, Software, main, row
from engine.models.config import load_model_config
from tests.models import tiny_model

SHAPE = Shape(
    layers=36, hidden_size=2560, intermediate_size=9728, heads=32, kv_heads=8, head_dim=128, vocab_size=151936
)


def key(**values: Any) -> Key:
    given: dict[str, Any] = {
        "card": "A card",
        "torch": "2.11.0",
        "flashinfer": "0.6.18",
        "shape": SHAPE,
        "dtype": "bfloat16",
        "ladder": (1, 2, 4, 8),
        "max_step_tokens": 2048,
    }
    return Key(**{**given, **values})


def measured(graphs: int = 10, workspaces: int = 40, context: int = 500, exact: bool = True, **values: Any) -> Row:
    rest = Rest(graphs=graphs * MIB, workspaces=workspaces * MIB, context=context * MIB)
    return Row(key=key(**values), rest=rest, source=f"run {graphs}", exact=exact)


def test_a_measured_lane_is_known_to_the_byte() -> None:
    rows = [measured(graphs=10), measured(graphs=11, max_step_tokens=8192)]
    for made in rows:
        estimate = MeasuredTable(rows).estimate(made.key)
        assert estimate.known
        assert estimate.rest == made.rest
        assert estimate.source == made.source


def test_between_two_rows_that_differ_in_step_tokens_the_larger_numbers_count() -> None:
    table = MeasuredTable([measured(10, 90, max_step_tokens=1024), measured(12, 40, max_step_tokens=8192)])
    estimate = table.estimate(key(max_step_tokens=4096))
    assert estimate.known
    assert estimate.rest == Rest(graphs=12 * MIB, workspaces=90 * MIB, context=500 * MIB)
    assert "run 10" in estimate.source
    assert "run 12" in estimate.source
    assert not table.estimate(key(max_step_tokens=512)).known
    assert not table.estimate(key(max_step_tokens=16384)).known


OTHER = {
    "card": "Another card",
    "torch": "2.12.0",
    "flashinfer": "0.6.19",
    "shape": msgspec.structs.replace(SHAPE, layers=40),
    "dtype": "float16",
    "ladder": (1, 2, 4, 8, 16),
    "max_step_tokens": 4096,
    "graphs_per_bucket": 2,
}


@pytest.mark.parametrize("name", OTHER)
def test_a_lane_that_differs_in_one_part_of_the_key_is_bounded(name: str) -> None:
    made = measured()
    estimate = MeasuredTable([made]).estimate(key(**{name: OTHER[name]}))
    assert not estimate.known
    for part in Rest.__struct_fields__:
        assert getattr(estimate.rest, part) > getattr(made.rest, part)


def test_a_row_of_an_older_kind_bounds_and_makes_nothing_known() -> None:
    estimate = MeasuredTable([measured(exact=False)]).estimate(key())
    assert not estimate.known
    assert estimate.rest.total > measured().rest.total


def test_a_second_graph_of_each_bucket_doubles_what_graphs_are_bounded_by() -> None:
    bounds = [
        MeasuredTable([measured(100)]).estimate(key(graphs_per_bucket=count, dtype="float16")) for count in (1, 2)
    ]
    assert [bound.rest.graphs for bound in bounds] == [141 * MIB, 266 * MIB]


def test_a_lane_without_graphs_is_bounded_without_them() -> None:
    estimate = MeasuredTable([measured()]).estimate(key(ladder=()))
    assert estimate.rest.graphs == 0
    assert estimate.rest.context > 0


def test_bounds_heed_the_rows_of_the_card_if_there_are_any() -> None:
    table = MeasuredTable([measured(context=900, card="Large"), measured(context=300)])
    assert table.estimate(key(dtype="float16")).rest.context < 900 * MIB
    assert table.estimate(key(card="Unseen")).rest.context > 900 * MIB


@settings(max_examples=100, deadline=None)
@given(buckets=st.lists(st.integers(1, 512), min_size=1, max_size=40, unique=True), more=st.integers(1, 8))
def test_more_buckets_never_have_a_lower_bound(buckets: list[int], more: int) -> None:
    table = MeasuredTable([measured(ladder=(1, 2, 3))])
    few, many = tuple(sorted(buckets)), tuple(sorted({*buckets, *range(1000, 1000 + more)}))
    assert table.estimate(key(ladder=few)).rest.graphs < table.estimate(key(ladder=many)).rest.graphs


def test_the_key_of_a_configuration(tmp_path: Path) -> None:
    model = load_model_config(tiny_model(tmp_path, "qwen3"))
    software = Software(torch="2.11.0", flashinfer="0.6.18")
    config = CoreConfig(model="m", max_bucket=12, max_step_tokens=64)
    made = Key.of(config, model, "bfloat16", software, "A card")
    assert made.ladder == (1, 2, 4, 8, 12)
    assert made.shape == Shape.of(model)
    assert (made.max_step_tokens, made.torch, made.card) == (64, "2.11.0", "A card")
    assert made.graphs_per_bucket == 2
    off = msgspec.structs.replace(config, cuda_graphs="off")
    assert Key.of(off, model, "bfloat16", software, "A card").ladder == ()


def test_a_benchmarks_lines_go_into_the_table_and_replace_rows_of_their_keys(tmp_path: Path) -> None:
    table, results = tmp_path / "measured.json", tmp_path / "memory.jsonl"
    MeasuredTable([measured(10, exact=False), measured(20, max_step_tokens=8192)]).write(table)
    memory = {"weights": 1, "graphs": 33 * MIB, "workspaces": 3, "context": 4, "total": 9}
    lines: list[dict[str, Any]] = [
        {"check": "provenance", "card": "A card"},
        {"check": "memory", "measured": row(key(), {**memory, "graphs": 1}, "first")},
        {"check": "memory", "measured": row(key(), memory, "second")},
        {"check": "memory", "measured": row(key(ladder=()), {"workspaces": 5, "context": 6}, "no graphs")},
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--add", str(results)], table) == 0
    found = MeasuredTable.read(table)
    assert [one.source for one in found.rows] == ["run 20", "second", "no graphs"]
    assert found.estimate(key()).rest == Rest(graphs=33 * MIB, workspaces=3, context=4)
    assert found.estimate(key(ladder=())).rest == Rest(graphs=0, workspaces=5, context=6)
    assert found.software == Software(torch="2.11.0", flashinfer="0.6.18")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"check": "memory"}', 'no line has "measured"'),
        ('{"measured": {"key": 3}}', "line 1: Expected `object`, got `int`"),
        ('{"measured": ', "line 1: Input data was truncated"),
    ],
)
def test_lines_that_are_no_rows_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    table, results = tmp_path / "measured.json", tmp_path / "memory.jsonl"
    MeasuredTable([measured()]).write(table)
    before = table.read_bytes()
    results.write_text(text + "\n")
    assert main(["--add", str(results)], table) == 1
    assert words in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert table.read_bytes() == before


def test_the_tool_says_how_it_is_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([]) == 2
    assert "--add" in capsys.readouterr().err
    assert main(["--add", str(tmp_path / "missing")], tmp_path / "table") == 1


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    for text in ("[", "[]", '[{"key": {}}]', "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match="table of measured lanes"):
            MeasuredTable.read(path)


def test_the_table_that_is_shipped_is_shipped() -> None:
    table = MeasuredTable.read()
    assert len({made.key for made in table.rows}) == len(table.rows)
    for made in table.rows:
        assert made.rest.context > 100 * MIB, "no context of CUDA is smaller"
        assert made.source
    project = tomllib.loads((TABLE.parents[2] / "pyproject.toml").read_text())
    assert TABLE.name in project["tool"]["setuptools"]["package-data"]["engine.cuda"]
