"""FlashInfer's raw signatures, one table for each supported version: what changes with a new version stands here.

FlashInfer's wrappers plan with their own buffers and synchronise; the modules below them take a plan as a list of
numbers and offsets into buffers of the caller. Sources, in the wheel: csrc/batch_prefill.cu,
csrc/batch_prefill_sm90.cu, csrc/flashinfer_xqa_binding.cu, flashinfer/jit/attention/modules.py, flashinfer/jit/xqa.py.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.cuda.fa3 import Fa3Size
from engine.cuda.planner import AttentionShape, Fa2Size

if TYPE_CHECKING:
    from torch import Tensor, dtype

NHD = 0
NON_CAUSAL, CAUSAL = 0, 1
NO_WINDOW = -1


@dataclass(frozen=True, slots=True)
class PagedCall:
    """Arguments of a paged-attention call that differ between calls."""

    q: "Tensor"
    """`[query tokens, heads, head_dim]`; strides are free but for the last."""
    k: "Tensor"
    """`[pages, page_size, kv_heads, head_dim]`, a view into the KV buffer; `v` has the same strides."""
    v: "Tensor"
    query_indptr: "Tensor"
    """int32 `[rows + 1]`, relative to `q`."""
    page_indptr: "Tensor"
    """int32 `[rows + 1]`, into `page_indices`."""
    page_indices: "Tensor"
    last_page_len: "Tensor"
    out: "Tensor"
    """`[query tokens, heads, head_dim]`, contiguous."""
    scale: float
    causal: bool


@dataclass(frozen=True, slots=True)
class XqaCall:
    """Arguments of an XQA call: one query token a row, no plan."""

    q: "Tensor"
    """`[rows, heads, head_dim]`, contiguous."""
    k: "Tensor"
    v: "Tensor"
    page_table: "Tensor"
    """int32 `[rows, pages]`, contiguous."""
    lengths: "Tensor"
    """int32 or uint32 `[rows]`."""
    out: "Tensor"
    semaphores: "Tensor"
    """int32 `[rows x kv_heads]`, zero before the first use; the kernel leaves it zero."""
    scratch: "Tensor"


@dataclass(frozen=True, slots=True)
class ModuleNeeds:
    """Which modules a lane needs."""

    head_dim: int
    group: int
    page_size: int
    dtype: str
    """bfloat16 or float16."""
    sm90: bool
    xqa: bool


class Workspaces(NamedTuple):
    """What FlashInfer's own planner works with: uint8 tensors, two on the device and one pinned."""

    floats: "Tensor"
    ints: "Tensor"
    pinned: "Tensor"


class HostRows(NamedTuple):
    """Rows as FlashInfer's own planner takes them: int32 tensors on the host."""

    query_indptr: "Tensor"
    page_indptr: "Tensor"
    lengths: "Tensor"


@dataclass(frozen=True, slots=True)
class Signatures:
    """One version's signatures.

    Offsets are bytes in the arena that is passed as workspace, by the names of `Fa2Buffers` (and `partials`, `lse`) or
    `Fa3Buffers`.
    """

    version: str
    fa2_info: Callable[[Fa2Size, Mapping[str, int]], list[int]]
    fa3_info: Callable[[Fa3Size, Mapping[str, int]], list[int]]
    plan_fa2: Callable[[Any, Workspaces, HostRows, AttentionShape, int | None], list[int]]
    run_fa2: Callable[[Any, "Tensor", list[int], PagedCall, bool], None]
    run_fa3: Callable[[Any, "Tensor", list[int], PagedCall, bool], None]
    run_xqa: Callable[[Any, XqaCall, int, bool], None]
    specs: Callable[[ModuleNeeds], dict[str, Any]]
    """JIT specs by a short name: `build_and_load()` gives the module, `is_aot` tells that it is prebuilt."""


def _fa2_info(size: Fa2Size, at: Mapping[str, int]) -> list[int]:
    """`PrefillPlanInfo::ToVector`. The kernel looks at the merge's offsets only if split, at the row count only if
    masked.
    """
    split = size.split
    return [
        size.padded_tiles,
        size.query_rows,
        at["total_num_rows"] if size.masked else 0,
        size.tile_q,
        at["request_indices"],
        at["qo_tile_indices"],
        at["kv_tile_indices"],
        at["merge_indptr"] if split else 0,
        at["o_indptr"],
        at["kv_chunk_size"],
        at["partials"] if split else 0,
        at["lse"] if split else 0,
        at["block_valid_mask"] if split else 0,
        int(size.masked),
        int(split),
    ]


def _fa3_info(size: Fa3Size, at: Mapping[str, int]) -> list[int]:
    """`PrefillPlanSM90Info::ToVector`."""
    order = (
        "qo_tile_indices",
        "qo_indptr",
        "kv_indptr",
        "qo_lens",
        "kv_lens",
        "head_indices",
        "work_indptr",
        "batch_indices",
    )
    return [*(at[name] for name in order), int(size.same_schedule)]


