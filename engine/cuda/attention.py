"""Attention of a step through FlashInfer's kernels, on plans of our own: one for decode rows, one for chunks."""

import logging
import math
import os
import shutil
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from engine.cuda.attention_plan import AttentionPlans, Launch, StepRows
from engine.cuda.device import TorchDevice
from engine.cuda.flashinfer_raw import FlashInferError, ModuleNeeds, PagedCall, installed_version, signatures
from engine.cuda.inputs import STAGES, StepInputs
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.cuda.prebuild import first_complaint
from engine.cuda.xqa import XqaDecode

log = logging.getLogger(__name__)

COMPILE_SECONDS = {"fa2": 130, "fa3": 510, "xqa": 20, "norm": 34, "silu": 5}
"""How long nvcc 13.0 takes for a module on two cores, for the line that asks for patience: fa2 95 to 160 s, fa3 410 to
620 s, by head dim and type.
"""


def load_modules(needs: ModuleNeeds) -> dict[str, Any]:
    """FlashInfer's modules by their short names.

    Says beforehand which of them have to be compiled and about how long that takes; raises `FlashInferError` if there
    is no compiler for them. XQA's is left out then, since FA2 computes the same.
    """
    specs = signatures(installed_version()).specs(needs)
    missing = [name for name, spec in specs.items() if not spec.is_aot and not spec.is_compiled]
    if missing and not has_compiler(os.environ):
        needed = [name for name in missing if name != "xqa"]
        if needed:
            raise FlashInferError(
                f"FlashInfer's modules {', '.join(needed)} are not prebuilt, and there is no nvcc to compile them: "
                "run `pagelane prebuild` on a machine that has the CUDA toolkit, and install what it writes here"
            )
        log.warning(
            "FlashInfer's XQA module is not prebuilt, and there is no nvcc to compile it: decode rows run on FA2 "
            "alone; `pagelane prebuild` compiles it ahead"
        )
        missing.remove("xqa")
        del specs["xqa"]
    if missing:
        seconds = sum(COMPILE_SECONDS.get(name, 60) for name in missing)
        log.warning(
            "compiling FlashInfer's modules %s, about %d s the first time; `pagelane prebuild` does it ahead",
            ", ".join(missing),
            seconds,
        )
    return {name: _load(name, spec) for name, spec in specs.items()}


def has_compiler(environ: Mapping[str, str], default: Path = Path("/usr/local/cuda")) -> bool:
    """True if there is an nvcc where FlashInfer looks for it (`get_cuda_path` in flashinfer/jit/cpp_ext.py)."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if not home and shutil.which("nvcc", path=environ.get("PATH", "")) is not None:
        return True
    return (Path(home or default) / "bin" / "nvcc").is_file()


def _load(name: str, spec: Any) -> Any:
    try:
        return spec.build_and_load()
    except (RuntimeError, OSError) as error:
        raise FlashInferError(
            f"FlashInfer's module {name} can be neither loaded nor compiled: {first_complaint(error)}; "
            "`pagelane prebuild` compiles it ahead"
        ) from error


class _Rows(NamedTuple):
    """A part of a step: its tokens' queries and results, their indptr, and its first row in the step."""

    queries: Tensor
    out: Tensor
    query_indptr: Tensor
    first: int


class FlashInferAttention:
    """`engine.cuda.executor.Attention` over `kv` `[pages, layers, 2, page_size, kv_heads, head_dim]`.

    `arena` is uint8 `[AttentionLayout(capacity).nbytes]`, zeroed; plans and partial results lie in it.
    """

    def __init__(
        self, capacity: AttentionCapacity, kv: Tensor, inputs: StepInputs, arena: Tensor, modules: dict[str, Any]
    ) -> None:
        layout = AttentionLayout(capacity)
        self._raw = signatures(installed_version())
        self._modules = modules
        self._arena = arena
        self._inputs = inputs
        self._layers = [(kv[:, layer, 0], kv[:, layer, 1]) for layer in range(kv.shape[1])]
        # Programmatic dependent launch: 3 to 5 % of a call of few rows (H200, 1 to 4 rows of 1k).
        self._overlap = capacity.sm90
        self._scale = 1.0 / math.sqrt(capacity.step.head_dim)
        self.plans = AttentionPlans(layout, self._raw, TorchDevice(arena), STAGES)
        self._xqa = XqaDecode(capacity, self._raw, modules["xqa"], arena) if capacity.xqa else None

    def begin(self, rows: StepRows, bucket: int | None = None, *, always_split: bool = False) -> None:
        """See `engine.cuda.executor.Attention`."""
        self.plans.update(rows, bucket, always_split=always_split)

    @property
    def variant(self) -> Hashable:
        """See `engine.cuda.executor.Attention`."""
        launch = self.plans.current.decode
        return launch and (launch.kernel, launch.split, *launch.info)

    def probes(self, bucket: int, *, always_split: bool = False) -> list[StepRows]:
        """See `engine.cuda.executor.Attention`."""
        return self.plans.probes(bucket, always_split=always_split)

    def __call__(self, layer: int, queries: Tensor, out: Tensor) -> None:
        """See `engine.cuda.decoder.StepAttention`."""
        step, device = self.plans.current, self._inputs.device
        decode = 0
        if step.decode is not None:
            decode = step.decode.rows
            self._run(step.decode, layer, _Rows(queries[:decode], out[:decode], device["decode_indptr"], 0))
        if step.chunks is not None:
            indptr = self._inputs.staged["chunk_indptr"]
            self._run(step.chunks, layer, _Rows(queries[decode:], out[decode:], indptr, decode))

    def _run(self, launch: Launch, layer: int, part: _Rows) -> None:
        if self._xqa is not None and launch.kernel == "xqa":
            self._run_xqa(self._xqa, launch.rows, layer, part)
            return
        device, rows, first = self._inputs.device, launch.rows, part.first
        keys, values = self._layers[layer]
        call = PagedCall(
            q=part.queries,
            k=keys,
            v=values,
            query_indptr=part.query_indptr[: rows + 1],
            page_indptr=device["page_indptr"][first : first + rows + 1],
            page_indices=device["page_indices"],
            last_page_len=device["last_page_len"][first : first + rows],
            out=part.out,
            scale=self._scale,
            causal=True,
        )
        run = self._raw.run_fa3 if launch.kernel == "fa3" else self._raw.run_fa2
        run(self._modules[launch.kernel], self._arena, launch.info, call, self._overlap)

    def _run_xqa(self, xqa: XqaDecode, rows: int, layer: int, part: _Rows) -> None:
        staged = self._inputs.staged
        if layer == 0:
            # Behind the copies at the head of the step, and inside a graph that replays it.
            xqa.begin(self._inputs.device["block_table"], staged["row_slots"][:rows])
        xqa.run(part.queries, self._layers[layer], staged["lengths"][:rows], part.out, self._overlap)
