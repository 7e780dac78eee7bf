"""From Dynamo's requests to the engine core's: pure, total functions.

Whatever a client sends, `to_submit` either returns a `Submit` that the core can take as it is, or raises
`InvalidArgument` with a text that names the field, what it holds and the way out. What this worker cannot honour is
refused, never dropped; values that change nothing (n of 1) are accepted. `worker.parameters` says which is which.
"""

import array
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from dynamo.llm.exceptions import InvalidArgument

from engine.messages import Sampling, Submit
from engine.step import OPTIONAL_PARAMETERS
from worker.fields import INT32_MAX, flag, group, integer, number, shown, text, token_ids
from worker.parameters import (
    GROUPS,
    MAX_LOGPROBS,
    MAX_SALT_LETTERS,
    OUTPUT,
    PENALTY_BOUND,
    ROUTING,
    SAMPLING,
    STOP,
    Group,
)

U64 = 1 << 64


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is checked against."""

    vocab_size: int
    servable_length: int
    default_max_tokens: int | None
    defaults: Sampling
    """Sampling of a request that says nothing about it; its seed is not used."""
    parameters: frozenset[str]
    """Optional parameters that the lane honours: see `engine.step.OPTIONAL_PARAMETERS`."""


def to_submit(
    request: Mapping[str, Any], key: int, request_id: str, model: ServedModel, random_seed: Callable[[], int]
) -> Submit:
    """Check a Dynamo request and fill in its defaults. `block_hashes` is left empty.

    `random_seed()` gives an unsigned 64-bit number; it is called only if the request has no seed.
    """
    sampling_options = _sampling_options(request)
    stop, output, routing = (group(request, name) for name in (STOP.name, OUTPUT.name, ROUTING.name))
    for options, known in zip((sampling_options, stop, output, routing, request), GROUPS, strict=True):
        _refuse_unserved(options, known)
    prompt, length = pack_prompt(request.get("token_ids"), model.vocab_size)
    max_tokens = _max_tokens(stop.get("max_tokens"), _room(length, model.servable_length), model.default_max_tokens)
    stop_tokens = _stop_tokens(request, stop, model.vocab_size)
    sampling = msgspec.structs.replace(
        to_sampling(sampling_options, model.defaults, random_seed),
        min_tokens=_min_tokens(stop.get("min_tokens"), max_tokens, stop_tokens, model.vocab_size),
        **_logprobs(output),
    )
    _refuse_unhonoured(sampling, model.parameters)
    return Submit(
        key=key,
        request_id=request_id,
        prompt=prompt,
        block_hashes=b"",
        max_tokens=max_tokens,
        stop_token_ids=stop_tokens,
        sampling=sampling,
        cache_salt=text(routing.get("cache_salt"), "cache_salt", MAX_SALT_LETTERS),
        priority=integer(routing.get("priority"), "priority", -INT32_MAX - 1, INT32_MAX) or 0,
        expected_output_tokens=_expected(routing.get("expected_output_tokens"), max_tokens),
    )


def _sampling_options(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The frontend sends what its structure has no place for, such as `allowed_token_ids`, within `extra_args`."""
    extra = group(group(request, "extra_args"), SAMPLING.name)
    options = group(request, SAMPLING.name)
    return {**extra, **{name: value for name, value in options.items() if value is not None}} if extra else options


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
    wanted = integer(value, "max_tokens", 1, None)
    if wanted is None:
        wanted = room if default is None else default
    return min(wanted, room)


