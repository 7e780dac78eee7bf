"""Real scripts without a GPU: a tiny model, the CUDA lane on stand-ins, and numbers for the card's memory.

Shows that a script runs, not that the card does what it should: of a rehearsal, `ok` means nothing.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from engine.config import CoreConfig
from tests.gpu.shaped import write_config

VARIABLE = "PAGELANE_REHEARSAL"
"""Set to 1 for this process and its children."""
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cuda",
    "dtype": "bfloat16",
    "max_bucket": 256,
    "max_step_tokens": 2048,
    "context_limit": 8192,
    "pipeline_depth": 1,
}
"""What the GPU scripts serve with, where nothing else is said."""
_SMALL: dict[str, Any] = {
    "load_format": "auto",
    "dtype": "float32",
    "max_bucket": 4,
    "graph_buckets": "1,2",
    "max_step_tokens": 128,
    "context_limit": 512,
}


def rehearsed() -> bool:
    """Whether this is a rehearsal."""
    return os.environ.get(VARIABLE) == "1"


def enter() -> None:
    """Make this process and its children a rehearsal."""
    os.environ[VARIABLE] = "1"


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """A script's arguments, with `--rehearse` among them, which takes effect at once."""
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny model")
    arguments = parser.parse_args()
    if arguments.rehearse:
        enter()
    return arguments


def begin() -> None:
    """Take the stand-ins, in a rehearsal. Before anything is built."""
    if not rehearsed():
        return
    import pytest
    import torch

    from engine import build
    from engine.cuda import lane
    from tests.fake_gpu import MIB, FakeGpu, stand_in

    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    stand_in(patch)
    patch.setattr(build, "use_cuda", lambda device: True)
    patch.setattr(lane, "CudaGpu", lambda: FakeGpu(128 * MIB))


def settings(**changes: Any) -> dict[str, Any]:
    """The settings of a script's lane; a rehearsal keeps its small sizes and forgets memory limits."""
    if not rehearsed():
        return {**SETTINGS, **changes}
    kept = {name: value for name, value in changes.items() if name not in _SMALL and name != "gpu_memory_limit"}
    return {**SETTINGS, **_SMALL, **kept}


def config_of(directory: Path, **changes: Any) -> CoreConfig:
    """The lane's settings for the model in `directory`."""
    return CoreConfig(model=str(directory), **settings(**changes))


def model_directory(shape: str, folder: Path) -> Path:
    """A shape's configuration in `folder`; in a rehearsal, a tiny model."""
    if not rehearsed():
        folder.mkdir(parents=True, exist_ok=True)
        return write_config(shape, folder)
    from tests.models import tiny_model

    return tiny_model(folder, "qwen3", layers=1, vocab=261)


def scaled(real: Any, small: Any) -> Any:
    """A size for a real run, and one for a rehearsal."""
    return small if rehearsed() else real
