"""XQA for decode rows: no plan, a dense page table with a row for each decode row of the step."""

from typing import Any

import torch
from torch import Tensor

from engine.cuda.device import views
from engine.cuda.flashinfer_raw import Signatures, XqaCall
from engine.cuda.layout import AttentionCapacity, AttentionLayout


class XqaDecode:
    """Runs XQA over the buffers of an `AttentionLayout` whose capacity has `xqa`; allocates nothing afterwards."""

    def __init__(self, capacity: AttentionCapacity, raw: Signatures, module: Any, arena: Tensor) -> None:
        buffers = views(arena, AttentionLayout(capacity))
        self._raw = raw
        self._module = module
        self._sm_count = capacity.sm_count
        self._table = buffers["xqa_page_table"]
        self._semaphores = buffers["xqa_semaphores"]
        self._scratch = buffers["xqa_scratch"]

    def begin(self, block_table: Tensor, row_slots: Tensor) -> None:
        """Take the page lists of the decode rows: rows `row_slots` (int32 `[rows]`) of the lane's block table."""
        torch.index_select(block_table, 0, row_slots, out=self._table[: len(row_slots)])

    def run(self, queries: Tensor, kv: tuple[Tensor, Tensor], lengths: Tensor, out: Tensor, pdl: bool) -> None:
        """Attend: `queries`, `out` `[rows, heads, head_dim]`; `kv` as in `PagedCall`; `lengths` int32 `[rows]`."""
        rows, (k, v) = len(queries), kv
        call = XqaCall(
            q=queries,
            k=k,
            v=v,
            page_table=self._table[:rows],
            lengths=lengths,
            out=out,
            semaphores=self._semaphores,
            scratch=self._scratch,
        )
        self._raw.run_xqa(self._module, call, self._sm_count, pdl)
