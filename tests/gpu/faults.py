"""Planted faults: each makes one thing wrong in one way, and the gate must go red for it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from engine.cuda import attention_plan
from engine.cuda.attention import FlashInferAttention
from engine.cuda.decoder import FusedOps
from engine.cuda.inputs import StepInputs
from engine.cuda.xqa import XqaDecode

Fault = Callable[[], AbstractContextManager[Any]]


@contextmanager
def _after_derive(change: Callable[[StepInputs, int], None]) -> Iterator[None]:
    """Change what the head of the step wrote. XQA, which reads the block table, is given the changed lists instead.

    Changes ask the device nothing, so that they may be captured in a graph.
    """
    right, run = StepInputs.derive, XqaDecode.run
    steps: list[StepInputs] = []

    def wrong(self: StepInputs, decode_rows: int) -> None:
        right(self, decode_rows)
        change(self, decode_rows)
        steps[:] = [self]

    def begin(self: XqaDecode, block_table: torch.Tensor, row_slots: torch.Tensor) -> None:
        device, rows = steps[0].device, len(row_slots)
        columns = torch.arange(block_table.shape[1], device=block_table.device)
        places = device["page_indptr"][:rows, None] + columns
        self._table[:rows] = device["page_indices"][places.clamp(max=len(device["page_indices"]) - 1)]

    def run_listed(self: XqaDecode, *call: Any) -> None:
        queries, kv, lengths, out, pdl = call
        device, rows, page_size = steps[0].device, len(lengths), kv[0].shape[1]
        pages = device["page_indptr"][: rows + 1].diff()
        run(self, queries, kv, (pages - 1) * page_size + device["last_page_len"][:rows], out, pdl)

    with (
        patch.object(StepInputs, "derive", wrong),
        patch.object(XqaDecode, "begin", begin),
        patch.object(XqaDecode, "run", run_listed),
    ):
        yield


def last_page_short() -> Any:
    """Every row's last page one token short, where it has more than one."""

    def change(inputs: StepInputs, _: int) -> None:
        last = inputs.device["last_page_len"]
        last.sub_((last > 1).int())

    return _after_derive(change)


def position_plus_one() -> Any:
    """Only for decode rows: a shift of every position would not show, since RoPE is relative."""
    return _after_derive(lambda inputs, decode_rows: inputs.device["positions"][:decode_rows].add_(1))


def two_pages_swapped() -> Any:
    """The first two pages of the first row with that many."""

    def change(inputs: StepInputs, _: int) -> None:
        ends, listed = inputs.device["page_indptr"][: inputs.rows + 1].long(), inputs.device["page_indices"]
        row = (ends.diff() > 2).int().argmax()
        first = ends.gather(0, row[None])
        second = first + (ends.diff().gather(0, row[None]) > 2)
        here, there = torch.cat((first, second)), torch.cat((second, first))
        listed[here] = listed[there]

    return _after_derive(change)


def page_of_another_row() -> Any:
    """The first page of every row is the step's first row's."""

    def change(inputs: StepInputs, _: int) -> None:
        listed = inputs.device["page_indices"]
        firsts = inputs.device["page_indptr"][: inputs.rows].long()
        listed[firsts] = listed[firsts.roll(1)]

    return _after_derive(change)


def no_q_norm() -> Any:
    """Queries keep their size; keys are normed."""
    right = FusedOps.__init__

    def wrong(self: FusedOps) -> None:
        right(self)
        append = self.rope_append
        self.rope_append = lambda *args, **rest: append(
            *args, **{**rest, "q_weight": torch.ones_like(rest["q_weight"])}
        )

    return patch.object(FusedOps, "__init__", wrong)


def wrong_group_map() -> Any:
    """Query head i asks KV head i % kv_heads instead of i // group."""
    right = FlashInferAttention.__call__

    def wrong(self: FlashInferAttention, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        tokens, heads, dim = queries.shape
        kv_heads = self._layers[0][0].shape[2]
        mixed = queries.view(tokens, heads // kv_heads, kv_heads, dim).transpose(1, 2).reshape(tokens, heads, dim)
        right(self, layer, mixed, out)
        out.copy_(out.view(tokens, kv_heads, heads // kv_heads, dim).transpose(1, 2).reshape(tokens, heads, dim))

    return patch.object(FlashInferAttention, "__call__", wrong)


def stale_plan() -> Any:
    """Steps of decode rows alone keep the decode plan of the last step that had chunks too."""
    right = FlashInferAttention.begin

    def wrong(self: FlashInferAttention, rows: attention_plan.StepRows, *bucket: Any, **how: Any) -> None:
        if not len(rows.chunk_tokens) and self.plans.current.decode is not None:
            self.plans.current = self.plans.current._replace(chunks=None)
        else:
            right(self, rows, *bucket, **how)

    return patch.object(FlashInferAttention, "begin", wrong)


def missing_merge() -> Any:
    """Split plans whose partial results are taken for results."""
    right = FlashInferAttention._run

    def wrong(self: FlashInferAttention, launch: attention_plan.Launch, layer: int, part: Any) -> None:
        info = [*launch.info[:-1], 0] if launch.kernel == "fa2" and launch.split else launch.info
        right(self, launch._replace(info=info), layer, part)

    return patch.object(FlashInferAttention, "_run", wrong)


FAULTS: tuple[Fault, ...] = (
    last_page_short,
    position_plus_one,
    two_pages_swapped,
    page_of_another_row,
    no_q_norm,
    wrong_group_map,
    stale_plan,
    missing_merge,
)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Compute wrongly meanwhile. Executors made before keep their right norms, so make them inside."""
    with fault():
        yield
