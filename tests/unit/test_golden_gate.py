"""The golden gate on tiny random models, and proof that it goes red for the faults it is there to catch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from engine.cpu import attention, inputs
from engine.models import decoder
from engine.models.config import ModelConfig, load_model_config
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES, Architecture
from tests import golden
from tests.models import ROPES, tiny_model

GROUPS = (1, 2, 3, 4, 5, 6, 8)
PROMPTS = (150, 37, 81)


class Case(NamedTuple):
    family: Architecture
    group: int
    tied: bool
    rope: str
    page_size: int
    head_dim_given: bool = True


CASES = [
    Case(family, group, (turn + shift) % 2 == 0, list(ROPES)[(turn + 2 * shift) % 4], (16, 64)[(turn // 2 + shift) % 2])
    for shift, family in enumerate(("llama", "qwen3"))
    for turn, group in enumerate(GROUPS)
] + [
    Case(family, group, tied, rope, page_size, given)
    for family, groups in (("mistral", (1, 3, 4, 5)), ("qwen2", (6, 7, 2, 1)), ("seed_oss", (5, 2, 8, 3)))
    for group, (tied, rope, page_size, given) in zip(
        groups,
        (
            (False, "default", 16, True),
            (True, "yarn", 64, family == "seed_oss"),
            (False, "llama3", 64, True),
            (True, "linear", 16, True),
        ),
        strict=True,
    )
]
"""Every family; head, RoPE scaling, page size and a head_dim that is derived rotate so that each meets each of them."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """These products are far too small to share between threads."""
    torch.set_num_threads(1)


def prompts(vocab: int = 320) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(5, vocab, count).tolist() for count in PROMPTS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_tokens_and_logits_are_those_of_transformers(tmp_path: Path, case: Case) -> None:
    directory = tiny_model(
        tmp_path / "model",
        case.family,
        group=case.group,
        tied=case.tied,
        rope=case.rope,
        head_dim_given=case.head_dim_given,
    )
    model = golden.reference_model(directory)
    expected = [golden.reference(model, prompt) for prompt in prompts()]
    lane = golden.lane(directory, case.page_size)
    golden.check_cold(lane, expected[0])
    golden.check_warm(lane, expected[0])
    golden.check_batched(lane, expected, chunk=64)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[golden.Reference]]:
    directory = tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", group=3, rope="yarn")
    model = golden.reference_model(directory)
    return directory, [golden.reference(model, prompt) for prompt in prompts()]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("chunk", [7, 16, 64, 1000])
def test_chunks_of_any_size_give_the_same(
    qwen3: tuple[Path, list[golden.Reference]], chunk: int, page_size: int
) -> None:
    directory, expected = qwen3
    lane = golden.lane(directory, page_size)
    golden.check_cold(lane, expected[0], chunk)
    golden.check_batched(lane, expected, chunk)


def test_a_long_text_stays_right_past_256_tokens_and_many_pages(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "model", "llama", group=4, rope="llama3")
    prompt = np.random.default_rng(3).integers(5, 320, 600).tolist()
    expected = golden.reference(golden.reference_model(directory), prompt, 96)
    golden.check_cold(golden.lane(directory), expected, chunk=256)
    golden.check_warm(golden.lane(directory), expected)


# Planted faults. Each replaces one function of the computation by one that is wrong in one way.


def last_page_short(monkeypatch: pytest.MonkeyPatch) -> None:
    right = inputs.page_counts

    def wrong(lengths: inputs.Array, page_size: int) -> tuple[inputs.Array, inputs.Array]:
        pages, last = right(lengths, page_size)
        return pages, last - 1

    monkeypatch.setattr(inputs, "page_counts", wrong)


def position_plus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for decode rows: a shift of every position would not show, since RoPE is relative."""
    right = inputs.token_positions
    monkeypatch.setattr(inputs, "token_positions", lambda first, count: right(first + (count == 1), count))


def two_pages_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = inputs.row_pages

    def wrong(table: inputs.Array, slot: int, pages: int) -> inputs.Array:
        listed = right(table, slot, pages).copy()
        listed[:2] = listed[:2][::-1]
        return listed

    monkeypatch.setattr(inputs, "row_pages", wrong)


def page_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = inputs.row_pages

    def wrong(table: inputs.Array, slot: int, pages: int) -> inputs.Array:
        listed = right(table, slot, pages).copy()
        listed[0] = table[slot - 1, 0] or listed[0]
        return listed

    monkeypatch.setattr(inputs, "row_pages", wrong)


def no_q_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Decoder._normalise_heads

    def wrong(self: Decoder, layer: object, queries: torch.Tensor, keys: torch.Tensor) -> None:
        right(self, layer, queries.clone(), keys)

    monkeypatch.setattr(Decoder, "_normalise_heads", wrong)


