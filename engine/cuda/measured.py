"""What only a run tells of a lane's memory, kept from runs: CUDA's context, captured graphs, what torch holds beside.

`measured.json` has a row for each lane that was measured. A lane whose key is there is *known*, and so is one whose
`max_step_tokens` lies between those of two rows that agree in everything else: it takes the larger numbers. For every
other lane the numbers are upper bounds: what rows of the nearest kind had, by layer and graph, and a margin.

    python -m engine.cuda.measured --add RESULTS.jsonl

takes the lines of a benchmark that have `"measured"`, as `row` makes them, into the table.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from engine.config import CoreConfig
from engine.cuda.graphs import KINDS
from engine.ladder import Ladder
from engine.memory import MIB
from engine.models.config import ModelConfig

TABLE = Path(__file__).with_name("measured.json")


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a model, in elements."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        """The dimensions of `model`."""
        return cls(**{name: getattr(model, name) for name in cls.__struct_fields__})


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that memory depends on."""

    torch: str
    """Without what stands behind a `+`."""
    flashinfer: str

    @classmethod
    def installed(cls) -> Self | None:
        """The versions here; None if they are not those of a machine with GPUs."""
        if torch.version.cuda is None:
            return None
        try:
            return cls(torch=torch.__version__.partition("+")[0], flashinfer=version("flashinfer-python"))
        except PackageNotFoundError:
            return None


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """All that what a run tells depends on."""

    card: str
    """As the driver names it."""
    torch: str
    flashinfer: str
    shape: Shape
    dtype: str
    ladder: tuple[int, ...]
    """Buckets whose decode steps are captured; empty for no graphs."""
    max_step_tokens: int
    graphs_per_bucket: int = 1
    """Kinds of them (`KINDS`). A row that does not say so is older than the second kind."""

    @classmethod
    def of(cls, config: CoreConfig, model: ModelConfig, dtype: str, software: Software, card: str) -> Self:
        """The key of the lane that `config` asks for, computing in `dtype`. Raises `LadderError`."""
        off = config.cuda_graphs == "off"
        return cls(
            card=card,
            torch=software.torch,
            flashinfer=software.flashinfer,
            shape=Shape.of(model),
            dtype=model.dtype if dtype == "auto" else dtype,
            ladder=() if off else tuple(Ladder.of(config.max_bucket, config.graph_buckets)),
            max_step_tokens=config.max_step_tokens,
            graphs_per_bucket=len(KINDS),
        )


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by part, named as in `MemoryPlan`."""

    graphs: int
    workspaces: int
    context: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.graphs + self.workspaces + self.context


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A measured lane."""

    key: Key
    rest: Rest
    source: str
    """Where the numbers are from: a results file and the commit that it was made at."""
    exact: bool = True
    """The lane was built as lanes are now. A row of an older kind makes no key known; bounds still heed it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a lane takes beside what its settings determine."""

    rest: Rest
    known: bool
    """From rows with the lane's key; else upper bounds."""
    source: str


def row(key: Key, memory: Mapping[str, int], source: str) -> dict[str, Any]:
    """What a benchmark writes about a lane it has built: `memory` is `MemoryReport.as_dict()`."""
    rest = Rest(graphs=memory.get("graphs", 0), workspaces=memory["workspaces"], context=memory["context"])
    made: dict[str, Any] = msgspec.to_builtins(Row(key=key, rest=rest, source=source))
    return made


def known_rest(config: CoreConfig, model: ModelConfig, dtype: str, card: str) -> dict[str, int]:
    """Bytes by part of what only a run tells, if a lane of this kind was measured; else nothing: bounds are no plan."""
    software = Software.installed()
    if software is None:
        return {}
    estimate = MeasuredTable.read().estimate(Key.of(config, model, dtype, software, card))
    rest: dict[str, int] = msgspec.structs.asdict(estimate.rest) if estimate.known else {}
    return rest


