"""Reads the weights of a model directory from safetensors, checked against the configuration."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.files import ModelError, check_inside, read_json
from engine.models.progress import Progress
from engine.models.shapes import HEAD, INDEX_FILE, SINGLE_FILE, weight_shapes

_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Ten times the header of the largest model that config.json may describe.
_HEADER_LIMIT = 32 << 20
# Old Llama checkpoints carry this buffer; it follows from config.json.
MAX_NAME_BYTES = 255
"""Of a file's name, on every usual file system."""
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies, and how large it is there."""

    file: Path
    shape: tuple[int, ...]
    bytes: int


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights in `dtype`."""
    return sum(torch.Size(shape).numel() for shape in weight_shapes(config).values()) * dtype.itemsize


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The weights of `weight_shapes(config)` in `dtype` on `device`, in memory of their own: see `fill_weights`."""
    stored = _checked(directory, config)
    targets = _targets(config, dtype, device)
    _fill(stored, targets, progress)
    return targets


def fill_weights(
    directory: Path, config: ModelConfig, targets: Mapping[str, Tensor], progress: Progress | None = None
) -> None:
    """Read the weights of `weight_shapes(config)` into `targets`, in the type and on the device that these have.

    Everything is checked before the first tensor is read. Each tensor is copied out of the memory-mapped file and
    converted on its own, so that the peak is the weights and one tensor, and the file may change or go away
    afterwards. A tied head that is stored all the same is not read. Raises `ModelError` for missing, unexpected or
    misshapen tensors and for damaged files.
    """
    _fill(_checked(directory, config), targets, progress)


def _fill(stored: dict[str, _Stored], targets: Mapping[str, Tensor], progress: Progress | None) -> None:
    total = sum(tensor.bytes for tensor in stored.values())
    done = 0
    for name, tensor in _read(stored):
        targets[name].copy_(tensor)
        done += stored[name].bytes
        if progress is not None:
            progress(done, total)


def _targets(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in weight_shapes(config).items()}


def dummy_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the right shapes, in memory of their own: see `fill_dummy`."""
    targets = _targets(config, dtype, device)
    fill_dummy(targets, seed)
    return targets


def fill_dummy(targets: Mapping[str, Tensor], seed: int = 0) -> None:
    """Random weights, for speed tests: same seed, same numbers. Norms are ones, biases zeros.

    `targets` has the names and the order of `weight_shapes`.
    """
    generator = torch.Generator(next(iter(targets.values())).device).manual_seed(seed)
    for name, tensor in targets.items():
        if tensor.ndim == 1:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            # Keeps the variance of activations near one, so that no format overflows.
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)


def _checked(directory: Path, config: ModelConfig) -> dict[str, _Stored]:
    """Where each demanded weight lies, once names, shapes and types are known to be right."""
    stored = _stored(directory)
    expected = weight_shapes(config)
    if config.tied:
        stored.pop(HEAD, None)
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ModelError(f"{directory}: {_some(missing)} missing; config.json asks for {len(expected)} tensors")
    unexpected = [name for name in stored if name not in expected]
    if unexpected:
        raise ModelError(f"{directory}: {_some(unexpected)} not expected by config.json ({config.architecture})")
    for name, shape in expected.items():
        found = stored[name]
        if found.shape != shape:
            raise ModelError(
                f"{found.file}: {name} has shape {list(found.shape)}, but config.json asks for {list(shape)}"
            )
    return stored


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"


def _stored(directory: Path) -> dict[str, _Stored]:
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file() or not index.is_file():
        return _tensors_of(_inside(directory, SINGLE_FILE))
    mapped = read_json(index, _Index).weight_map
    stored: dict[str, _Stored] = {}
    for shard in sorted(set(mapped.values())):
        tensors = _tensors_of(_inside(directory, shard, index))
        for name in tensors:
            if mapped.get(name, shard) != shard:
                raise ModelError(f"{index}: {name} is listed in {mapped[name]}, but lies in {shard} too")
        stored |= tensors
    absent = [name for name in mapped if name not in stored]
    if absent:
        raise ModelError(f"{index}: {absent[0]} is listed in {mapped[absent[0]]}, but is not there")
    return stored


def _inside(directory: Path, name: str, index: Path | None = None) -> Path:
    """The file `name` of `directory`; names with a path and links that lead elsewhere are refused."""
    path = directory / name
    plain = Path(name).name == name and name.endswith(".safetensors") and name.isprintable()
    if not plain or len(name.encode()) > MAX_NAME_BYTES:
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        raise ModelError(
            f"{index}: weight_map names {shown!r}, which is not a plain file name of at most {MAX_NAME_BYTES} bytes "
            "that ends in .safetensors"
        )
    if not path.is_file():
        hint = "" if index else f"; a model directory holds {SINGLE_FILE} or {INDEX_FILE}"
        raise ModelError(f"{path}: no such file{hint}")
    check_inside(path)
    return path


def _tensors_of(path: Path) -> dict[str, _Stored]:
    tensors = {}
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            if name.endswith(_IGNORED_SUFFIX):
                continue
            piece = file.get_slice(name)
            shape, kind = tuple(piece.get_shape()), piece.get_dtype()
            if kind not in _STORED_BYTES:
                raise ModelError(f"{path}: {name} is of type {kind}; supported: {', '.join(_STORED_BYTES)}")
            tensors[name] = _Stored(path, shape, math.prod(shape) * _STORED_BYTES[kind])
    return tensors


def _open(path: Path) -> Any:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if size > header > _HEADER_LIMIT:
            raise ModelError(f"{path}: the header has {header} bytes, but at most {_HEADER_LIMIT} are read")
        return safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ModelError(f"{path}: not a complete safetensors file ({size} bytes): {error}") from None


def _read(stored: dict[str, _Stored]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, file by file; each is a view of the mapped file."""
    by_file: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        by_file.setdefault(tensor.file, []).append(name)
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                yield name, file.get_tensor(name)
