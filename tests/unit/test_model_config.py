"""config.json: what is read, and that everything else is refused by name."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import load_model_config
from engine.models.files import ModelError
from engine.models.rope_config import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "sliding_window": None}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def load(directory: Path, config: dict[str, Any]):
    (directory / "config.json").write_text(json.dumps(config))
    return load_model_config(directory)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_is_read(tmp_path):
    config = load(tmp_path, LLAMA)
    assert (config.architecture, config.layers, config.heads, config.kv_heads, config.group) == ("llama", 3, 6, 2, 3)
    assert (config.head_dim, config.context_limit, config.dtype, config.tied) == (16, 4096, "bfloat16", False)
    assert not config.qk_norm
    assert config.rope == RopeConfig(theta=500000.0)


def test_qwen3_has_a_head_dimension_of_its_own_and_norms_queries_and_keys(tmp_path):
    config = load(tmp_path, QWEN3)
    assert (config.head_dim, config.qk_norm) == (32, True)
    assert load(tmp_path, without(QWEN3, "head_dim")).head_dim == 128


def test_missing_kv_heads_mean_one_per_query_head_in_llama_only(tmp_path):
    assert load(tmp_path, without(LLAMA, "num_key_value_heads")).kv_heads == 6
    with pytest.raises(ModelError, match="num_key_value_heads is missing"):
        load(tmp_path, without(QWEN3, "num_key_value_heads"))


QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 1024}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
SEED = LLAMA | {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_out_bias": False}


def test_qwen2_has_a_bias_and_a_head_dimension_that_follows_from_its_heads(tmp_path):
    for attention_bias in ({}, {"attention_bias": True}, {"attention_bias": False}):
        config = load(tmp_path, QWEN2 | attention_bias)
        assert (config.architecture, config.head_dim, config.qkv_bias, config.qk_norm) == ("qwen2", 16, True, False)
    assert load(tmp_path, QWEN2 | {"head_dim": 32}).head_dim == 32
    with pytest.raises(ModelError, match="num_key_value_heads is missing"):
        load(tmp_path, without(QWEN2, "num_key_value_heads"))


def test_the_bias_of_seed_oss_is_a_matter_of_its_configuration(tmp_path):
    assert load(tmp_path, SEED).qkv_bias
    assert load(tmp_path, SEED).head_dim == 128
    assert load(tmp_path, SEED | {"attention_bias": True}).qkv_bias
    assert not load(tmp_path, SEED | {"attention_bias": False}).qkv_bias


@pytest.mark.parametrize(
    "window",
    [
        {"sliding_window": None},
        {"sliding_window": 4096},
        {"sliding_window": 1024, "use_sliding_window": False},
        {"sliding_window": 1024, "max_position_embeddings": 1024},
    ],
)
def test_mistral_is_served_where_its_window_hides_nothing(tmp_path, window):
    config = load(tmp_path, MISTRAL | window)
    assert (config.architecture, config.qkv_bias, config.head_dim) == ("mistral", False, 16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MISTRAL | {"sliding_window": 1024}, r"sliding_window is 1024 tokens and max_position_embeddings is 4096"),
        (
            without(MISTRAL, "sliding_window") | {"max_position_embeddings": 32768},
            r"sliding_window defaults to 4096 tokens and max_position_embeddings is 32768",
        ),
        (QWEN2 | {"use_sliding_window": True}, r"sliding_window is 1024 tokens .* full attention only: take a release"),
        (MISTRAL | {"attention_bias": True}, r"attention_bias is true; supported: false"),
    ],
)
def test_a_window_that_hides_something_is_refused_with_the_way_out(tmp_path, config, message):
    with pytest.raises(ModelError, match=message):
        load(tmp_path, config)


def test_model_type_suffices_without_architectures(tmp_path):
    assert load(tmp_path, without(QWEN3, "architectures")).architecture == "qwen3"


def test_keys_that_change_nothing_are_ignored(tmp_path):
    harmless = {"_name_or_path": "x", "transformers_version": "4", "initializer_range": 0.02, "use_cache": True}
    assert load(tmp_path, LLAMA | harmless) == load(tmp_path, LLAMA)


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_old_and_new_rope_parameters_read_the_same(tmp_path, kind_key):
    scaling = without(LLAMA3_SCALING, "rope_type") | {kind_key: "llama3"}
    old = load(tmp_path, LLAMA | {"rope_scaling": scaling})
    new = load(tmp_path, without(LLAMA, "rope_theta") | {"rope_parameters": scaling | {"rope_theta": 500000.0}})
    both = load(tmp_path, LLAMA | {"rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": 500000.0}})
    assert old == new == both
    assert old.rope == RopeConfig(
        theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=1024
    )


def test_theta_defaults_and_integers_are_numbers_too(tmp_path):
    assert load(tmp_path, without(LLAMA, "rope_theta")).rope.theta == 10000.0
    assert load(tmp_path, LLAMA | {"rope_theta": 1000000}).rope.theta == 1e6


def test_yarn_extends_the_context_limit(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    config = load(tmp_path, LLAMA | {"rope_scaling": yarn})
    assert config.context_limit == 8192
    assert (config.rope.beta_fast, config.rope.beta_slow, config.rope.truncate) == (32.0, 1.0, True)
    assert (
        load(tmp_path, LLAMA | {"rope_scaling": without(yarn, "original_max_position_embeddings")}).context_limit
        == 4096
    )


REFUSED = [
    ({"architectures": ["MixtralForCausalLM"]}, r"MixtralForCausalLM.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForC"),
    ({"architectures": None, "model_type": "gemma3"}, r"gemma3.*supported: LlamaForCausalLM"),
    ({"model_type": "qwen3"}, r"model_type is 'qwen3'; they must agree"),
    ({"attention_bias": True}, r"attention_bias is true; supported: false"),
    ({"mlp_bias": True}, r"mlp_bias is true; supported: false"),
    ({"hidden_act": "gelu"}, r'hidden_act is "gelu"; supported: "silu"'),
    ({"architectures": [["LlamaForCausalLM"]]}, r"which Pagelane does not serve"),
    ({"architectures": {"LlamaForCausalLM": 1}}, r"which Pagelane does not serve"),
    ({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, r"which Pagelane does not serve"),
    ({"attention_out_bias": True}, r"attention_out_bias is true; supported: false"),
    ({"hidden_size": 6 * 1026}, r"head_dim, hidden_size 6156 / num_attention_heads 6, is 1026, but .* at most 1024"),
    (
        {"use_sliding_window": True, "sliding_window": 1024},
        r"sliding_window is 1024 tokens and max_position_embeddings is 4096, .* set max_position_embeddings to 1024",
    ),
    ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types has sliding_attention; .*full_attention"),
    ({"quantization_config": {"quant_method": "fp8"}}, r"quant_method is 'fp8'; supported"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5; supported: 1.0"),
    ({"pretraining_tp": 2}, r"pretraining_tp is 2; supported: 1"),
    ({"torch_dtype": "float8_e4m3fn"}, r"float8_e4m3fn.*float32, bfloat16, float16"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"'dynamic'; supported: default, linear, llama3, yarn"),
    ({"rope_scaling": {"rope_type": "longrope"}}, r"'longrope'; supported"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, r"unknown field `mrope_section`.*rope_scaling"),
    ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling.factor is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, r"rope_scaling.factor is 0.5"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, r"Expected `float \| null`, got `str`.*factor"),
    ({"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1.0}}, r"high_freq_factor is 1.0, .* low_freq_factor 1.0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, r"is 10000.0, but rope_theta is 500000.0"),
    ({"rope_scaling": {"rope_type": "default", "a\nb": 1}}, r"unknown field `a b`"),
    ({"layer_types": ["a\r\nb"]}, r"layer_types has a b"),
    ({"vocab_size": 0}, r"vocab_size is 0, but must be between 1 and \d+"),
    ({"num_hidden_layers": 100000}, r"num_hidden_layers is 100000, but must be between 1 and 1024"),
    ({"hidden_size": -64}, r"hidden_size is -64"),
    ({"vocab_size": "1000"}, r"Expected `int`, got `str` - at `\$.vocab_size`"),
    ({"vocab_size": True}, r"Expected `int`, got `bool`"),
    ({"num_key_value_heads": 4}, r"num_attention_heads is 6, which is no multiple of num_key_value_heads 4"),
    ({"head_dim": 15}, r"head_dim is 15, but must be even"),
    ({"hidden_size": 100}, r"hidden_size 100 is no multiple of num_attention_heads 6"),
    ({"rms_norm_eps": 0.0}, r"rms_norm_eps is 0.0"),
]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
BEYOND = [
    *[({"rope_theta": value}, "rope_theta") for value in (0, 1, 1.0, -5.0, 1e300, 10**400)],
    *[({"rope_parameters": {"rope_theta": value}}, "rope_theta") for value in (True, "x", 1, 10**400)],
    *[({"rope_scaling": YARN | {"attention_factor": value}}, "attention_factor") for value in (-5, 0, 1e39)],
    *[({"rope_scaling": YARN | {"factor": value}}, "factor") for value in (-1, 0.5, 1e308)],
    *[({"rope_scaling": YARN | {"beta_fast": value}}, "beta_fast") for value in (-1, 1e-308, 1e308)],
    *[({"rope_scaling": YARN | {"beta_slow": value}}, "beta_slow") for value in (-1, 1e-308)],
    ({"rope_scaling": YARN | {"original_max_position_embeddings": 1 << 40}}, "original_max_position_embeddings"),
    # 0.1 * mscale_all_dim * log(4) + 1 is zero.
    ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": -10 / math.log(4)}}, "mscale_all_dim"),
    ({"rope_scaling": YARN | {"mscale": 1e39, "mscale_all_dim": 1.0}}, "mscale"),
    ({"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 1e-308}}, "low_freq_factor"),
    ({"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1e308}}, "high_freq_factor"),
]


@pytest.mark.parametrize(("change", "field"), BEYOND)
def test_rope_parameters_beyond_their_bounds_are_refused_by_name(tmp_path, change, field):
    base = LLAMA if "rope_parameters" not in change else without(LLAMA, "rope_theta")
    with pytest.raises(ModelError, match=rf"{field} is .* between \S+ and |(out of range|Expected).*{field}") as caught:
        load(tmp_path, base | change)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path, LLAMA | change)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


def test_differing_rope_spellings_are_refused(tmp_path):
    linear = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ModelError, match="both present and differ"):
        load(tmp_path, LLAMA | {"rope_scaling": linear, "rope_parameters": linear | {"factor": 4.0}})


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"config.json: cannot be read: No such file"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: .*truncated"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"vocab_size": \xff}')
    with pytest.raises(ModelError, match=r"config.json: "):
        load_model_config(tmp_path)


def test_what_the_worker_imports_loads_no_torch():
    program = (
        "import sys, engine.models.config, engine.models.resolve, engine.models.shapes\n"
        "sys.exit(', '.join({'torch', 'transformers', 'gguf', 'tokenizers', 'llm'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