def _plan_fa2(
    module: Any, workspaces: Workspaces, rows: HostRows, shape: AttentionShape, chunk_pages: int | None
) -> list[int]:
    """FlashInfer's own eager plan with KV chunks of `chunk_pages` pages, or whole rows; its arrays are in `pinned`."""
    heads = (shape.heads, shape.kv_heads, shape.page_size)
    graph, causal, colocated_ctas, uniform_queries = False, True, 0, 0
    split = (-1 if chunk_pages is None else chunk_pages, chunk_pages is None)
    return list(
        module.plan(
            *(*workspaces, *rows, int(rows.query_indptr[-1]), len(rows.lengths), *heads, graph),
            *(shape.head_dim, shape.head_dim, causal, NO_WINDOW, *split, colocated_ctas, uniform_queries),
        )
    )


def _paged(arena: "Tensor", info: list[int], call: PagedCall, pdl: bool) -> list[Any]:
    """What FA2's and FA3's `paged_run` begin with; the arena is both workspaces."""
    rows = [call.query_indptr, call.page_indptr, call.page_indices, call.last_page_len]
    mask = CAUSAL if call.causal else NON_CAUSAL
    return [arena, arena, info, call.q, call.k, call.v, *rows, call.out, None, mask, NHD, NO_WINDOW, pdl]


def _run_fa2(module: Any, arena: "Tensor", info: list[int], call: PagedCall, pdl: bool) -> None:
    # custom mask and its indptr, ALiBi slopes, prefix length, positions and length of items, scales of an FP4 cache
    tensors = [None] * 8
    # soft cap, scale, 1 / RoPE's scale and theta, item length
    module.paged_run(*_paged(arena, info, call, pdl), *tensors, 0.0, call.scale, 1.0, 1e-4, 0)


def _run_fa3(module: Any, arena: "Tensor", info: list[int], call: PagedCall, pdl: bool) -> None:
    # prefix length, positions and length of items, scale of V
    tensors = [None] * 4
    # soft cap, scale, scale of V, item length
    module.paged_run(*_paged(arena, info, call, pdl), *tensors, 0.0, call.scale, 1.0, 0)


def _run_xqa(module: Any, call: XqaCall, sm_count: int, pdl: bool) -> None:
    """XQA divides by sqrt(head_dim) itself; its scale of 1 is the usual softmax scale."""
    rows, kv_heads = call.q.shape[0], call.k.shape[2]
    longest = call.page_table.shape[1] * call.k.shape[1]
    no_fp8, no_window, scale = False, 0, 1.0
    module.xqa_wrapper(
        *(no_fp8, sm_count, kv_heads, no_window, scale, None),
        *(call.out, 1.0, call.q, None, call.k, call.v, None, None),
        *(call.page_table, longest, call.lengths, rows, 1.0, None),
        *(1, None, None, call.semaphores, call.scratch, pdl),
    )


def _specs(needs: ModuleNeeds) -> dict[str, Any]:
    # Read when FlashInfer is imported: without it, norms are compiled by another compiler at their first call, and the
    # prebuilt module is not used.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    import torch
    from flashinfer import jit
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    kind: dtype = getattr(torch, needs.dtype)

    def paged(backend: str) -> Any:
        dims = (needs.head_dim, needs.head_dim)
        # Position encoding, sliding window, soft cap and half-precision QK are off.
        return gen_batch_prefill_module(backend, kind, kind, kind, torch.int32, *dims, 0, False, False, False)

    specs = {
        "fa2": paged("fa2"),
        "norm": jit.norm.gen_norm_module(),
        "silu": jit.activation.gen_act_and_mul_module("silu"),
    }
    if needs.sm90:
        specs["fa3"] = paged("fa3")
    if needs.xqa:
        specs["xqa"] = jit.xqa.gen_xqa_module(kind, kind, needs.page_size, needs.head_dim, needs.group, False, kind)
    return specs


SUPPORTED = {
    "0.6.18.post1": Signatures(
        version="0.6.18.post1",
        fa2_info=_fa2_info,
        fa3_info=_fa3_info,
        plan_fa2=_plan_fa2,
        run_fa2=_run_fa2,
        run_fa3=_run_fa3,
        run_xqa=_run_xqa,
        specs=_specs,
    )
}


class FlashInferError(ValueError):
    """FlashInfer is absent or of a version whose signatures are unknown; one line for the operator."""


def installed_version() -> str | None:
    """Version of the installed FlashInfer, without importing it."""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return None


def signatures(version: str | None) -> Signatures:
    """The signatures of a version, as `installed_version` tells it. Raises `FlashInferError`."""
    known = ", ".join(SUPPORTED)
    if version is None:
        raise FlashInferError(f"FlashInfer is not installed: pip install 'pagelane[cuda]' (flashinfer-python {known})")
    if version not in SUPPORTED:
        raise FlashInferError(
            f"FlashInfer {version} is installed, but this lane knows the raw signatures of {known} only: "
            f"pip install flashinfer-python=={next(iter(SUPPORTED))}"
        )
    return SUPPORTED[version]