def _stop_tokens(request: Mapping[str, Any], stop: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The client's stop tokens; and, unless `ignore_eos` is set, the hidden ones and the end-of-sequence tokens.

    Which of them a client sees is the frontend's business. Ids that the model does not have end nothing.
    """
    ids = set(token_ids(stop.get("stop_token_ids"), "stop_token_ids"))
    ids.update(token_ids(stop.get("stop_token_ids_visible"), "stop_token_ids_visible"))
    if not flag(stop.get("ignore_eos"), "ignore_eos"):
        ids.update(token_ids(stop.get("stop_token_ids_hidden"), "stop_token_ids_hidden"))
        ids.update(token_ids(request.get("eos_token_ids"), "eos_token_ids"))
    return tuple(sorted(token for token in ids if token < vocab_size))


def _min_tokens(value: Any, max_tokens: int, stop_tokens: Sequence[int], vocab_size: int) -> int:
    least = integer(value, "min_tokens", 0, None) or 0
    if least > max_tokens:
        raise InvalidArgument(
            f"min_tokens is {shown(least)}, but at most {max_tokens} tokens can be generated (max_tokens, or what the "
            "servable length leaves beside the prompt): lower min_tokens"
        )
    if least and len(stop_tokens) == vocab_size:
        raise InvalidArgument(
            f"min_tokens is {least}, but the stop tokens are the whole vocabulary of {vocab_size}, so that no token "
            "could be sampled: name fewer stop tokens"
        )
    return least


def _logprobs(output: Mapping[str, Any]) -> dict[str, int | None]:
    return {name: integer(output.get(name), name, 0, MAX_LOGPROBS) for name in ("logprobs", "prompt_logprobs")}


def _expected(value: Any, max_tokens: int) -> int | None:
    hint = integer(value, "expected_output_tokens", 0, None)
    return None if hint is None else min(hint, max_tokens)


def to_sampling(options: Mapping[str, Any], defaults: Sampling, random_seed: Callable[[], int]) -> Sampling:
    """Check sampling options; what they leave out comes from `defaults`. Keys that are not for sampling do nothing."""
    seed = integer(options.get("seed"), "seed", None, None)
    top_k = integer(options.get("top_k"), "top_k", -1, None)

    def taken(name: str, low: float, high: float | None, *, low_excluded: bool = False) -> float:
        return number(options.get(name), name, low, high, getattr(defaults, name), low_excluded=low_excluded)

    return Sampling(
        temperature=taken("temperature", 0.0, None),
        top_k=defaults.top_k if top_k is None else min(max(top_k, 0), INT32_MAX),
        top_p=taken("top_p", 0.0, 1.0, low_excluded=True),
        min_p=taken("min_p", 0.0, 1.0),
        seed=(random_seed() if seed is None else seed) % U64,
        repetition_penalty=taken("repetition_penalty", 0.0, None, low_excluded=True),
        presence_penalty=taken("presence_penalty", -PENALTY_BOUND, PENALTY_BOUND),
        frequency_penalty=taken("frequency_penalty", -PENALTY_BOUND, PENALTY_BOUND),
    )


def asked_parameters(sampling: Sampling) -> frozenset[str]:
    """Which of `engine.step.OPTIONAL_PARAMETERS` are not at the value that switches them off."""
    off = Sampling()
    return frozenset(name for name in OPTIONAL_PARAMETERS if getattr(sampling, name) != getattr(off, name))


def without_unhonoured(sampling: Sampling, honoured: frozenset[str]) -> tuple[Sampling, tuple[str, ...]]:
    """A model's own defaults without those that the lane does not honour, and the names of these."""
    off, unserved = Sampling(), tuple(sorted(asked_parameters(sampling) - honoured))
    return msgspec.structs.replace(sampling, **{name: getattr(off, name) for name in unserved}), unserved


def _refuse_unhonoured(sampling: Sampling, honoured: frozenset[str]) -> None:
    for name in sorted(asked_parameters(sampling) - honoured):
        raise InvalidArgument(
            f"{name} is {getattr(sampling, name):g}, but this worker's device does not serve {name} yet: leave it out, "
            "or have the request routed to another worker"
        )


def _refuse_unserved(options: Mapping[str, Any], known: Group) -> None:
    for name, value in options.items():
        if value is None:
            continue
        rule = known.neutral.get(name)
        if rule is not None and not any(_same(value, accepted) for accepted in rule.accepted):
            raise InvalidArgument(f"{name} is {shown(value)}: {rule.way_out}")
        if known.closed and name not in known.known:
            raise InvalidArgument(f"{shown(name)} is not known to this worker: leave it out")


def _same(value: Any, accepted: Any) -> bool:
    plain = isinstance(value, str | int | float | list | dict)  # others may compare to anything, or raise
    return plain and isinstance(value, bool) is isinstance(accepted, bool) and bool(value == accepted)
