"""One start of a lane in a fresh process, measured; `check_memory` runs it. Prints one line of JSON at its end.

python -m tests.gpu.memory_child '{"shape": "qwen3-4b", "changes": {"kv_page_size": 64}, "turns": 150}'
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.build import BuiltLane, build_lane
from engine.config import CoreConfig
from engine.cuda.measured import Key, Software, row
from engine.cuda.nvml import used_by_others
from engine.models.config import load_model_config
from tests.gpu import rehearsal
from tests.gpu.load import Mix, MixedLoad

MARK = "RESULT "
_DEPTH = 6


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of the card at one moment."""

    used: int
    """By this process: what the device shows, less what others had before it began."""
    held: int
    """By torch, its cache included."""

    @classmethod
    def read(cls, others: int) -> "Usage":
        """As of now."""
        if not torch.cuda.is_available():
            return cls(0, 0)
        free, total = torch.cuda.mem_get_info()
        return cls(total - free - others, torch.cuda.memory_reserved())

    def max(self, other: "Usage") -> "Usage":
        """The larger of both, number by number."""
        return Usage(max(self.used, other.used), max(self.held, other.held))


def storages(root: object, depth: int = _DEPTH, seen: set[int] | None = None) -> Iterator[tuple[int, int]]:
    """Address and bytes of every device storage that `root` reaches, some more than once."""
    seen = set() if seen is None else seen
    if id(root) in seen or depth < 0:
        return
    seen.add(id(root))
    if isinstance(root, Tensor):
        if root.is_cuda or rehearsal.rehearsed():
            yield root.untyped_storage().data_ptr(), root.untyped_storage().nbytes()
        return
    if isinstance(root, Mapping):
        children = list(root.values())
    elif isinstance(root, list | tuple):
        children = list(root)
    elif hasattr(root, "__dict__") or hasattr(type(root), "__slots__"):
        slots = [name for kind in type(root).__mro__ for name in getattr(kind, "__slots__", ())]
        children = [*vars(root).values()] if hasattr(root, "__dict__") else []
        children += [getattr(root, name, None) for name in slots]
    else:
        return
    for child in children:
        yield from storages(child, depth - 1, seen)


def device_bytes(root: object, without: Mapping[int, int] = {}) -> int:
    """Bytes of the device storages that `root` reaches, each once, but for those `without`."""
    return sum(size for address, size in dict(storages(root)).items() if address not in without)


def parts_of(executor: Any) -> dict[str, int]:
    """Bytes of a lane's parts as its tensors have them: what the report is held against."""
    parts = executor.parts
    decoder = parts.decoder.parts
    arena, cache = (dict(storages(one)) for one in (parts.logits, decoder.kv))
    return {
        "weights": device_bytes(decoder.weights),
        # One allocation with inputs and plans.
        "rope_table": decoder.cos_sin.nbytes,
        "plan_arena": device_bytes([parts.inputs, parts.attention], {**arena, **cache}) - decoder.cos_sin.nbytes,
        "activations": sum(arena.values()),
    }


def start(config: CoreConfig, directory: Path, turns: int) -> dict[str, Any]:
    """Build the lane, load it, and say what it took."""
    others = 0 if rehearsal.rehearsed() else used_by_others(0) or 0
    rehearsal.begin()
    began = time.perf_counter()
    try:
        built = build_lane(config, directory)
    except ValueError as error:
        return {"starts": False, "refused": str(error)}
    seconds = time.perf_counter() - began
    first = Usage.read(others)
    peak, load = loaded(built, others, turns)
    total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
    return {
        "starts": True,
        "build_s": seconds,
        "seconds": built.seconds,
        "line": built.load_line,
        "kv_tokens": built.capacity.tokens,
        "others": others,
        "card_bytes": total,
        "report": built.memory,
        "tensors": parts_of(built.lane.executor),
        "used": [first.used, peak.used],
        "held": [first.held, peak.held],
        "load": load,
        "row": measured_row(config, directory, built.memory),
    }


def loaded(built: BuiltLane, others: int, turns: int) -> tuple[Usage, dict[str, Any]]:
    """The most that was in use while a mixed load ran, and what ran."""
    limits = built.lane.scheduler.config
    mix = Mix(
        built.vocab_size,
        # So that some 50 steps bring all rows to their outputs, which are longer than the rest of the run.
        streams=limits.max_bucket + 8,
        longest_prompt=min(1500, limits.max_step_tokens * 2 // 5, limits.servable_length // 3),
        longest_output=min(600, limits.servable_length // 3),
        burst=10,
    )
    load = MixedLoad(built.lane, mix)
    peak, most = Usage.read(others), 0
    for _ in range(turns):
        load.turn()
        peak = peak.max(Usage.read(others))
        most = max(most, len(built.lane.scheduler.rows.active))
    stats, ended = built.lane.stats(), load.client.finished.values()
    errors = [one.message for one in ended if one.reason == "error"]
    return peak, {
        "turns": turns,
        "decode_steps": stats.decode_steps,
        "unified_steps": stats.unified_steps,
        "tokens": load.client.tokens,
        "most_active": most,
        "preemptions": stats.preemptions,
        "errors": errors[:3],
    }


def measured_row(config: CoreConfig, directory: Path, memory: dict[str, int]) -> dict[str, Any] | None:
    """What the table of measured lanes takes; None where there is no card."""
    if not torch.cuda.is_available():
        return None
    software = Software(torch=torch.__version__.partition("+")[0], flashinfer=metadata.version("flashinfer-python"))
    key = Key.of(config, load_model_config(directory), config.dtype, software, torch.cuda.get_device_name())
    return row(
        key, memory, f"tests/gpu/results/memory.jsonl at {os.environ.get('PAGELANE_COMMIT', 'an unknown commit')[:7]}"
    )


def main() -> None:
    """Do what the argument says."""
    asked = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        directory = rehearsal.model_directory(asked["shape"], Path(folder) / "model")
        config = rehearsal.config_of(directory, **asked["changes"])
        result = start(config, directory, asked["turns"])
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
