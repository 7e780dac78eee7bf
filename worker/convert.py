"""Between Dynamo's requests and chunks and the engine core's messages: pure, total functions.

Whatever a client sends, `to_submit` either returns a `Submit` that the core can take as it is, or raises
`InvalidArgument` with a text that names the field, what it holds and the way out. What this version cannot honour is
refused, never dropped; values that change nothing (a penalty of 0, n of 1) are accepted.
"""

import array
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from dynamo.llm.exceptions import InvalidArgument

from engine.messages import Finished, Sampling, Submit

U64 = 1 << 64
INT32_MAX = (1 << 31) - 1
MAX_PRIORITY = INT32_MAX


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is checked against."""

    vocab_size: int
    servable_length: int
    default_max_tokens: int | None
    defaults: Sampling
    """Sampling of a request that says nothing about it; its seed is not used."""


def to_submit(
    request: Mapping[str, Any], key: int, request_id: str, model: ServedModel, random_seed: Callable[[], int]
) -> Submit:
    """Check a Dynamo request and fill in its defaults. `block_hashes` is left empty.

    `random_seed()` gives an unsigned 64-bit number; it is called only if the request has no seed.
    """
    stop = _group(request, "stop_conditions")
    routing = _group(request, "routing")
    _refuse_unsupported(request, stop, routing)
    prompt, length = pack_prompt(request.get("token_ids"), model.vocab_size)
    room = _room(length, model.servable_length)
    return Submit(
        key=key,
        request_id=request_id,
        prompt=prompt,
        block_hashes=b"",
        max_tokens=_max_tokens(stop.get("max_tokens"), room, model.default_max_tokens),
        stop_token_ids=_stop_tokens(request, stop),
        sampling=to_sampling(_group(request, "sampling_options"), model.defaults, random_seed),
        cache_salt=_text(routing.get("cache_salt"), "cache_salt"),
        priority=_integer(routing.get("priority"), "priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
    )


def pack_prompt(ids: Any, vocab_size: int) -> tuple[bytes, int]:
    """The prompt as little-endian int32 bytes, and its length in tokens.

    `ids` is a list of integers, or bytes that are packed already.
    """
    packed = _packed(ids)
    if not packed:
        raise InvalidArgument("the prompt is empty: send at least one token")
    array_ids = np.frombuffer(packed, dtype="<i4")
    low, high = int(array_ids.min()), int(array_ids.max())
    if low < 0 or high >= vocab_size:
        raise InvalidArgument(
            f"token_ids holds {low if low < 0 else high}, but the model's vocabulary is 0 to {vocab_size - 1}"
        )
    return packed, len(array_ids)


def _packed(ids: Any) -> bytes:
    if ids is None:
        return b""
    if isinstance(ids, bytes | bytearray | memoryview):
        packed = bytes(ids)
        if len(packed) % 4:
            raise InvalidArgument(f"token_ids is {len(packed)} packed bytes, but must be 4 for each token")
        return packed
    if not isinstance(ids, list | tuple):
        raise InvalidArgument(f"token_ids is a {type(ids).__name__}, but must be a list of integers or packed bytes")
    if set(map(type, ids)) - {int}:
        raise InvalidArgument("token_ids holds something that is not an integer: send token ids")
    try:
        values = array.array("i", ids)
    except OverflowError:
        raise InvalidArgument(f"token_ids holds a number above {INT32_MAX} or below 0: send token ids") from None
    if sys.byteorder != "little":
        values.byteswap()
    return values.tobytes()


def _room(length: int, servable_length: int) -> int:
    if length >= servable_length:
        raise InvalidArgument(
            f"the prompt has {length} tokens, but this worker serves {servable_length} tokens of prompt and output "
            f"together: shorten the prompt to at most {servable_length - 1} tokens"
        )
    return servable_length - length


def _max_tokens(value: Any, room: int, default: int | None) -> int:
    wanted = _integer(value, "max_tokens", 1, None)
    if wanted is None:
        wanted = room if default is None else default
    return min(wanted, room)


def _stop_tokens(request: Mapping[str, Any], stop: Mapping[str, Any]) -> tuple[int, ...]:
    """The client's stop tokens; and, unless `ignore_eos` is set, the hidden ones and the end-of-sequence tokens."""
    ids = set(_token_set(stop.get("stop_token_ids"), "stop_token_ids"))
    if not _flag(stop.get("ignore_eos"), "ignore_eos"):
        ids.update(_token_set(stop.get("stop_token_ids_hidden"), "stop_token_ids_hidden"))
        ids.update(_token_set(request.get("eos_token_ids"), "eos_token_ids"))
    return tuple(sorted(ids))


