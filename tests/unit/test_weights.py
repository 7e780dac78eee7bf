"""Weights: what is read is what was written; what does not fit the configuration is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cuda.arena import DeviceArena
from engine.models.config import load_model_config
from engine.models.decoder import DecoderWeights, LayerWeights
from engine.models.families import FAMILIES
from engine.models.files import ModelError
from engine.models.placed import reserve_weights, take_weights
from engine.models.shapes import EMBEDDING, HEAD, weight_shapes
from engine.models.weights import dummy_weights, fill_dummy, fill_weights, load_weights, weight_bytes
from tests.models import tiny_model

CPU = torch.device("cpu")
NORM = "model.norm.weight"


@pytest.fixture
def model(tmp_path) -> Path:
    return tiny_model(tmp_path / "model")


def load(directory: Path, dtype: torch.dtype = torch.float32, progress=None):
    return load_weights(directory, load_model_config(directory), dtype, CPU, progress)


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def shard(directory: Path, names=("a.safetensors", "b.safetensors")) -> dict[str, str]:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    where = {name: names[index % 2] for index, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, directory / file)
    write_index(directory, where)
    return where


def write_index(directory: Path, where: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_transformers(tmp_path, family, tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = tiny_model(tmp_path, family, group=3, tied=tied)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).state_dict()
    shapes = weight_shapes(load_model_config(directory))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in theirs.items() if not (tied and name == HEAD)}


@pytest.mark.parametrize("sharded", [False, True])
def test_what_was_written_is_read(model, sharded):
    expected = load_file(model / "model.safetensors")
    if sharded:
        shard(model)
    found = load(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_outlive_their_file(model):
    expected = load_file(model / "model.safetensors")[NORM].clone()
    found = load(model)[NORM]
    with (model / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\0" * size)
    assert torch.equal(found, expected)


def test_tensors_are_converted(model):
    expected = load_file(model / "model.safetensors")[EMBEDDING]
    found = load(model, torch.bfloat16)
    assert torch.equal(found[EMBEDDING], expected.bfloat16())
    assert sum(t.nbytes for t in found.values()) == weight_bytes(load_model_config(model), torch.bfloat16)


def test_progress_rises_to_the_total(model):
    seen: list[tuple[int, int]] = []
    load(model, progress=lambda done, total: seen.append((done, total)))
    total = weight_bytes(load_model_config(model), torch.float32)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_a_tied_head_may_be_stored_and_is_not_read(tmp_path):
    directory = tiny_model(tmp_path, tied=True)
    rewrite(directory, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert HEAD not in load(directory)


def test_rotary_buffers_of_old_checkpoints_are_passed_over(model):
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load(model).keys() == weight_shapes(load_model_config(model)).keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), r"model.norm.weight is missing"),
        (lambda t: [t.pop(n) for n in list(t) if "mlp" in n], r"mlp.down_proj.weight.* and 3 more are missing"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(4)}), r"q_proj.bias is not expected"),
        (
            lambda t: t.update({NORM: torch.ones(63)}),
            r"model.norm.weight has shape \[63\], but config.json asks for \[64\]",
        ),
        (lambda t: t.update({NORM: torch.ones(64, dtype=torch.int32)}), r"model.norm.weight is of type I32; supported"),
        (lambda t: t.update({NORM: torch.ones(64).to(torch.float8_e4m3fn)}), r"is of type F8_E4M3; supported"),
    ],
)
def test_what_does_not_fit_the_configuration_is_named(model, change, message):
    rewrite(model, change)
    with pytest.raises(ModelError, match=message):
        load(model)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000])
def test_a_truncated_file_is_named_with_its_size(model, kept):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=rf"not a complete safetensors file \({kept} bytes\)"):
        load(model)


def test_no_weights_at_all(model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds model.safetensors or model.safetensors.index.json"):
        load(model)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "..", "a" * 300 + ".safetensors"]
)
def test_shards_stay_inside_the_directory(model, name):
    where = shard(model)
    write_index(model, dict.fromkeys(where, name))
    with pytest.raises(ModelError, match="is not a plain file name of at most 255 bytes"):
        load(model)


def test_a_link_out_of_the_directory_is_refused(model, tmp_path):
    shard(model)
    (model / "a.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (model / "a.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ModelError, match="outside the model directory"):
        load(model)


def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path):
    snapshot = tiny_model(tmp_path / "models--x" / "snapshots" / "abc")
    blob = tmp_path / "models--x" / "blobs" / "0123"
    blob.parent.mkdir()
    (snapshot / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert load(snapshot).keys() == weight_shapes(load_model_config(snapshot)).keys()


def test_an_index_that_is_wrong_about_its_shards(model):
    where = shard(model)
    (model / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b.safetensors: no such file"):
        load(model)
    write_index(model, dict.fromkeys(where, "a.safetensors"))
    with pytest.raises(ModelError, match=r"is listed in a.safetensors, but is not there"):
        load(model)


def test_a_tensor_in_two_shards(model):
    where = shard(model)
    save_file(load_file(model / "a.safetensors") | load_file(model / "b.safetensors"), model / "b.safetensors")
    write_index(model, where)
    with pytest.raises(ModelError, match=r"is listed in a.safetensors, but lies in b.safetensors too"):
        load(model)


def test_a_bias_that_is_missing_is_named(tmp_path):
    directory = tiny_model(tmp_path, "qwen2")
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn.k_proj.bias is missing"):
        load(directory)


def test_dummy_weights_depend_on_the_seed_alone(model):
    config = load_model_config(model)
    first, again = (dummy_weights(config, torch.bfloat16, CPU, seed=3) for _ in range(2))
    other = dummy_weights(config, torch.bfloat16, CPU, seed=4)
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == weight_shapes(config)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[EMBEDDING], other[EMBEDDING])
    assert all(tensor.isfinite().all() and tensor.dtype == torch.bfloat16 for tensor in first.values())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_read_into_place_are_those_that_are_joined_afterwards(tmp_path, family, tied):
    """One allocation of their sum, and every field equal."""
    directory = tiny_model(tmp_path, family, tied=tied)
    config = load_model_config(directory)
    joined = DecoderWeights.fuse(config, load_weights(directory, config, torch.bfloat16, CPU))
    arena = DeviceArena(CPU)
    reserve_weights(arena, config, torch.bfloat16)
    arena.allocate()
    placed = take_weights(arena, config)
    assert list(placed.parts) == list(weight_shapes(config))
    fill_weights(directory, config, placed.parts)
    pairs = [(joined.embedding, placed.weights.embedding), (joined.norm, placed.weights.norm)]
    pairs += [(joined.head, placed.weights.head)]
    for one, two in zip(joined.layers, placed.weights.layers, strict=True):
        pairs += [(getattr(one, field), getattr(two, field)) for field in LayerWeights.__slots__]
    for one, two in pairs:
        assert (one is None) is (two is None)
        assert one is None or torch.equal(one, two)
    assert (placed.weights.head is placed.weights.embedding) is tied
    assert placed.weights.nbytes == weight_bytes(config, torch.bfloat16) == joined.nbytes
    assert weight_bytes(config, torch.bfloat16) <= arena.nbytes < weight_bytes(config, torch.bfloat16) + 256 * 64


def test_a_damaged_checkpoint_writes_nothing_into_place(model):
    config = load_model_config(model)
    rewrite(model, lambda tensors: tensors.pop(NORM))
    targets = {name: torch.full(shape, 7.0) for name, shape in weight_shapes(config).items()}
    with pytest.raises(ModelError, match="missing"):
        fill_weights(model, config, targets)
    assert all(bool((target == 7).all()) for target in targets.values())


def test_dummy_weights_in_place_are_the_same_numbers(model):
    config = load_model_config(model)
    expected = dummy_weights(config, torch.bfloat16, CPU, seed=3)
    arena = DeviceArena(CPU)
    reserve_weights(arena, config, torch.bfloat16)
    arena.allocate()
    parts = take_weights(arena, config).parts
    fill_dummy(parts, seed=3)
    assert all(torch.equal(expected[name], parts[name]) for name in expected)
