"""The Dynamo side of a worker. Importing the package is cheap; `Backend` is loaded when it is first asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.backend import Backend

__all__ = ["Backend"]


def __getattr__(name: str) -> Any:
    if name == "Backend":
        from worker.backend import Backend

        return Backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
