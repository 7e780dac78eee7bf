"""OpenAI requests with one field that holds something odd, as JSON texts: what a careless or hostile client sends."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

TOKENS = 3


class Body(NamedTuple):
    """One request."""

    path: str
    field: str
    text: str
    """The body, JSON or nearly so."""
    stream: bool


ODD = (
    *("null", "true", "0", "1", "-1", "0.5", "-0.5", "1e308", "1e999", "4294967296", "18446744073709551616", "9" * 400),
    *("NaN", '"1"', '""', '"\\ud800"', "[]", "[1]", "[null]", "[-1, 4294967296]", "{}", '{"a": {"b": []}}'),
)
"""JSON texts, and some that a strict parser refuses."""

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("n", "best_of", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs"),
    *("include_stop_str_in_output", "skip_special_tokens", "user", "echo", "stream_options", "prompt_logprobs"),
    *("length_penalty", "use_beam_search", "guided_json", "cache_salt", "priority", "no_such_field", "nvext"),
)
CHAT = ("messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "response_format", "logprobs")
COMPLETIONS = ("prompt", "suffix")
NVEXT = (
    "agent_hints",
    "ignore_eos",
    "cache_control",
    "annotations",
    "backend_instance_id",
    "token_data",
    "greed_sampling",
)
HINTS = ("priority", "latency_sensitivity", "osl", "strict_priority")
VALID = {
    "temperature": ("0.0", "2", "1e-45", "2.1", "1e30"),
    "top_p": ("1e-30", "1.0", "0", "1.1"),
    "top_k": ("-1", "-2", "2147483647", "-2147483648"),
    "min_p": ("0.0", "1.0", "1.1"),
    "seed": ("-9223372036854775808", "9223372036854775807"),
    "presence_penalty": ("2", "-2.0", "2.1"),
    "frequency_penalty": ("2", "-2.0", "-2.1"),
    "repetition_penalty": ("0.01", "2.0", "0", "1e30"),
    "n": ("2", "255"),
    "best_of": ("2",),
    "max_tokens": ("4294967295",),
    "min_tokens": ("3", "4", "4294967295"),
    "logprobs": ("0", "5", "20", "21", "255"),
    "prompt_logprobs": ("0", "20", "21"),
    "stop_token_ids": ("[0, 319, 320, 4294967295]", "[2147483647]", "[2147483648]"),
    "stop": ('["a", "b", "c", "d"]', '["a", "b", "c", "d", "e"]'),
    "echo": ("true",),
    "ignore_eos": ("true",),
    "cache_salt": ('"tenant"', '"\\u0000"'),
    "prompt": ("[320]", "[4294967295]", "[0]", '"\\u0000"'),
}
"""What the frontend lets through, or nearly."""


def text_of(model: str, fields: dict[str, str], stream: bool) -> str:
    """A body of JSON texts by field."""
    every = {"model": json.dumps(model), "max_tokens": str(TOKENS), "stream": json.dumps(stream)} | fields
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in every.items()) + "}"


def bodies(model: str) -> Iterator[Body]:
    """Every field with every odd value, by turns streamed and plain."""
    chat, prompt = '[{"role": "user", "content": "hello"}]', "[10, 11, 12]"
    stream = False
    for value in ODD:
        for name in (*SAMPLING, *COMPLETIONS):
            yield Body("/v1/completions", name, text_of(model, {"prompt": prompt, name: value}, stream), stream)
        for name in CHAT:
            yield Body("/v1/chat/completions", name, text_of(model, {"messages": chat, name: value}, stream), stream)
            stream = not stream
        for name in NVEXT:
            fields = {"prompt": prompt, "nvext": f'{{"{name}": {value}}}'}
            yield Body("/v1/completions", name, text_of(model, fields, stream), stream)
        for name in HINTS:
            fields = {"messages": chat, "nvext": f'{{"agent_hints": {{"{name}": {value}}}}}'}
            yield Body("/v1/chat/completions", name, text_of(model, fields, not stream), not stream)


def valid_bodies(model: str) -> Iterator[Body]:
    """Fields at the ends of their ranges, streamed and plain."""
    for name, values in VALID.items():
        for value in values:
            for stream in (False, True):
                fields = {"prompt": "[10, 11, 12]", "temperature": "0.5", name: value}
                yield Body("/v1/completions", name, text_of(model, fields, stream), stream)


def double_bodies(model: str) -> Iterator[Body]:
    """Of each of these the frontend makes two requests."""
    for prompts in ("[[1, 2], [3]]", '["a", "b"]'):
        for stream in (False, True):
            yield Body("/v1/completions", "prompt", text_of(model, {"prompt": prompts}, stream), stream)


def long_bodies(model: str) -> Iterator[Body]:
    """Few, large ones."""
    ids: Any = json.dumps(list(range(100_000)))
    long = json.dumps("x" * 10**6)
    for name, value in {
        "stop_token_ids": ids,
        "prompt": ids,
        "stop": json.dumps(["x" * 10**5] * 4),
        "user": long,
        "cache_salt": long,
        "no_such_field": "[" * 100 + "]" * 100,
        "logit_bias": json.dumps({str(i): 1 for i in range(10_000)}),
    }.items():
        for stream in (False, True):
            yield Body("/v1/completions", name, text_of(model, {"prompt": "[10]", name: value}, stream), stream)
