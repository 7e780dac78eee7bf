"""Where tensors of an arena lie: those that are used together never meet, those that are not share memory."""

import itertools
import random
from pathlib import Path

import pytest
import torch

from engine.cuda.arena import DeviceArena, Phase
from engine.cuda.decoder import CudaDecoder
from engine.cuda.executor import LOGITS_ROWS, reserve_logits
from engine.models.config import load_model_config
from engine.plan import ALIGNMENT, PlanCapacity
from tests.gpu.shaped import write_config

CPU = torch.device("cpu")
PHASES: tuple[Phase, ...] = ("attend", "mlp", "choose")


def test_tensors_that_are_used_together_never_overlap() -> None:
    draw = random.Random(7)
    for _ in range(200):
        arena, uses = DeviceArena(CPU), {}
        for number in range(draw.randint(1, 12)):
            phases = frozenset(draw.sample(PHASES, draw.randint(0, 3)))
            size = draw.randint(1, 3000)
            where = arena.during(*phases) if phases else arena
            where.reserve(str(number), (size,), torch.uint8)
            uses[str(number)] = phases or frozenset(PHASES)
        arena.allocate()
        begins = {name: arena.take(name).data_ptr() for name in uses}
        assert all((begin - min(begins.values())) % ALIGNMENT == 0 for begin in begins.values())
        for one, two in itertools.combinations(uses, 2):
            if uses[one] & uses[two]:
                first, last = sorted((one, two), key=lambda name: begins[name])
                assert begins[first] + arena.take(first).nbytes <= begins[last]
        ends = [begins[name] + arena.take(name).nbytes for name in uses]
        assert max(ends) - min(begins.values()) <= arena.nbytes < max(ends) - min(begins.values()) + ALIGNMENT


def test_the_size_does_not_depend_on_whether_what_is_kept_was_planned_first() -> None:
    sizes = []
    for kept_first in (True, False):
        arena = DeviceArena(CPU)
        if kept_first:
            arena.reserve("kept", (1024,), torch.uint8)
        arena.during("attend").reserve("a", (2048,), torch.uint8)
        if not kept_first:
            arena.reserve("kept", (1024,), torch.uint8)
        arena.during("choose").reserve("b", (4096,), torch.uint8)
        sizes.append((arena.nbytes, arena.kept_nbytes))
    assert sizes == [(5120, 1024)] * 2


def test_a_name_stands_once_and_before_the_memory_is_taken() -> None:
    arena = DeviceArena(CPU)
    arena.reserve("one", (3, 5), torch.int32)
    with pytest.raises(ValueError, match="'one' is reserved twice"):
        arena.during("mlp").reserve("one", (1,), torch.int32)
    with pytest.raises(ValueError, match="not allocated yet"):
        arena.take("one")
    arena.allocate()
    assert arena.take("one").shape == (3, 5)
    with pytest.raises(ValueError, match="after the arena was allocated"):
        arena.reserve("two", (1,), torch.int32)


def test_logits_lie_where_activations_did(tmp_path: Path) -> None:
    """Qwen3-4B's shape with 2048 tokens a step: 264 MiB, where one behind the other they were 432."""
    model = load_model_config(write_config("qwen3-4b", tmp_path))
    capacity = PlanCapacity(256, 2048, 8192, 16, model.heads, model.kv_heads, model.head_dim)
    arena = DeviceArena(CPU)
    CudaDecoder.reserve(arena, model, capacity.max_step_tokens, torch.bfloat16)
    reserve_logits(arena, capacity, model.vocab_size, model.hidden_size, torch.bfloat16)
    hidden, marks = 2048 * 2560 * 2, 257 * 151936 * 2
    logits = LOGITS_ROWS * 151936 * 4
    assert hidden + marks < arena.kept_nbytes < hidden + marks + (1 << 20)
    assert arena.kept_nbytes + logits < arena.nbytes < arena.kept_nbytes + logits + (32 << 20)
