"""Imports a GGUF file into a model directory: config, safetensors, tokenizer and chat template. No torch.

The weights are stored in the smallest type that loses nothing: float16 and bfloat16 tensors as they are, quantized ones
dequantized to float32, one tensor at a time.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.models.config import ModelConfig, load_model_config
from engine.models.files import ModelError
from engine.models.gguf_config import generation_config, model_config
from engine.models.gguf_header import check_header
from engine.models.gguf_tokenizer import write_tokenizer
from engine.models.progress import Progress
from engine.models.shapes import EMBEDDING, HEAD, SINGLE_FILE, weight_shapes

IMPORTER_VERSION = 1
"""Part of every cache key: raise it whenever the same GGUF file would be imported differently."""

MARKER = "pagelane_import.json"

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_ROPE_FREQS = "rope_freqs.weight"
_STORED = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
"""Name in safetensors and bytes of an element, for each type that is written."""


class _Marker(msgspec.Struct):
    """Written last: what a directory was imported from, and how large its files are."""

    importer: int
    source: str
    digest: str
    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Gguf:
    """An opened file: metadata by key, and gguf-py's tensors by the names that a checkpoint has for them."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]
    rope_freqs: NDArray[Any] | None


def cached_import(path: Path, cache_root: Path | None = None, progress: Progress | None = None) -> Path:
    """The cache entry of `path`, imported now unless it is there.

    The entry's name holds a hash of the content and the importer's version. `cache_root` is by default
    `$PAGELANE_CACHE` or ~/.cache/pagelane. Safe to call from several processes at once: one imports, the others wait.
    """
    root = cache_root or Path(os.environ.get("PAGELANE_CACHE") or Path.home() / ".cache" / "pagelane")
    digest = _digest(path)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)
    directory = root / f"{name}-{digest[:16]}-v{IMPORTER_VERSION}"
    if not _is_import_of(directory, digest):
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(
                f"{root}: cannot be made: {error.strerror}; set PAGELANE_CACHE to another folder"
            ) from None
        with _locked(root) as held:
            if held and directory.exists() and not _is_import_of(directory, digest):
                shutil.rmtree(directory)  # ours by its name, and damaged
            _import(path, directory, digest, progress, held)
    return directory


def import_gguf(path: Path, directory: Path, progress: Progress | None = None) -> None:
    """Import the GGUF file `path` as the model directory `directory`.

    The directory appears complete or not at all. If it already is an import of the same file nothing is done; if it
    holds anything else it is left alone. Raises `ModelError` for this, and for files that are damaged or not supported.
    """
    digest = _digest(path)
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent) as held:
        _import(path, directory, digest, progress, held)


def _import(path: Path, directory: Path, digest: str, progress: Progress | None, held: bool) -> None:
    if _is_import_of(directory, digest):
        return
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(f"{directory}: is there and is no import of {path.name}; name another directory or remove it")
    prefix = f".{directory.name}.partial-"
    for stale in directory.parent.glob(f"{glob.escape(prefix)}*") if held else ():
        shutil.rmtree(stale, ignore_errors=True)  # whoever made it is gone, or it would hold the lock
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    try:
        _write(path, partial, digest, progress)
        partial.chmod(0o755)
        partial.rename(directory)
    except OSError as error:
        if not _is_import_of(directory, digest):
            raise ModelError(f"{directory}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, directory: Path, digest: str, progress: Progress | None) -> None:
    gguf = _open(path)
    dtypes = {name: _stored_dtype(tensor) for name, tensor in gguf.tensors.items()}
    matrices = {dtypes[name] for name, tensor in gguf.tensors.items() if len(tensor.shape) > 1}
    if EMBEDDING not in gguf.tensors:
        raise ModelError(f"{path}: token_embd.weight is missing")
    config = model_config(
        gguf.fields,
        path,
        vocab_size=int(gguf.tensors[EMBEDDING].shape[1]),
        tied=HEAD not in gguf.tensors,
        dtype=matrices.pop() if len(matrices) == 1 else "float32",
        rope_freqs=gguf.rope_freqs,
    )
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation_config(gguf.fields, path))
    write_tokenizer(directory, gguf.fields, path)
    _write_weights(directory / SINGLE_FILE, gguf, load_model_config(directory), dtypes, progress)
    files = {file.name: file.stat().st_size for file in directory.iterdir()}
    marker = _Marker(importer=IMPORTER_VERSION, source=path.name, digest=digest, files=files)
    (directory / MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(marker)))


