"""`pagelane prebuild`: what a configuration needs, refusals, and the layout of the result. Nothing is compiled here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import CoreConfig
from engine.cuda import prebuild as module
from engine.cuda.flashinfer_raw import SUPPORTED, ModuleNeeds
from engine.cuda.prebuild import PrebuildConfig, PrebuildError, find_toolkit, needs_of, prebuild
from engine.models.config import load_model_config
from worker.cli import main


class FakeSpec:
    """Stands for FlashInfer's JIT spec; compiles to its own name."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.is_aot = False
        self.builds = 0
        self._library = folder / f"cache-{name}.so"

    def build(self, verbose: bool) -> None:
        self.builds += 1
        self._library.write_text(self.name)

    def get_library_path(self) -> Path:
        return self._library


@pytest.fixture
def nvcc(tmp_path: Path) -> dict[str, str]:
    """An environment whose CUDA_HOME has a compiler."""
    compiler = tmp_path / "cuda" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.touch(0o755)
    header = tmp_path / "cuda" / "include" / "cuda_runtime.h"
    header.parent.mkdir()
    header.touch()
    return {"CUDA_HOME": str(tmp_path / "cuda")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with nothing but Qwen3-14B's shape."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "max_position_embeddings": 40960,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def use(monkeypatch: pytest.MonkeyPatch, specs: dict[str, FakeSpec]) -> list[ModuleNeeds]:
    """Let FlashInfer be installed and have these modules; returns what they are asked for."""
    asked: list[ModuleNeeds] = []
    raw = replace(SUPPORTED["0.6.18.post1"], specs=lambda needs: asked.append(needs) or specs)
    monkeypatch.setattr(module, "installed_version", lambda: "0.6.18.post1")
    monkeypatch.setattr(module, "signatures", lambda version: raw)
    return asked


def test_modules_are_laid_out_as_flashinfer_wants_them_and_compiled_once(
    tmp_path: Path, model: Path, nvcc: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {name: FakeSpec(f"uri_{name}", tmp_path) for name in ("fa2", "fa3")}
    asked = use(monkeypatch, specs)
    config = PrebuildConfig(CoreConfig(model=str(model), kv_page_size=64), "9.0a", tmp_path / "out")
    said: list[str] = []
    for _ in range(2):
        modules = prebuild(config, nvcc, said.append)
    assert asked[0] == ModuleNeeds(head_dim=128, group=5, page_size=64, dtype="bfloat16", sm90=True, xqa=True)
    assert [path.relative_to(tmp_path / "out").as_posix() for path in modules] == [
        "uri_fa2/uri_fa2.so",
        "uri_fa3/uri_fa3.so",
    ]
    assert [spec.builds for spec in specs.values()] == [1, 1]
    assert nvcc["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert set(manifest) == {"uri_fa2", "uri_fa3"}
    assert manifest["uri_fa2"]["bytes"] == len("uri_fa2")
    assert not list((tmp_path / "out").rglob("*.part"))
    assert any(line.startswith("fa3: ") for line in said)


@pytest.mark.parametrize("among", ["the result", "FlashInfer's prebuilt modules"])
def test_a_module_made_for_other_cards_is_not_taken_for_one_of_these(
    tmp_path: Path, model: Path, nvcc: dict[str, str], monkeypatch: pytest.MonkeyPatch, among: str
) -> None:
    spec = FakeSpec("uri_fa2", tmp_path)
    use(monkeypatch, {"fa2": spec})
    first, core = tmp_path / "first", CoreConfig(model=str(model))
    prebuild(PrebuildConfig(core, "9.0a", first), nvcc, print)
    if among != "the result":
        spec.is_aot, spec._library = True, first / "uri_fa2" / "uri_fa2.so"
    out = first if among == "the result" else tmp_path / "second"
    with pytest.raises(PrebuildError, match=r"uri_fa2 was made for arch 9.0a, but is wanted for 8.0: .* --out"):
        prebuild(PrebuildConfig(core, "8.0", out), nvcc, print)
    assert json.loads((first / "manifest.json").read_text())["uri_fa2"]["arch"] == "9.0a"
    assert not (tmp_path / "second").exists()
    assert spec.builds == 1


def test_an_interrupted_run_leaves_what_it_has_made_in_the_manifest(
    tmp_path: Path, model: Path, nvcc: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(FakeSpec):
        def build(self, verbose: bool) -> None:
            raise KeyboardInterrupt

    use(monkeypatch, {"fa2": FakeSpec("uri_fa2", tmp_path), "fa3": Interrupted("uri_fa3", tmp_path)})
    with pytest.raises(KeyboardInterrupt):
        prebuild(PrebuildConfig(CoreConfig(model=str(model)), "9.0a", tmp_path / "out"), nvcc, print)
    manifest = tmp_path / "out" / "manifest.json"
    assert set(json.loads(manifest.read_text())) == {"uri_fa2"}
    manifest.write_text("{")
    with pytest.raises(PrebuildError, match=f"{manifest} cannot be read: .*; remove it"):
        prebuild(PrebuildConfig(CoreConfig(model=str(model)), "9.0a", tmp_path / "out"), nvcc, print)


def test_a_missing_compiler_is_named_before_anything_is_compiled(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = use(monkeypatch, {})
    config = PrebuildConfig(CoreConfig(model=str(model)), "9.0a", tmp_path)
    with pytest.raises(PrebuildError, match=f"no CUDA toolkit .* in {tmp_path}: install it, or set CUDA_HOME"):
        prebuild(config, {"CUDA_HOME": str(tmp_path)}, print)
    assert not asked


def test_the_toolkit_is_found_around_a_compiler_that_is_a_link(tmp_path: Path, nvcc: dict[str, str]) -> None:
    toolkit, folder = Path(nvcc["CUDA_HOME"]), tmp_path / "bin"
    folder.mkdir()
    (folder / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    assert find_toolkit(nvcc) == toolkit
    assert find_toolkit({"PATH": str(folder)}, default=tmp_path) == toolkit
    assert find_toolkit({"PATH": ""}, default=toolkit) == toolkit
    with pytest.raises(PrebuildError, match="no CUDA toolkit"):
        find_toolkit({"PATH": ""}, default=folder)


def test_what_does_not_compile_is_told_in_one_line(
    tmp_path: Path, model: Path, nvcc: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FakeSpec):
        def build(self, verbose: bool) -> None:
            raise RuntimeError("Ninja build failed.\n[1/2] nvcc ...\n/usr/bin/ld: cannot find -lcuda\nninja: stopped")

    use(monkeypatch, {"fa2": Failing("uri", tmp_path)})
    with pytest.raises(PrebuildError, match=r"^uri does not compile: /usr/bin/ld: cannot find -lcuda$"):
        prebuild(PrebuildConfig(CoreConfig(model=str(model)), "9.0a", tmp_path / "out"), nvcc, print)
    assert not list((tmp_path / "out").rglob("*.so"))


def test_needs_follow_model_and_architecture(model: Path) -> None:
    shape, core = load_model_config(model), CoreConfig(model=str(model))
    ampere = needs_of(shape, core, "8.0")
    assert (ampere.sm90, ampere.xqa, ampere.page_size) == (False, False, 16)
    odd = needs_of(replace(shape, heads=56), CoreConfig(model=str(model), dtype="float16"), "9.0a")
    assert (odd.sm90, odd.xqa, odd.dtype) == (True, False, "float16")
    small = needs_of(replace(shape, heads=9, kv_heads=3, head_dim=64), core, "9.0a")
    assert small == ModuleNeeds(head_dim=64, group=3, page_size=16, dtype="bfloat16", sm90=True, xqa=False)
    for arch in ("sm_90", "9", "9.0a 8.0", ""):
        with pytest.raises(PrebuildError, match="must be one architecture"):
            needs_of(shape, core, arch)
    with pytest.raises(PrebuildError, match="dtype is float32"):
        needs_of(shape, CoreConfig(model=str(model), dtype="float32"), "9.0a")


def test_the_command_refuses_without_flashinfer_and_names_the_extra(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "installed_version", lambda: None)
    assert main(["prebuild", "--model", str(model)]) == 1
    assert "pagelane[cuda]" in capsys.readouterr().err
    assert main(["prebuild", "--model", str(model), "--arch"]) == 2
    assert "--arch needs a value" in capsys.readouterr().err
    assert main(["prebuild", "--help"]) == 0
    assert "--out DIR" in capsys.readouterr().out
    assert main(["prebuild"]) == 2
