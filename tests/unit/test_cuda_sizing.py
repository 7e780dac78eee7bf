"""Sizes of a CUDA lane before it is built, against the tensors of one that is."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import CoreConfig
from engine.cuda.lane import CudaBuild, prepare
from engine.cuda.sizing import Card, design_lane, lane_sizes
from engine.models.config import ModelConfig, load_model_config
from engine.models.shapes import weight_shapes
from engine.models.weights import fill_dummy
from tests.fake_gpu import MIB, FakeGpu, stand_in
from tests.gpu.shaped import write_config
from tests.models import tiny_model

H200 = Card("NVIDIA H200", 132, (9, 0), 150_109_880_320)
SHAPES: list[dict[str, Any]] = [
    {"family": "qwen3", "tied": True},
    {"family": "qwen2", "tied": False, "vocab": 333},
    {"family": "llama", "group": 3, "kv_heads": 1, "layers": 3},
]

STEPS = [
    {"max_bucket": 4, "max_step_tokens": 64, "context_limit": 256},
    {"max_bucket": 7, "max_step_tokens": 300, "context_limit": 1000},
    {"max_bucket": 1, "max_step_tokens": 1, "context_limit": 17},
]


def config(**values: Any) -> CoreConfig:
    return CoreConfig(model="m", **values)


def built(directory: Path, values: CoreConfig, sm_count: int) -> CudaBuild:
    gpu = FakeGpu(512 * MIB, sm_count=sm_count)
    return prepare(values, load_model_config(directory), torch.float32, gpu, lambda model, parts: fill_dummy(parts))


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors, each allocation once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def weight_tensors(build: CudaBuild) -> list[torch.Tensor]:
    weights = build.weights
    layers = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    return [weights.embedding, weights.norm, weights.head, *(tensor for tensor in layers if tensor is not None)]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["family"])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_every_size_is_what_the_lane_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_size: int, shape: dict[str, Any], step: dict[str, int]
) -> None:
    stand_in(monkeypatch)
    directory = tiny_model(tmp_path / "model", **shape)
    values = config(**step, kv_page_size=page_size)
    for sm_count in (1, 33):
        check(built(directory, values, sm_count), values)


def check(build: CudaBuild, values: CoreConfig) -> None:
    executor = build.executor(build.cache(2))
    sizes = lane_sizes(values, build.model, torch.float32, build.gpu.card)
    assert sizes.weights == storage_bytes(weight_tensors(build))
    assert sizes.rope_table == build.cos_sin.nbytes
    assert sizes.plan_arena == build.inputs.nbytes + build.plan_arena.nbytes
    small = [*build.inputs.staged.values(), *build.inputs.device.values(), build.plan_arena, build.cos_sin]
    assert 0 <= storage_bytes(small) - sizes.plan_arena - sizes.rope_table < 256, "one allocation, and its rounding"
    held = [executor._logits, executor._results, executor._bucket_results, executor._sums]
    assert sizes.activations == storage_bytes([build.arena.take("hidden"), build.arena.take("gate_up"), *held])
    assert sizes.total == sizes.weights + sizes.rope_table + sizes.plan_arena + sizes.activations


def test_what_an_h200_took_for_qwen3_4b(tmp_path: Path) -> None:
    """Measured: tests/gpu/results/smoke.jsonl at 54283d4."""
    model = load_model_config(write_config("qwen3-4b", tmp_path))
    sizes = lane_sizes(config(max_bucket=256, max_step_tokens=2048, context_limit=8192), model, torch.bfloat16, H200)
    assert (sizes.weights, sizes.rope_table, sizes.plan_arena) == (8_044_936_192, 4_194_816, 14_441_472)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["family"])
def test_weights_are_the_parameters_and_less_than_a_vector_for_each_tensor(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    model = load_model_config(tiny_model(tmp_path, **shape))
    shapes = weight_shapes(model)
    exact = sum(2 * math.prod(size) for size in shapes.values())
    sizes = lane_sizes(config(max_bucket=1), model, torch.bfloat16, H200)
    assert exact <= sizes.weights < exact + 256 * len(shapes)


def test_planning_allocates_nothing(tmp_path: Path) -> None:
    model = load_model_config(write_config("qwen3-14b", tmp_path))
    design = design_lane(config(max_bucket=256, max_step_tokens=8192), model, torch.bfloat16, H200)
    assert design.sizes.total > 20 << 30
    with pytest.raises(ValueError, match="not allocated yet"):
        design.weights.take("model.norm.weight")


KNOBS = {"max_bucket": (1, 64), "max_step_tokens": (64, 4096), "context_limit": (2, 2048)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_model_config(tiny_model(tmp_path_factory.mktemp("model"), "qwen3"))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_setting_that_grows_makes_a_part_shrink(model: ModelConfig, data: st.DataObject) -> None:
    low = {name: data.draw(st.integers(*bounds), name) for name, bounds in KNOBS.items()}
    high = {name: data.draw(st.integers(low[name], bounds[1]), name) for name, bounds in KNOBS.items()}
    sms = data.draw(st.integers(1, 200))
    card = Card("a card", sms, (9, 0), 1 << 40)
    less, more = (lane_sizes(config(**values), model, torch.bfloat16, card) for values in (low, high))
    assert less.weights == more.weights
    for name in ("rope_table", "plan_arena", "activations"):
        assert getattr(less, name) <= getattr(more, name)