def _open(path: Path) -> _Gguf:
    try:
        import gguf
        import tokenizers  # noqa: F401 - needed later; say so before the work begins
    except ImportError as error:
        raise ModelError(f"{path}: importing GGUF files needs {error.name}; pip install 'pagelane[demo]'") from None
    try:
        check_header(path)
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except ModelError:
        raise
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        size = path.stat().st_size
        raise ModelError(f"{path}: not a complete GGUF file ({size} bytes): {' '.join(str(error).split())}") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    freqs = tensors.pop(_ROPE_FREQS, None)
    named = {_checkpoint_name(path, name): tensor for name, tensor in tensors.items()}
    return _Gguf(path, fields, named, None if freqs is None else np.asarray(freqs.data))


def _checkpoint_name(path: Path, name: str) -> str:
    """The name that a Hugging Face checkpoint has for llama.cpp's `name`."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    match = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise ModelError(f"{path}: tensor {name} belongs to no architecture that Pagelane serves")
    return f"model.layers.{int(match[1])}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


def _stored_dtype(tensor: Any) -> str:
    return {"F16": "float16", "BF16": "bfloat16"}.get(tensor.tensor_type.name, "float32")


def _write_weights(
    path: Path, gguf: _Gguf, config: ModelConfig, dtypes: Mapping[str, str], progress: Progress | None
) -> None:
    """Stream the tensors into a safetensors file: length of the header (u64), header (JSON), data without gaps."""
    shapes = weight_shapes(config)
    _check_tensors(gguf, shapes)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        kind, width = _STORED[dtypes[name]]
        end = offset + int(np.prod(shape)) * width
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    free = shutil.disk_usage(path.parent).free
    if free < offset:
        raise ModelError(f"{path.parent}: the import takes {offset >> 20} MiB, but only {free >> 20} MiB are free")
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in shapes:
            _write_tensor(file, gguf, name, config)
            if progress is not None:
                progress(header[name]["data_offsets"][1], offset)


def _check_tensors(gguf: _Gguf, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in gguf.tensors:
            raise ModelError(f"{gguf.path}: {name} is missing")
        found = tuple(int(size) for size in reversed(gguf.tensors[name].shape))
        if found != shape:
            raise ModelError(f"{gguf.path}: {name} has shape {list(found)}, but the metadata ask for {list(shape)}")
    for name in gguf.tensors:
        if name not in shapes:
            raise ModelError(f"{gguf.path}: {name} is not expected by the metadata")


def _write_tensor(file: BinaryIO, gguf: _Gguf, name: str, config: ModelConfig) -> None:
    tensor = gguf.tensors[name]
    weights = _dense(gguf.path, name, tensor)
    if config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        weights = _unpermuted(weights, config.kv_heads if "k_proj" in name else config.heads)
    file.write(np.ascontiguousarray(weights).data)


def _dense(path: Path, name: str, tensor: Any) -> NDArray[Any]:
    """The tensor in the type it is stored in, `[out, in]`; bfloat16, which numpy lacks, as its uint16 bits."""
    kind = tensor.tensor_type.name
    if kind == "F16":
        return np.asarray(tensor.data, np.float16)
    if kind == "BF16":
        return np.asarray(tensor.data).view(np.uint16)
    from gguf import dequantize

    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError:
        raise ModelError(f"{path}: {name} is of type {kind}, which gguf-py cannot dequantize") from None


def _unpermuted(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo llama.cpp's reordering of query and key rows.

    llama.cpp rotates neighbouring pairs of a head's rows, checkpoints rotate the two halves: its converter stores row
    (half, i) of each head as (i, half).
    """
    return weights.reshape(heads, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def _is_import_of(directory: Path, digest: str) -> bool:
    try:
        marker = msgspec.json.decode((directory / MARKER).read_bytes(), type=_Marker)
        return (marker.importer, marker.digest) == (IMPORTER_VERSION, digest) and all(
            (directory / name).stat().st_size == size for name, size in marker.files.items()
        )
    except (OSError, msgspec.DecodeError):
        return False


def _digest(path: Path) -> str:
    """BLAKE2b of the file's size and content, as hex."""
    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "blake2b").digest()
            size = file.tell()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    return hashlib.blake2b(size.to_bytes(8, "little") + content, digest_size=16).hexdigest()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock `folder` itself (no lock file is left); the kernel drops the lock if the process dies.

    Yields whether the lock is held: some network file systems lock no folders. Two imports at once are then both done,
    and the first rename wins.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)