def _token_set(value: Any, name: str) -> Iterable[int]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, but must be a list of token ids")
    for token in value:
        _integer(token, name, 0, INT32_MAX)
    return value


def to_sampling(options: Mapping[str, Any], defaults: Sampling, random_seed: Callable[[], int]) -> Sampling:
    """Check sampling options; what they leave out comes from `defaults`. Keys that are not for sampling do nothing."""
    seed = _integer(options.get("seed"), "seed", None, None)
    top_k = _integer(options.get("top_k"), "top_k", -1, None)
    return Sampling(
        temperature=_number(options.get("temperature"), "temperature", 0.0, None, defaults.temperature),
        top_k=defaults.top_k if top_k is None else min(max(top_k, 0), INT32_MAX),
        top_p=_number(options.get("top_p"), "top_p", 0.0, 1.0, defaults.top_p, low_excluded=True),
        min_p=_number(options.get("min_p"), "min_p", 0.0, 1.0, defaults.min_p),
        seed=(random_seed() if seed is None else seed) % U64,
    )


NEUTRAL_SAMPLING: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "one choice per request is generated: send the request several times"),
    "best_of": ((1,), "one choice per request is generated: send the request several times"),
    "use_beam_search": ((False,), "beam search is not served: leave it out"),
    "length_penalty": ((1,), "it belongs to beam search, which is not served: leave it out"),
    "presence_penalty": ((0,), "penalties are not served yet: leave it out or send 0"),
    "frequency_penalty": ((0,), "penalties are not served yet: leave it out or send 0"),
    "repetition_penalty": ((1,), "penalties are not served yet: leave it out or send 1"),
    "include_stop_str_in_output": ((False,), "stop strings are always left out of the text: leave it out"),
    "logit_bias": (({}, []), "logit bias is not served yet: leave it out"),
    "guided_decoding": (
        ({},),
        "constrained output (response_format, or a tool_choice that requires a call) is not served yet: leave it out",
    ),
}
"""Sampling options that are only accepted at a value that changes nothing, and what to do about others."""

NEUTRAL_STOP: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "min_tokens": ((0,), "a least length is not served yet: leave it out or send 0"),
    "max_thinking_tokens": ((), "a thinking budget is not served yet: leave it out"),
}
NEUTRAL_OUTPUT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": ((), "log probabilities are not served yet: leave logprobs out"),
    "prompt_logprobs": ((), "log probabilities of the prompt are not served yet: leave echo or logprobs out"),
    "no_stop_trim": ((False,), "what ended the text is always left out of it: leave it out"),
}
NEUTRAL_REQUEST: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "multi_modal_data": (({},), "this model takes text only: leave images, audio and video out"),
    "mm_processor_kwargs": (({},), "this model takes text only: leave images, audio and video out"),
    "prompt_embeds": (("",), "prompts are taken as tokens only: send text"),
    "encoder_result": ((), "this worker has no encoder: send text"),
    "prefill_result": ((), "this worker computes its prompts itself: route to it without a prefill worker"),
    "bootstrap_info": ((), "this worker computes its prompts itself: route to it without a prefill worker"),
    "logits_processors": (([], {}), "logits processors are not served: leave it out"),
}
NEUTRAL_ROUTING: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "lora_name": (("",), "adapters are not served: name the base model"),
    "dp_rank": ((0,), "this worker has the one rank 0: route to another worker"),
}

HONOURED_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
HONOURED_STOP = frozenset(
    {"max_tokens", "stop", "stop_token_ids", "stop_token_ids_hidden", "ignore_eos"}  # stop: the frontend's job
)
HONOURED_ROUTING = frozenset({"priority", "cache_salt"})

ELSEWHERE_OUTPUT: Mapping[str, str] = {
    "skip_special_tokens": "the frontend turns tokens into text",
    "return_tokens_as_token_ids": "the frontend writes log probabilities, of which there are none",
    "formatted_prompt": "the prompt's text, for the frontend's own use",
}
"""Output options that the worker need not look at, and why."""

