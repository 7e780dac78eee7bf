"""Refuses a step whose numbers would be bad indices, before anything of it is written."""

from collections.abc import Sequence

import numpy as np

from engine.plan import PlanCapacity, PlanError
from engine.step import StepPlan


def check_tokens(tokens: Sequence[int], vocab: int, where: str) -> None:
    """Raise `PlanError` if one of `tokens` is no index into the vocabulary."""
    if len(tokens):
        values = np.asarray(tokens)
        for token in (int(values.min()), int(values.max())):
            if not 0 <= token < vocab:
                raise PlanError(f"token id in {where}", token, vocab - 1)


def check_step_tokens(plan: StepPlan, vocab: int, capacity: PlanCapacity) -> None:
    """Raise `PlanError` for a token of a chunk, its targets or a row's context that is not of the vocabulary, for more
    targets than tokens, and for a history that is longer than any row.
    """
    for start in plan.starts:
        context = start.context
        if context is None:
            continue
        known = len(context.prompt) + len(context.outputs)
        if known > capacity.max_context:
            raise PlanError(f"history of row {start.row}", known, capacity.max_context)
        for tokens in (context.prompt, context.outputs, context.suppressed):
            check_tokens(tokens, vocab, f"the context of row {start.row}")
    for chunk in plan.chunks:
        if len(chunk.targets) > len(chunk.tokens):
            raise PlanError(f"targets in the chunk of row {chunk.row}", len(chunk.targets), len(chunk.tokens))
        for tokens in (chunk.tokens, chunk.targets):
            check_tokens(tokens, vocab, f"the chunk of row {chunk.row}")
