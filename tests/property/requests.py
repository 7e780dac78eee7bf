"""Request dictionaries as no frontend should send them, and the fields that a refusal of them may name."""

import array
import decimal
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from worker.parameters import GROUPS, REQUEST

VOCAB = 320
"""Of `tests.models.tiny_model`."""


class Unprintable:
    """Whatever is done with it fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = object.__hash__


def sound() -> dict[str, Any]:
    """A request as Dynamo's frontend sends it, with every group present."""
    return {
        "model": "tiny",
        "token_ids": [5, 6, 7],
        "stop_conditions": {"max_tokens": 3, "stop": None, "ignore_eos": True},
        "sampling_options": {"temperature": 0.7, "seed": 1, "top_k": None},
        "output_options": {"logprobs": None, "skip_special_tokens": True},
        "routing": {"priority": 0, "cache_salt": None},
        "eos_token_ids": [2],
        "annotations": [],
        "mdc_sum": None,
    }


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HUGE: Mapping[str, Any] = {
    "1 MB of text": "x" * 10**6,
    "1 MB of bytes": b"\x00" * 10**6,
    "100,000 ids": list(range(100_000)),
    "100,000 ids, one negative": [*range(100_000), -1],
    "100,000 times one id": [7] * 100_000,
    "10^5000": 10**5000,
    "-10^5000": -(10**5000),
    "900 lists in each other": nested(900),
    "unprintable": Unprintable(),
    "an object": object(),
    "a class": int,
    "a decimal": decimal.Decimal("0.5"),
    "a complex number": 1j,
    "an array": array.array("i", [1, 2, 3]),
    "a numpy array": np.arange(3),
    "a numpy number": np.float32(0.5),
    "a memoryview": memoryview(bytes(8)),
    "a bytearray": bytearray(8),
    "a set": {1, 2},
}
"""Values that are drawn by name, for the sake of what a failure prints."""

INTEGERS = (0, 1, -1, 2, 3, 20, 21, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1)
FLOATS = (
    0.0,
    -0.0,
    0.5,
    1.0,
    -0.5,
    1.5,
    2.0,
    5e-324,
    1e-45,
    3.3e38,
    3.5e38,
    1.7e308,
    -1.7e308,
    math.nan,
    math.inf,
    -math.inf,
)
NUMBERS = st.sampled_from((*INTEGERS, *FLOATS))
TEXTS = st.text(max_size=4) | st.sampled_from(["1", "null", "\ud800", "\x00", "🙂", "nan", "true"])
LISTS = st.lists(st.integers(-2, VOCAB + 2) | NUMBERS | TEXTS | st.none() | st.booleans(), max_size=5)
ODD = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.integers()
    | TEXTS
    | LISTS
    | st.binary(max_size=9)
    | st.dictionaries(TEXTS, NUMBERS | LISTS, max_size=3)
    | st.sampled_from(sorted(HUGE)).map(lambda name: ("HUGE", name))
)
PACKED = st.lists(st.integers(-1, VOCAB), max_size=70).map(lambda ids: np.array(ids, dtype="<i4").tobytes())

FIELDS = [(group.name, name) for group in GROUPS if group is not REQUEST for name in sorted(group.known)] + [
    (None, name) for name in (*sorted(REQUEST.known), *(group.name for group in GROUPS if group is not REQUEST))
]
"""(Group, field) of everything that has a meaning; no group for those that stand in the request itself."""
UNKNOWN = [(group.name, "no_such_field") for group in GROUPS if group is not REQUEST] + [(None, "no_such_field")]

Change = tuple[str | None, str, Any]


def changes() -> st.SearchStrategy[list[Change]]:
    """Up to four fields and what they hold instead."""
    places = st.sampled_from(FIELDS) | st.sampled_from(UNKNOWN)
    odd = st.tuples(places, ODD).map(lambda pair: (*pair[0], pair[1]))
    prompt = st.tuples(st.none(), st.just("token_ids"), LISTS | PACKED)
    numbers = st.tuples(st.sampled_from([f for f in FIELDS if f[0]]), NUMBERS).map(lambda pair: (*pair[0], pair[1]))
    return st.lists(odd | numbers | prompt, min_size=1, max_size=4)


def changed(plan: list[Change]) -> dict[str, Any]:
    """A sound request with `plan` carried out. A group that has become something else keeps its new value."""
    request = sound()
    for group, name, value in plan:
        held = HUGE[value[1]] if isinstance(value, tuple) and value[0] == "HUGE" else value
        place = request if group is None else request[group]
        if isinstance(place, dict):
            place[name] = held
    return request


def names(plan: list[Change]) -> set[str]:
    """What a refusal may speak of: a changed field, or a key of what a whole group was replaced by."""
    found = {name for _, name, _ in plan}
    for _, name, value in plan:
        if name == "token_ids":
            found.add("prompt")
        if isinstance(value, dict):
            found.update(repr(key)[1:-1] for key in value)
    return found
