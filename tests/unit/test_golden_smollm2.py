"""The golden gate on real weights: SmolLM2-135M-Instruct as `pagelane import` writes it, float32."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.cpu.lane import CpuLane
from engine.models.demo import demo_model_path
from engine.models.gguf_import import cached_import
from tests import golden

QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n" * 4


@pytest.fixture(scope="module")
def directory() -> Path:
    return cached_import(demo_model_path())


def smollm2_lane(directory: Path, page_size: int = 16) -> CpuLane:
    return golden.lane(directory, page_size, kv_cache_memory="64MiB", context_limit=1024)


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[golden.Reference]:
    """Verified against our own text, which costs transformers one pass instead of 64."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in (QUESTION, CODE)]
    driver = golden.Driver(smollm2_lane(directory))
    rows = [driver.start(slot) for slot in range(2)]
    driver.step(chunks=[(row, prompt, True) for row, prompt in zip(rows, prompts, strict=True)])
    for _ in range(golden.TOKENS - 1):
        driver.step(rows)
    model = golden.reference_model(directory)
    return [golden.reference(model, prompt, draft=row.tokens) for row, prompt in zip(rows, prompts, strict=True)]


def test_64_tokens_chunked_and_batched(directory: Path, expected: list[golden.Reference]) -> None:
    golden.check_batched(smollm2_lane(directory), expected, chunk=16)


def test_warm_at_page_64(directory: Path, expected: list[golden.Reference]) -> None:
    golden.check_warm(smollm2_lane(directory, 64), expected[1].first(24))


def test_the_capital_of_france_is_paris(directory: Path, expected: list[golden.Reference]) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert "Paris" in tokenizer.decode(expected[0].tokens)


def test_the_gate_is_red_for_real_weights_too(
    directory: Path, expected: list[golden.Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.nn.functional.rms_norm
    lane = smollm2_lane(directory)
    monkeypatch.setattr(
        "engine.models.decoder.F.rms_norm",
        lambda inputs, shape, weight, eps: right(inputs, shape, weight, eps * 10),
    )
    with pytest.raises(golden.GateError):
        golden.check_cold(lane, expected[1].first(4))
