"""A network of one's own, of loopback alone: what binds every address in it is reached from nowhere else."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_NETWORK = 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1
_libc = ctypes.CDLL(None, use_errno=True)


def reason_against() -> str:
    """Why there can be none here; empty if there can."""
    if os.geteuid():
        return "a network namespace needs root"
    try:
        with private_network():
            return ""
    except OSError as error:
        return f"a network namespace cannot be made: {error}"


@contextmanager
def private_network() -> Iterator[None]:
    """What this thread starts within the context, processes and threads, is in a network namespace with loopback alone.

    Raises `OSError` where the kernel refuses.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_libc.unshare(_NEW_NETWORK))
        try:
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))
            yield
        finally:
            _check(_libc.setns(before, _NEW_NETWORK))
    finally:
        os.close(before)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