ELSEWHERE_ROUTING: Mapping[str, str] = {
    "backend_instance_id": "the router has followed it",
    "allowed_worker_ids": "the router has followed it",
    "routing_constraints": "the router has followed them",
    "priority_jump": "the place in the router's queue",
    "strict_priority": "the place in the router's queue",
    "expected_output_tokens": "a guess by which the router foresees load",
    "prefill_worker_id": "of a prefill worker; a request that has used one is refused",
    "prefill_dp_rank": "of a prefill worker; a request that has used one is refused",
    "decode_worker_id": "the router has followed it",
}
"""Routing hints that the worker need not look at, and why."""


def _refuse_unsupported(request: Mapping[str, Any], stop: Mapping[str, Any], routing: Mapping[str, Any]) -> None:
    sampling, output = _group(request, "sampling_options"), _group(request, "output_options")
    _refuse(sampling, NEUTRAL_SAMPLING)
    _refuse(stop, NEUTRAL_STOP)
    _refuse(output, NEUTRAL_OUTPUT)
    _refuse(request, NEUTRAL_REQUEST)  # other keys are the frontend's own, and each version of it may add some
    _refuse(routing, NEUTRAL_ROUTING)
    _refuse_unknown(sampling, HONOURED_SAMPLING | NEUTRAL_SAMPLING.keys())
    _refuse_unknown(stop, HONOURED_STOP | NEUTRAL_STOP.keys())
    _refuse_unknown(output, ELSEWHERE_OUTPUT.keys() | NEUTRAL_OUTPUT.keys())
    _refuse_unknown(routing, HONOURED_ROUTING | ELSEWHERE_ROUTING.keys() | NEUTRAL_ROUTING.keys())


def _refuse(options: Mapping[str, Any], table: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    for name, (neutral, way_out) in table.items():
        value = options.get(name)
        if value is not None and not any(_same(value, accepted) for accepted in neutral):
            raise InvalidArgument(f"{name} is {_shown(value)}: {way_out}")


def _refuse_unknown(options: Mapping[str, Any], known: Iterable[str]) -> None:
    for name, value in options.items():
        if value is not None and name not in known:
            raise InvalidArgument(f"{_shown(name)} is not known to this worker: leave it out")


def _same(value: Any, accepted: Any) -> bool:
    return isinstance(value, bool) is isinstance(accepted, bool) and bool(value == accepted)


def _group(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = request.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, but must be an object")
    return value


def _integer(value: Any, name: str, low: int | None, high: int | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} is {_shown(value)}, but must be a whole number")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise InvalidArgument(f"{name} is {_shown(value)}, but must be {bounds}")
    return value


def _number(
    value: Any, name: str, low: float, high: float | None, default: float, *, low_excluded: bool = False
) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{name} is {_shown(value)}, but must be a number")
    too_low = value <= low if low_excluded else value < low
    if not _finite(value) or too_low or (high is not None and value > high):
        lower = f"above {low:g}" if low_excluded else f"at least {low:g}"
        upper = "" if high is None else f" and at most {high:g}"
        raise InvalidArgument(f"{name} is {_shown(value)}, but must be {lower}{upper}")
    return float(value)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _flag(value: Any, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {_shown(value)}, but must be true or false")
    return bool(value)


def _text(value: Any, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f"{name} is {_shown(value)}, but must be a text")
    if value and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise InvalidArgument(f"{name} is {_shown(value)}, but must be a text of whole Unicode characters")
    return value or None


def _shown(value: Any, limit: int = 80) -> str:
    """`value` for a message. A number of thousands of digits cannot be printed by Python, so it is described."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def token_chunk(tokens: list[int]) -> dict[str, Any]:
    """A chunk that carries new tokens and does not end the stream."""
    return {"token_ids": tokens, "index": 0}


def final_chunk(tokens: list[int], end: Finished) -> dict[str, Any]:
    """The last chunk of a stream: the tokens not yet sent, why it ended, and what it used.

    A stop token is among the tokens, as with vLLM: the frontend leaves it out of the text.
    """
    return {
        "token_ids": tokens,
        "index": 0,
        "finish_reason": end.reason,
        "completion_usage": {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "total_tokens": end.prompt_tokens + end.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
        },
    }
