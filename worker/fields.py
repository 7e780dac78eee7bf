"""Reads single fields of a request. Each function takes what JSON may hold and returns what the field must be, or
raises `InvalidArgument` with a text that names the field, what it holds and what is allowed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.llm.exceptions import InvalidArgument

INT32_MAX = (1 << 31) - 1
LARGEST_NUMBER = 3.4e38
"""About the largest float32."""


def group(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside the request; an empty one if it is missing or null."""
    value = request.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, but must be an object")
    return value


def integer(value: Any, name: str, low: int | None, high: int | None) -> int | None:
    """A whole number within bounds; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} is {shown(value)}, but must be a whole number")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise InvalidArgument(f"{name} is {shown(value)}, but must be {bounds}")
    return value


def number(
    value: Any, name: str, low: float, high: float | None, default: float, *, low_excluded: bool = False
) -> float:
    """A number within bounds; `default` for None. Without a bound above, what float32 holds is the bound."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{name} is {shown(value)}, but must be a number")
    most = LARGEST_NUMBER if high is None else high
    above = value > low if low_excluded else value >= low
    if not (above and value <= most):  # also not-a-number
        lower = f"above {low:g}" if low_excluded else f"at least {low:g}"
        raise InvalidArgument(f"{name} is {shown(value)}, but must be {lower} and at most {most:g}")
    return float(value)


def flag(value: Any, name: str) -> bool:
    """True or false; false for None."""
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {shown(value)}, but must be true or false")
    return bool(value)


def text(value: Any, name: str, longest: int) -> str | None:
    """A text of at most `longest` letters; None for None and for an empty one."""
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f"{name} is {shown(value)}, but must be a text")
    if value and len(value) > longest:
        raise InvalidArgument(f"{name} has {len(value)} letters, but must have at most {longest}: send a hash of it")
    if value and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise InvalidArgument(f"{name} is {shown(value)}, but must be a text of whole Unicode characters")
    return value or None


def token_ids(value: Any, name: str) -> Sequence[int]:
    """A list of token ids; empty for None."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, but must be a list of token ids")
    for token in value:
        if type(token) is not int or not 0 <= token <= INT32_MAX:
            raise InvalidArgument(f"{name} holds {shown(token)}, but must hold token ids from 0 to {INT32_MAX}")
    return value


def shown(value: Any, limit: int = 80) -> str:
    """`value` for a message. A number of thousands of digits cannot be printed by Python, so it is described."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    try:
        written = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return written if len(written) <= limit else f"{written[: limit - 3]}..."
