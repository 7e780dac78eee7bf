"""Rotary frequencies equal transformers' to the last bit."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.models.config import load_model_config
from engine.models.files import ModelError
from engine.models.rope import attention_factor, inverse_frequencies, rope_table
from engine.models.rope_config import RopeConfig
from tests.models import ROPES, tiny_model

CASES = [
    *ROPES.values(),
    {"rope_type": "default", "rope_theta": 1000000.0},
    ROPES["llama3"] | {"factor": 32.0, "original_max_position_embeddings": 1024},
    ROPES["yarn"] | {"beta_fast": 16.0, "beta_slow": 2.0},
    ROPES["yarn"] | {"mscale": 0.707, "mscale_all_dim": 1.0},
    ROPES["yarn"] | {"attention_factor": 1.25, "truncate": False},
    ROPES["yarn"] | {"rope_theta": 1000000.0, "factor": 1.0},
]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("rope", CASES, ids=str)
def test_frequencies_and_table_are_those_of_transformers(tmp_path, rope, head_dim):
    config = load_model_config(tiny_model(tmp_path, kv_heads=1, head_dim=head_dim, rope=rope))
    reference = LlamaRotaryEmbedding(LlamaConfig(**json.loads((tmp_path / "config.json").read_text())))
    assert torch.equal(inverse_frequencies(config.rope, head_dim), reference.inv_freq)
    assert attention_factor(config.rope) == reference.attention_scaling
    cos, sin = rope_table(config)
    expected = reference(torch.zeros(1), torch.arange(config.context_limit + 1)[None])
    assert cos.shape == sin.shape == (config.context_limit + 1, head_dim)
    assert torch.equal(cos, expected[0][0])
    assert torch.equal(sin, expected[1][0])


def test_every_scaling_changes_the_frequencies():
    plain = inverse_frequencies(RopeConfig(), 64)
    llama3 = RopeConfig(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=256)
    yarn = RopeConfig(kind="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, original_context=512)
    for rope in (RopeConfig(kind="linear", factor=4.0), llama3, yarn):
        assert not torch.allclose(inverse_frequencies(rope, 64), plain)


def test_a_hand_made_config_without_its_factor_is_refused():
    with pytest.raises(ValueError, match="lacks a field"):
        inverse_frequencies(RopeConfig(kind="linear"), 64)


@pytest.mark.parametrize("rope", [{"theta": 2.0}, {"theta": 1e15}], ids=str)
@pytest.mark.parametrize(
    "scaling",
    [
        {"beta_fast": 1e6, "beta_slow": 1e-3, "original_context": 1},
        {"beta_fast": 1e-3, "beta_slow": 1e-3, "original_context": 1 << 27, "truncate": False},
        {"beta_fast": 32.0, "beta_slow": 1.0, "original_context": 512, "mscale": 1e3, "mscale_all_dim": 1e-300},
        {"beta_fast": 32.0, "beta_slow": 1.0, "original_context": 512, "attention_factor": 1e3},
    ],
    ids=str,
)
@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_tables_at_the_bounds_of_yarn_are_finite(tmp_path, rope, scaling, factor):
    config = load_model_config(tiny_model(tmp_path))
    extreme = replace(config, rope=RopeConfig(kind="yarn", factor=factor, **rope, **scaling))
    assert all(bool(table.isfinite().all()) for table in rope_table(extreme, 1000))


@pytest.mark.parametrize("attention", [1e39, float("nan")])
def test_a_table_that_is_not_finite_is_refused(tmp_path, attention):
    config = load_model_config(tiny_model(tmp_path, rope="yarn"))
    with pytest.raises(ModelError, match=r"rotary table of 9 positions is not finite .*yarn"):
        rope_table(replace(config, rope=replace(config.rope, attention_factor=attention)), 9)