def wrong_group_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query head i asks KV head i % kv_heads instead of i // group."""
    right = attention.PagedAttention.__call__

    def wrong(
        self: attention.PagedAttention, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        tokens, heads, head_dim = queries.shape
        kv_heads = keys.shape[1]
        shuffled = queries.view(tokens, heads // kv_heads, kv_heads, head_dim).transpose(1, 2).flatten(1, 2)
        out = right(self, layer, shuffled, keys, values)
        return out.view(tokens, kv_heads, heads // kv_heads, head_dim).transpose(1, 2).flatten(1)

    monkeypatch.setattr(attention.PagedAttention, "__call__", wrong)


FAULTS = (last_page_short, position_plus_one, two_pages_swapped, page_of_another_row, no_q_norm, wrong_group_map)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("page_size", [16, 64])
def test_the_gate_goes_red_for(
    qwen3: tuple[Path, list[golden.Reference]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    page_size: int,
) -> None:
    directory, expected = qwen3
    golden.check_batched(golden.lane(directory, page_size), expected)
    fault(monkeypatch)
    with pytest.raises(golden.GateError):
        golden.check_batched(golden.lane(directory, page_size), expected)


def no_bias(weights: dict[str, torch.Tensor]) -> None:
    weights |= {name: torch.zeros_like(weight) for name, weight in weights.items() if name.endswith(".bias")}


def bias_of_one_part_missing(weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.v_proj.bias"
    weights[name] = torch.zeros_like(weights[name])


def biases_of_queries_and_keys_swapped(weights: dict[str, torch.Tensor]) -> None:
    for layer in range(2):
        queries, keys = (f"model.layers.{layer}.self_attn.{part}_proj.bias" for part in "qk")
        weights[queries], weights[keys] = weights[keys], weights[queries]


@pytest.mark.parametrize("fault", [no_bias, bias_of_one_part_missing, biases_of_queries_and_keys_swapped])
def test_the_gate_goes_red_for_a_wrong_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    directory = tiny_model(tmp_path / "model", "qwen2", group=1)
    expected = golden.reference(golden.reference_model(directory), prompts()[1], 8)
    golden.check_cold(golden.lane(directory), expected)
    right = decoder.DecoderWeights.fuse

    def wrong(config: ModelConfig, weights: dict[str, torch.Tensor]) -> decoder.DecoderWeights:
        fault(weights)
        return right(config, weights)

    monkeypatch.setattr(decoder.DecoderWeights, "fuse", wrong)
    with pytest.raises(golden.GateError):
        golden.check_cold(golden.lane(directory), expected)


def test_a_model_without_a_bias_carries_none(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "model", "mistral")
    lane = golden.lane(directory)
    assert all(layer.qkv_bias is None for layer in lane.executor.parts.decoder.weights.layers)
    biased = golden.lane(tiny_model(tmp_path / "biased", "qwen2"))
    config, layers = load_model_config(tmp_path / "biased"), biased.executor.parts.decoder.weights.layers
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    assert [layer.qkv_bias.shape for layer in layers if layer.qkv_bias is not None] == [(width,)] * config.layers
    assert biased.report.planned.weights == biased.report.measured.weights


def test_cases_cover_every_feature_of_each_family() -> None:
    assert {case.family for case in CASES} == set(FAMILIES)
    assert {case.family for case in CASES if not case.head_dim_given} == {"mistral", "qwen2"}
    for family in FAMILIES:
        own = [case for case in CASES if case.family == family]
        assert {case.tied for case in own} == {True, False}
        assert {case.rope for case in own} == set(ROPES)
        assert {case.page_size for case in own} == {16, 64}


def test_the_gate_goes_red_for_one_wrong_logit_and_one_wrong_token(
    qwen3: tuple[Path, list[golden.Reference]],
) -> None:
    one = qwen3[1][0]
    golden.compare(one, one.logits, one.tokens)
    wrong = one.logits.clone()
    wrong[-1, 0] += 2 * golden.MAX_ERROR * float(one.logits[-1].abs().max())
    with pytest.raises(golden.GateError, match="logits of token 63"):
        golden.compare(one, wrong, one.tokens)
    with pytest.raises(golden.GateError, match="token 0 is"):
        golden.compare(one, one.logits, [one.tokens[0] + 1, *one.tokens[1:]])
    with pytest.raises(golden.GateError, match="63 tokens"):
        golden.compare(replace(one, tokens=one.tokens), one.logits, one.tokens[:-1])


def test_a_draft_changes_the_time_but_not_the_reference(qwen3: tuple[Path, list[golden.Reference]]) -> None:
    directory, expected = qwen3
    model = golden.reference_model(directory)
    one = expected[1]
    for draft in (one.tokens, one.tokens[:20], [*one.tokens[:20], 1, *one.tokens[21:]], [1] * 64):
        again = golden.reference(model, one.prompt, draft=draft)
        assert again.tokens == one.tokens
        torch.testing.assert_close(again.logits, one.logits, rtol=0, atol=1e-4)
