"""Calls of CUDA's driver library (cuda.h) that torch does not offer, or for which it takes too much memory."""

import ctypes
from functools import cache
from typing import Any

import torch

_STACK_SIZE, _NON_BLOCKING = 0, 1
Size = ctypes.c_size_t
"""Of an argument in bytes, which a refusal then names."""


class DriverError(RuntimeError):
    """The driver refused a call, or is absent; names call, sizes and its reason."""


class Driver:
    """The driver library. Its context is the one that torch has made current."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"the driver library {library} cannot be loaded: {error}") from None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by its name; raises `DriverError`."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            sizes = [argument.value for argument in arguments if isinstance(argument, Size)]
            raise DriverError(
                f"{name} of {sizes} bytes failed with {code}: {(text.value or b'unknown error').decode()}"
            )

    def limit_stack(self, nbytes: int) -> None:
        """Give each thread `nbytes` of stack where its kernel is not known to need more.

        The context holds the most that any kernel needs, for all threads that the card can run at once: 1024 bytes, the
        default, take 260 MiB of an H200. Kernels that recurse or call through pointers have this limit alone.
        """
        self.call("cuCtxSetLimit", _STACK_SIZE, Size(nbytes))

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """A stream of its own, which lives as long as the process.

        Torch would make a pool of 32 with the first one, which take 70 MiB of an H200.
        """
        handle = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
        return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which results are copied to the host."""
    return Driver().stream(device)
