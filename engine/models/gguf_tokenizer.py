"""Rebuilds a byte-level BPE tokenizer from the metadata of a GGUF file. No torch.

GGUF stores vocabulary and merges, but of the rule that splits text before BPE only a name (`tokenizer.ggml.pre`). Those
rules are llama.cpp's; a wrong one gives other tokens without any error, so an unknown name is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.files import ModelError

_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type` for tokens that are never produced by merges."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut into words before BPE. Without `split` the words are GPT-2's, as `ByteLevel` cuts them."""

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is a token of the vocabulary is taken whole."""
    adds_bos: bool = False
    """Whether a file that does not say puts the beginning token before the text."""


_GPT2 = _PreTokenizer()
_GPT2_DIGITS = _PreTokenizer(single_digits=True)
_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
_QWEN2 = _PreTokenizer(split=_QWEN2_SPLIT, nfc=True)

PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
"""Splitting rules by their names in GGUF files."""


def write_tokenizer(directory: Path, fields: Mapping[str, Any], source: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and special_tokens_map.json.

    `fields` are the file's metadata by key. Raises `ModelError` that names `source` and the field for a tokenizer that
    is not byte-level BPE, an unknown splitting rule, or token ids outside the vocabulary.
    """
    rule = _rule(fields, source)
    tokens = _list(fields, source, "tokenizer.ggml.tokens", str)
    special = {
        f"{role}_token": tokens[token]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token := special_token_id(fields, source, key)) is not None
    }
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", rule.adds_bos)) and "bos_token" in special
    _build(fields, source, rule, special["bos_token"] if add_bos else None).save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def special_token_id(fields: Mapping[str, Any], source: Path, key: str) -> int | None:
    """The id in `tokenizer.ggml.{key}_token_id`, or None if the file names none."""
    name = f"tokenizer.ggml.{key}_token_id"
    token = fields.get(name)
    if token is None:
        return None
    size = len(_list(fields, source, "tokenizer.ggml.tokens", str))
    if not isinstance(token, int) or not 0 <= token < size:
        raise ModelError(f"{source}: {name} is {token!r}, outside the vocabulary of {size} tokens")
    return token


def _rule(fields: Mapping[str, Any], source: Path) -> _PreTokenizer:
    model = fields.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(f"{source}: tokenizer.ggml.model is {model!r}; supported: 'gpt2' (byte-level BPE)")
    name = fields.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelError(f"{source}: tokenizer.ggml.pre is {name!r}; supported: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _list(fields: Mapping[str, Any], source: Path, name: str, kind: type) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
        raise ModelError(f"{source}: {name} is missing or no list of {kind.__name__}")
    return value


def _merges(fields: Mapping[str, Any], source: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in _list(fields, source, "tokenizer.ggml.merges", str):
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(
                f"{source}: tokenizer.ggml.merges has {line!r}, which does not join two tokens into a third"
            )
        merges.append((left, right))
    return merges


def _build(fields: Mapping[str, Any], source: Path, rule: _PreTokenizer, bos: str | None) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokens = _list(fields, source, "tokenizer.ggml.tokens", str)
    kinds = _list(fields, source, "tokenizer.ggml.token_type", int)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(kinds) != len(tokens):
        raise ModelError(
            f"{source}: tokenizer.ggml.tokens has {len(tokens)} tokens, {len(vocabulary)} of them distinct, and "
            f"tokenizer.ggml.token_type {len(kinds)} entries; the three must agree"
        )
    merges = _merges(fields, source, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    steps: list[Any] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer
