"""The lane's attention on a CPU: FlashInfer's modules replaced by torch that reads the same arguments."""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.interpreter  # noqa: F401
from engine.cuda import attention as module
from engine.cuda.attention import FlashInferAttention, has_compiler, load_modules
from engine.cuda.flashinfer_raw import SUPPORTED, FlashInferError, ModuleNeeds
from engine.cuda.inputs import StepInputs, step_rows
from engine.cuda.layout import AttentionCapacity, AttentionLayout
from engine.cuda.staging import HostDevice
from engine.kernels.step_head import write_step
from engine.messages import Sampling
from engine.plan import PlanCapacity
from engine.step import Chunk, RowStart, StepPlan
from kv.table import TableUpdate
from tests.cuda_on_cpu import GatheringAttention
from tests.gpu import faults

STEP = PlanCapacity(
    max_bucket=6, max_step_tokens=64, context_limit=200, page_size=16, heads=8, kv_heads=2, head_dim=128
)
CAPACITY = AttentionCapacity(STEP, sm_count=8, sm90=True, xqa=True)
LAYERS, PAGES = 2, 40


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`q` `[queries, heads, dim]` at the end of `k`, `v` `[length, kv_heads, dim]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@dataclass
class XqaModule:
    """`xqa_wrapper` over the page table that it is given."""

    calls: int = 0

    def xqa_wrapper(self, *arguments: Any) -> None:
        self.calls += 1
        out, q, k, v = (arguments[place] for place in (6, 8, 10, 11))
        table, longest, lengths, rows = arguments[14:18]
        assert len(q) == len(table) == len(lengths) == rows
        assert table.is_contiguous()
        assert longest == table.shape[1] * k.shape[1]
        for row, length in enumerate(lengths.tolist()):
            pages = table[row, : -(-length // k.shape[1])].long()
            out[row] = attend(q[row, None], k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length])[0]


@dataclass
class PagedModule:
    """`paged_run` over page lists."""

    infos: list[list[int]] = field(default_factory=list)

    def paged_run(self, *arguments: Any) -> None:
        info, q, k, v, queries, pages, indices, last, out = arguments[2:11]
        self.infos.append(info)
        for row, length in enumerate(last.tolist()):
            listed = indices[pages[row] : pages[row + 1]].long()
            length += (len(listed) - 1) * k.shape[1]
            at = slice(int(queries[row]), int(queries[row + 1]))
            out[at] = attend(q[at], k[listed].flatten(0, 1)[:length], v[listed].flatten(0, 1)[:length])


class ArenaDevice(HostDevice):
    """A host device over the arena that the attention was given."""

    def __init__(self, arena: Tensor) -> None:
        self.arena = arena.numpy()


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FlashInfer's version be known and the arena lie on the host."""
    monkeypatch.setattr(module, "installed_version", lambda: "0.6.18.post1")
    monkeypatch.setattr(module, "TorchDevice", ArenaDevice)


class Lane:
    """Attention of random steps, and what it should have been."""

    def __init__(self, capacity: AttentionCapacity = CAPACITY) -> None:
        torch.manual_seed(3)
        self.inputs = StepInputs(STEP, torch.device("cpu"), write_step)
        self.kv = torch.randn(PAGES, LAYERS, 2, 16, 2, 128)
        self.modules: dict[str, Any] = {"xqa": XqaModule(), "fa2": PagedModule(), "fa3": PagedModule()}
        arena = torch.zeros(AttentionLayout(capacity).nbytes, dtype=torch.uint8)
        self.attention = FlashInferAttention(capacity, self.kv, self.inputs, arena, self.modules)
        self.number = 0

    def step(self, decode: dict[int, int], chunks: list[Chunk], table: list[TableUpdate]) -> list[str]:
        """Run a step of decode rows (row slot: length) and chunks; returns the kernels of its parts."""
        starts = [RowStart(row, Sampling()) for row in (*decode, *(chunk.row for chunk in chunks))]
        plan = StepPlan(self.number, starts, table, list(decode), list(decode.values()), chunks)
        self.number += 1
        rows = step_rows(plan)
        self.attention.begin(rows)
        self.inputs.write(plan, rows)
        for layer in range(LAYERS):
            queries = torch.randn(plan.tokens, STEP.heads, STEP.head_dim)
            got, want = torch.full_like(queries, torch.nan), torch.empty_like(queries)
            self.attention(layer, queries, got)
            GatheringAttention(self.kv, self.inputs)(layer, queries, want)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        return [part.kernel for part in self.attention.plans.current if part is not None]


def pages_of(row: int, *pages: int) -> list[TableUpdate]:
    return [TableUpdate(row, index, page) for index, page in enumerate(pages)]


@pytest.fixture
def short_rows_on_xqa(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy leaves so little work to FA2, but the way to XQA is the same."""
    monkeypatch.setattr("engine.cuda.attention_plan.uses_xqa", lambda step, shape: True)


@pytest.mark.usefixtures("short_rows_on_xqa")
def test_decode_rows_on_xqa_find_their_pages_whatever_slots_they_have() -> None:
    lane = Lane()
    table = [*pages_of(4, 7, 3, 12), *pages_of(1, 9, 30), *pages_of(0, 1, 2, 5, 6)]
    assert lane.step({4: 40, 1: 32, 0: 33}, [], table) == ["xqa"]
    assert lane.step({0: 34, 4: 41}, [], []) == ["xqa"]
    # Row 4 begins anew on other pages.
    assert lane.step({4: 18, 1: 17}, [], pages_of(4, 20, 21)) == ["xqa"]
    assert lane.modules["xqa"].calls == 3 * LAYERS


@pytest.mark.usefixtures("short_rows_on_xqa")
def test_chunks_beside_decode_rows_on_xqa_have_a_plan_of_their_own() -> None:
    lane = Lane()
    table = [*pages_of(4, 7, 3, 12), *pages_of(1, 9, 30), *pages_of(2, 1, 2, 5)]
    assert lane.step({4: 40, 1: 32}, [Chunk(2, 10, [5] * 30, True)], table) == ["xqa", "fa3"]


def test_uneven_rows_and_a_lane_without_xqa_run_on_fa2() -> None:
    table = [*pages_of(4, *range(1, 13)), *pages_of(1, 20)]
    assert Lane().step({4: 190, 1: 3}, [], table) == ["fa2"]
    assert Lane(replace(CAPACITY, xqa=False)).step({4: 40, 1: 3}, [], table) == ["fa2"]


@pytest.mark.usefixtures("short_rows_on_xqa")
@pytest.mark.parametrize("fault", [faults.last_page_short, faults.two_pages_swapped, faults.page_of_another_row])
def test_a_fault_planted_in_the_page_lists_reaches_xqa(fault: faults.Fault) -> None:
    """`Lane.step` compares with attention over the changed lists, so without the fault in XQA they would differ."""
    lane = Lane()
    table = [*pages_of(4, 7, 3, 12), *pages_of(1, 9, 30)]
    assert lane.step({1: 31, 4: 40}, [], table) == ["xqa"]
    clean = lane.inputs.device["page_indices"][:5].tolist(), lane.inputs.device["last_page_len"][:2].tolist()
    with faults.planted(fault):
        assert lane.step({1: 31, 4: 40}, [], []) == ["xqa"]
    changed = lane.inputs.device["page_indices"][:5].tolist(), lane.inputs.device["last_page_len"][:2].tolist()
    assert changed != clean


@dataclass
class Spec:
    """Stands for FlashInfer's JIT spec."""

    is_aot: bool
    is_compiled: bool = False

    def build_and_load(self) -> str:
        return "module"


def use(monkeypatch: pytest.MonkeyPatch, prebuilt: set[str], nvcc: bool) -> ModuleNeeds:
    raw = replace(
        SUPPORTED["0.6.18.post1"], specs=lambda _: {name: Spec(name in prebuilt) for name in ("fa2", "fa3", "xqa")}
    )
    monkeypatch.setattr(module, "signatures", lambda version: raw)
    monkeypatch.setattr(module, "has_compiler", lambda environ: nvcc)
    return ModuleNeeds(128, 4, 16, "bfloat16", sm90=True, xqa=True)


def test_a_missing_xqa_module_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needs = use(monkeypatch, {"fa2", "fa3"}, nvcc=False)
    with caplog.at_level(logging.WARNING):
        assert set(load_modules(needs)) == {"fa2", "fa3"}
    assert len(caplog.messages) == 1
    assert "run on FA2 alone; `pagelane prebuild` compiles it ahead" in caplog.messages[0]


def test_other_missing_modules_are_named_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = use(monkeypatch, {"fa2"}, nvcc=False)
    with pytest.raises(FlashInferError, match=r"modules fa3 are not prebuilt.*`pagelane prebuild`"):
        load_modules(needs)


def test_what_compiles_is_told_with_its_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    needs = use(monkeypatch, {"fa2"}, nvcc=True)
    with caplog.at_level(logging.WARNING):
        assert set(load_modules(needs)) == {"fa2", "fa3", "xqa"}
    assert "compiling FlashInfer's modules fa3, xqa, about 530 s" in caplog.text


def test_a_compiler_is_looked_for_where_flashinfer_looks_for_it(tmp_path: Path) -> None:
    toolkit, empty = tmp_path / "cuda", tmp_path / "empty"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin" / "nvcc").touch(0o755)
    for environ in ({"CUDA_HOME": str(toolkit)}, {"CUDA_PATH": str(toolkit)}, {"PATH": str(toolkit / "bin")}):
        assert has_compiler(environ, empty)
    assert has_compiler({"PATH": str(empty)}, toolkit)
    assert not has_compiler({"PATH": str(empty)}, empty)
    # FlashInfer looks nowhere else once it is told where.
    assert not has_compiler({"CUDA_HOME": str(empty), "PATH": str(toolkit / "bin")}, toolkit)


def test_a_module_that_does_not_compile_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: Spec) -> str:
        raise RuntimeError("Ninja build failed.\n[1/2] nvcc ...\nx.cu(3): error: no kernel\nninja: stopped")

    monkeypatch.setattr(Spec, "build_and_load", fail)
    with pytest.raises(FlashInferError, match=r"^FlashInfer's module fa2 can .*: x.cu\(3\): error: no kernel; `pagel"):
        load_modules(use(monkeypatch, set(), nvcc=True))
