"""Imported tokenizers: llama.cpp's splitting rules, spelled out, are the oracle."""

from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import regex
from tokenizers import Tokenizer

from engine.models.demo import demo_model_path
from engine.models.gguf_import import import_gguf
from engine.models.gguf_tokenizer import write_tokenizer
from tests.gguf_files import write_gguf
from tests.models import tiny_model


@pytest.fixture(scope="module")
def fields():
    """The demo model's metadata."""
    return {name: field.contents() for name, field in gguf.GGUFReader(demo_model_path()).fields.items()}


@pytest.fixture(scope="module")
def smollm2(fields, tmp_path_factory):
    """The demo model's tokenizer files."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, fields, demo_model_path())
    return directory


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A model whose rows are whole blocks of 32 elements, as the quantized types want them."""
    return tiny_model(tmp_path / "tiny", head_dim=16, kv_heads=2, group=2, vocab=300)


PROBES = [
    "Hello  world   and  \t tabs\n\n\nand lines \n ",
    "In 2024, 3.14159 + 100000 = 100003.14159; x2 y10 10th",
    "- one\n- two\n  - three\n1. first\n2. second\n10. tenth\n",
    "| name | count |\n|------|------:|\n| a    |    12 |\n",
    "def f(x, n=10):\n    return [x[i] ** 2 for i in range(n)]  # it's fine\n",
    "I'll say they've it's DON'T we're I'D",
    "Grüße, 東京 2020年 — ½ ² ٣٤ 🙂🙂 \u00a0nbsp",
    "https://example.org/a?b=1&c=2#d_e-f",
    "",
]

GOLDEN = [("1234 5", [33, 34, 35, 36, 216, 37]), ("Hello  world   x", [19556, 216, 905, 256, 1792])]

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@lru_cache
def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(rest)}


def byte_pair_encode(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    parts = [byte_characters()[byte] for byte in word.encode()]
    while True:
        ranked = [(ranks[pair], place) for place, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not ranked:
            return parts
        place = min(ranked)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.fixture(scope="module")
def reference(fields):
    """llama.cpp's rule for `smollm`, spelled out: cut at every digit, then GPT-2's words, then merges by rank."""
    ids = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = fields["tokenizer.ggml.merges"]
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(merges)}

    def encode(text: str) -> list[int]:
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        words = [word for piece in pieces for word in regex.findall(GPT2_WORDS, piece)]
        return [ids[part] for word in words for part in byte_pair_encode(word, ranks)]

    return encode


@pytest.mark.parametrize("text", PROBES)
def test_demo_tokens_are_those_of_llama_cpps_rule(smollm2, reference, text):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids == reference(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_demo_tokens_stay_what_they_were(smollm2, text, ids):
    assert Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids == ids


def test_the_chat_template_renders_to_special_tokens(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text).input_ids
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert ids == Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "a 123", ["a", "Ġ123"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "a 12345", ["a", "Ġ", "123", "45"]),
        ("qwen2", "a 123\n\nb", ["a", "Ġ", "1", "2", "3", "ĊĊ", "b"]),
        ("qwen2", "e\u0301", ["Ã©"]),
        ("llama-bpe", "DON'T", ["DON", "'T"]),
        ("gpt-2", "DON'T", ["DON", "'", "T"]),
    ],
)
def test_each_rule_cuts_words_in_its_own_way(tmp_path, tiny, pre, text, words):
    import_gguf(write_gguf(tmp_path / "m.gguf", tiny, keys={"tokenizer.ggml.pre": pre}), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)] == words


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 1}, True),
        (
            {
                "tokenizer.ggml.pre": "llama-bpe",
                "tokenizer.ggml.bos_token_id": 1,
                "tokenizer.ggml.add_bos_token": False,
            },
            False,
        ),
        ({"tokenizer.ggml.bos_token_id": 1}, False),
        ({"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_the_beginning_token_is_added_where_the_file_or_its_rule_says_so(tmp_path, tiny, keys, first):
    import_gguf(write_gguf(tmp_path / "m.gguf", tiny, keys=keys), tmp_path / "out")
    ids = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("Hi").ids
    assert (ids[0] == 1) is first
