"""Compiles the FlashInfer modules of a lane ahead of its start, on a machine with a CUDA toolkit but no GPU."""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.config import CoreConfig
from engine.cuda.flashinfer_raw import ModuleNeeds, installed_version, signatures
from engine.cuda.policy import has_xqa
from engine.models.config import ModelConfig, load_model_config
from engine.models.resolve import resolve_model

DTYPES = ("bfloat16", "float16")
_ARCH = re.compile(r"([1-9]\d*)\.\d[af]?")


class PrebuildError(ValueError):
    """Nothing can be compiled here; one line for the operator that says what to do."""


@dataclass(frozen=True, slots=True)
class PrebuildConfig:
    """What to compile for, and where to put it."""

    core: CoreConfig
    arch: str
    """CUDA architecture as nvcc names it, such as 9.0a for an H100 or H200."""
    out: Path | None
    """Folder for the modules; None is the one where the installed FlashInfer looks for prebuilt modules."""


def find_toolkit(environ: Mapping[str, str], default: Path = Path("/usr/local/cuda")) -> Path:
    """The CUDA toolkit: CUDA_HOME, else that of the nvcc on the PATH, else `default`. Raises `PrebuildError`.

    FlashInfer takes the folder above nvcc's, which is wrong if that nvcc is a link or a script.
    """
    home, nvcc = environ.get("CUDA_HOME"), shutil.which("nvcc", path=environ.get("PATH", ""))
    folders = [Path(home)] if home else [Path(nvcc).resolve().parent.parent, default] if nvcc else [default]
    for folder in folders:
        if (folder / "bin" / "nvcc").is_file() and (folder / "include" / "cuda_runtime.h").is_file():
            return folder
    looked = " or ".join(str(folder) for folder in folders)
    raise PrebuildError(
        f"there is no CUDA toolkit (bin/nvcc, include/cuda_runtime.h) in {looked}: install it, or set CUDA_HOME to it; "
        "no GPU is needed"
    )


def needs_of(model: ModelConfig, core: CoreConfig, arch: str) -> ModuleNeeds:
    """The modules that the lane of a model needs on cards of an architecture. Raises `PrebuildError`."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise PrebuildError(
            f"arch is {arch!r}, but must be one architecture as nvcc names it, such as 8.0, 9.0a or 12.0f"
        )
    dtype = model.dtype if core.dtype == "auto" else core.dtype
    if dtype not in DTYPES:
        raise PrebuildError(f"dtype is {dtype}, but the CUDA lane computes in {' or '.join(DTYPES)}: set dtype")
    hopper, group = match[1] == "9", model.heads // model.kv_heads
    xqa = hopper and has_xqa(model.head_dim, group, core.kv_page_size)
    return ModuleNeeds(model.head_dim, group, core.kv_page_size, dtype, sm90=hopper, xqa=xqa)


def prebuild(
    config: PrebuildConfig,
    environ: MutableMapping[str, str],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Path]:
    """Compile what is not there yet; returns the modules, laid out as FlashInfer's prebuilt ones.

    Sets CUDA_HOME and FLASHINFER_CUDA_ARCH_LIST in `environ`, the process's own, which FlashInfer reads when imported.
    Raises `PrebuildError`, `FlashInferError` or `ModelError` before anything is compiled.
    """
    raw = signatures(installed_version())
    toolkit = find_toolkit(environ)
    needs = needs_of(load_model_config(_model_dir(config.core)), config.core, config.arch)
    environ["FLASHINFER_CUDA_ARCH_LIST"] = config.arch
    environ["CUDA_HOME"] = str(toolkit)
    specs = raw.specs(needs)
    out = config.out if config.out is not None else prebuilt_folder()
    about = {"flashinfer": raw.version, "arch": config.arch}
    _check_made_for(about, out, specs.values())
    say(f"{len(specs)} modules of FlashInfer {raw.version} for {config.arch}, into {out}; minutes each at worst")
    modules = []
    for name, spec in specs.items():
        began = clock()
        module = out / spec.name / f"{spec.name}.so"
        if not module.is_file():
            _build(spec, module)
            # At once: a module without an entry may have been made for anything.
            _write_manifest(out, module, about)
        modules.append(module)
        say(f"{name}: {clock() - began:.0f} s, {module.stat().st_size / 1e6:.1f} MB")
    return modules


def _model_dir(core: CoreConfig) -> Path:
    """A folder with config.json is enough here: an image is built without the weights."""
    folder = Path(core.model).expanduser()
    there = (folder / "config.json").is_file()
    return folder if there else resolve_model(core.model, "dummy", revision=core.revision)


def prebuilt_folder() -> Path:
    """Where the installed FlashInfer looks for prebuilt modules before it compiles."""
    from flashinfer.jit import env

    return Path(env.FLASHINFER_AOT_DIR)


def _check_made_for(about: Mapping[str, str], out: Path, specs: Iterable[Any]) -> None:
    """Refuse modules that are there already, in `out` or among FlashInfer's prebuilt ones, and were made for other
    cards: a module's name does not tell, and what is there is not compiled again. Raises `PrebuildError`.
    """
    for spec in specs:
        for folder in (out, *([Path(spec.get_library_path()).parent.parent] if spec.is_aot else ())):
            made = _manifest(folder).get(spec.name, {})
            for key, wanted in about.items():
                found = made.get(key, wanted)
                if found != wanted and (folder / spec.name).exists():
                    raise PrebuildError(
                        f"{folder / spec.name} was made for {key} {found}, but is wanted for {wanted}: remove it, or "
                        "choose another folder with --out"
                    )


def _build(spec: Any, target: Path) -> None:
    if not spec.is_aot:
        _compile(spec)
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own until it is whole: a module that is half copied would be loaded.
    part = target.with_suffix(".part")
    shutil.copyfile(spec.get_library_path(), part)
    part.rename(target)


def _compile(spec: Any) -> None:
    try:
        spec.build(verbose=False)
    except RuntimeError as error:
        raise PrebuildError(f"{spec.name} does not compile: {first_complaint(error)}") from error


def first_complaint(error: Exception) -> str:
    """The first line of a failed compilation that says what is wrong; all of it if none does."""
    lines = [line.strip() for line in str(error).splitlines() if "error" in line or "cannot find" in line]
    return lines[0] if lines else str(error)


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of the modules of `folder`, by name."""
    path = folder / "manifest.json"
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
    except msgspec.DecodeError as error:
        raise PrebuildError(f"{path} cannot be read: {error}; remove it") from None


def _write_manifest(out: Path, module: Path, about: Mapping[str, str]) -> None:
    data, known = module.read_bytes(), _manifest(out)
    known[module.stem] = {**about, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    part = out / "manifest.part"
    part.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    part.rename(out / "manifest.json")