class MeasuredTable:
    """Rows of measured lanes."""

    def __init__(self, rows: Sequence[Row]) -> None:
        if not rows:
            raise ValueError("a table of measured lanes needs at least one row, to bound the others by")
        self.rows = list(rows)

    @classmethod
    def read(cls, path: Path = TABLE) -> Self:
        """The table in `path`. Raises `ValueError` for what is none."""
        try:
            return cls(msgspec.json.decode(path.read_bytes(), type=list[Row]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no table of measured lanes: {error}") from None

    @property
    def software(self) -> Software:
        """Versions of the newest row: those to plan with where they are not installed."""
        newest = self.rows[-1].key
        return Software(torch=newest.torch, flashinfer=newest.flashinfer)

    def estimate(self, key: Key) -> Estimate:
        """What a lane of `key` takes."""
        alike = [row for row in self.rows if row.exact and _like(row.key, key)]
        below = max((row for row in alike if row.key.max_step_tokens <= key.max_step_tokens), key=_tokens, default=None)
        above = min((row for row in alike if row.key.max_step_tokens >= key.max_step_tokens), key=_tokens, default=None)
        if below is None or above is None:
            return self._bound(key)
        return Estimate(_largest([below.rest, above.rest]), True, " and ".join(sorted({below.source, above.source})))

    def _bound(self, key: Key) -> Estimate:
        """Upper bounds. The context's differs with card and versions, not with the model; graphs grow with their number
        and with the kernels in each, which layers determine.
        """
        own = [row for row in self.rows if row.key.card == key.card] or self.rows
        nodes = _nodes(key)
        by_node = max((row.rest.graphs / _nodes(row.key) for row in self.rows if row.key.ladder), default=0.0)
        rest = Rest(
            graphs=int(1.25 * by_node * nodes) + 16 * MIB if nodes else 0,
            workspaces=max(row.rest.workspaces for row in own) + 32 * MIB,
            context=max(row.rest.context for row in own) + 64 * MIB,
        )
        return Estimate(rest, False, "upper bounds from " + " and ".join(sorted({row.source for row in own})))

    def with_rows(self, rows: Iterable[Row]) -> "MeasuredTable":
        """This table with more rows, of which each takes the place of one with its key."""
        by_key = {row.key: row for row in self.rows}
        for added in rows:
            by_key.pop(added.key, None)
            by_key[added.key] = added
        return MeasuredTable(list(by_key.values()))

    def write(self, path: Path = TABLE) -> None:
        """Write the table, a row a line."""
        lines = ",\n".join(msgspec.json.encode(row).decode() for row in self.rows)
        path.write_text(f"[\n{lines}\n]\n")


def _like(one: Key, other: Key) -> bool:
    return msgspec.structs.replace(one, max_step_tokens=other.max_step_tokens) == other


def _tokens(row: Row) -> int:
    return row.key.max_step_tokens


def _nodes(key: Key) -> int:
    return len(key.ladder) * key.graphs_per_bucket * key.shape.layers


def _largest(rests: Sequence[Rest]) -> Rest:
    names = Rest.__struct_fields__
    return Rest(**{name: max(getattr(rest, name) for rest in rests) for name in names})


def measured_rows(lines: Iterable[str], origin: str) -> Iterator[Row]:
    """The measured lanes in the lines of a results file called `origin`; a later one of a key wins.

    Raises `ValueError` with the number of a line that is not what `row` makes.
    """
    for number, line in enumerate(lines, 1):
        if '"measured"' not in line:
            continue
        try:
            yield msgspec.json.decode(line, type=_Line).measured
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ValueError(f"{origin}, line {number}: {error}") from None


class _Line(msgspec.Struct):
    measured: Row


def main(argv: Sequence[str], table: Path = TABLE) -> int:
    """`--add FILE ...`. Returns the exit code."""
    if len(argv) < 2 or argv[0] != "--add":
        sys.stderr.write("usage: python -m engine.cuda.measured --add RESULTS.jsonl ...\n")
        return 2
    try:
        found: list[Row] = []
        for name in argv[1:]:
            found += measured_rows(Path(name).read_text(encoding="utf-8").splitlines(), name)
        if not found:
            raise ValueError(f'{", ".join(argv[1:])}: no line has "measured"')
        MeasuredTable.read(table).with_rows(found).write(table)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write(f"{len(found)} rows taken into {table.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
