"""Turns what `model:` says into a model directory. No torch: the worker process calls this."""

import os
from collections.abc import Callable
from pathlib import Path

from engine.models.demo import DEMO_NAMES, demo_model_path
from engine.models.files import ModelError
from engine.models.folder import check_directory
from engine.models.gguf_import import cached_import
from engine.models.hub import HubConfig, HubId, download, parse_hub_id
from engine.models.progress import Lines, Progress

Say = Callable[[str], None]
"""Called with a line about what takes long."""


def resolve_model(
    model: str, load_format: str = "auto", *, revision: str | None = None, say: Say = lambda line: None
) -> Path:
    """The directory with config.json, weights and tokenizer that `model` names, checked as far as reading it is cheap.

    `model` is such a directory, a .gguf file (imported into the cache, once), one of `DEMO_NAMES`, or the id of a
    repository on a hub (`org/name`, `org/name@revision`), which is downloaded into the hub's cache, once. A path that
    is there is never taken for a hub id. With `load_format` dummy the weights may be absent. Raises `ModelError`.
    """
    path = _path(model)
    if path.exists() or model in DEMO_NAMES:
        if revision is not None:
            raise ModelError(f"revision is {revision!r}, but model {model!r} is no hub id; leave revision out")
        return _local(path, model, load_format, Lines("importing the model", say))
    hub_id = _hub_id(path, model, revision)
    say(f"{model} is no path here, so it is a hub id: {hub_id.repo} at revision {hub_id.revision}")
    folder = download(hub_id, HubConfig.of(os.environ), load_format != "dummy", Lines("downloading the model", say))
    check_directory(folder, load_format)
    return folder


def _path(model: str) -> Path:
    """`model` as a path that can be asked whether it is there, or a `ModelError`."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, not permitted; a zero byte; ~nobody
        raise ModelError(f"{model}: cannot be a model: {error}; give a directory, a .gguf file or a hub id") from None
    return path


def _local(path: Path, model: str, load_format: str, progress: Progress) -> Path:
    if not path.exists():
        return cached_import(demo_model_path(), progress=progress)
    if path.is_dir():
        check_directory(path, load_format)
        return path
    if path.suffix.lower() != ".gguf" or not path.is_file():
        raise ModelError(f"{model}: is neither a model directory nor a .gguf file")
    return cached_import(path, progress=progress)


def _hub_id(path: Path, model: str, revision: str | None) -> HubId:
    """`model` as a hub id, or a `ModelError` if it is rather a path that is not there."""
    hub_id = parse_hub_id(model, revision)
    if hub_id is None:
        raise ModelError(
            f"{model}: no such model: there is no such path ({path.absolute()}), and it is no hub id (org/name or "
            f"org/name@revision); give a model directory, a .gguf file, a hub id or {DEMO_NAMES[0]}"
        )
    explicit = revision is not None or "@" in model
    if path.parent.exists() and not explicit:
        raise ModelError(
            f"{model}: no such model: there is a folder {path.parent} here, but nothing named {path.name} in it; "
            f"correct the path, or say {hub_id.repo}@{hub_id.revision} if you mean the repository on a hub"
        )
    return hub_id
