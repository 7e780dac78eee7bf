"""A tool call: the frontend's parser takes it from the text of a model that always makes the same one."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from engine.models.config import load_model_config
from tests.contract.conftest import tiny_flags
from tests.models import EOS, tiny_model, tiny_weights
from tests.stack import Stack, client

CALL = ("<tool_", 'call>\n{"name": "get_weather", ', '"arguments": {"city": "Paris"}}', "\n</tool", "_call>")
"""Pieces that are one token each: a chain of tokens that are all different is what a model without memory can say."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def calling_model(directory: Path) -> Path:
    """A tiny Llama whose layers add nothing and whose head makes it say `CALL` after the newline that ends a prompt."""
    tiny_model(directory, vocab=320)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in CALL])
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": tokenizer.get_vocab_size()}))
    weights = tiny_weights(load_model_config(directory), seed=0)
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight[:] = 0
        elif "norm" in name:
            weight[:] = 1
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    newline = tokenizer.encode("\n").ids[-1]
    chain = [newline, *(tokenizer.token_to_id(piece) for piece in CALL), EOS]
    head[:] = 0
    for token, following in itertools.pairwise(chain):
        head[following] = embedding[token]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert np.unique(chain).size == len(chain)
    return directory


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = calling_model(tmp_path_factory.mktemp("models") / "caller")
    with Stack(*tiny_flags(model, tool_call_parser="hermes")) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_tool_call_arrives_parsed(caller: Stack, stream: bool) -> None:
    async with client(caller) as api:
        reply = await api.chat("Weather in Paris?", stream, tools=TOOLS, max_tokens=32)
    assert (reply.status, reply.finish_reason) == (200, "tool_calls"), reply
    assert reply.tool_calls[0]["function"]["name"] == "get_weather"
    arguments = "".join(call["function"].get("arguments") or "" for call in reply.tool_calls)
    assert json.loads(arguments) == {"city": "Paris"}
    assert reply.text == ""


async def test_without_tools_the_same_text_stays_text(caller: Stack) -> None:
    async with client(caller) as api:
        reply = await api.chat("Weather in Paris?", max_tokens=32)
    assert (reply.status, reply.text, reply.finish_reason) == (200, "".join(CALL), "stop")
    assert reply.usage["completion_tokens"] == len(CALL) + 1
