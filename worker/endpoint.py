"""The worker's end of the socket to its engine core: on a private path, for one process, never waiting for it."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger("pagelane.endpoint")


class EndpointError(Exception):
    """There can be no socket. The text is one line for the operator."""


class Endpoint:
    """A ZMQ PAIR at an ipc address. All methods are called on one event loop.

    Its directory has mode 0700, so that no other user reaches the path; of this user's processes the kernel tells the
    ids, and only one is let in. The directory goes as soon as that one has connected: then nobody can any more, and a
    worker that is killed leaves nothing behind.
    """

    def __init__(self, on_frame: Callable[[bytes], None]) -> None:
        """Choose the address; `on_frame` is given what comes. Raises `EndpointError`."""
        self._on_frame = on_frame
        self._outbox: deque[bytes] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._refused = False
        try:
            self._directory: Path | None = Path(tempfile.mkdtemp(prefix="pagelane-"))
        except OSError as error:
            raise EndpointError(
                f"its socket needs a temporary folder, and none can be made ({error}): set TMPDIR"
            ) from None
        self._path = self._directory / "core.sock"
        length = len(os.fsencode(self._path))
        if length > zmq.IPC_PATH_MAX_LEN:
            self._remove_directory()
            raise EndpointError(
                f"the path of its socket, {self._path}, has {length} bytes, but a socket's path has at most "
                f"{zmq.IPC_PATH_MAX_LEN}: set TMPDIR to a folder with a path shorter by {length - zmq.IPC_PATH_MAX_LEN}"
            )

    @property
    def address(self) -> str:
        """What the core connects to."""
        return f"ipc://{self._path}"

    def listen(self, pid: int) -> None:
        """Let process `pid` connect, and no other. Raises `EndpointError`.

        Before this nobody is let in; a core that comes earlier tries again.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        try:
            self._socket.setsockopt(zmq.IPC_FILTER_PID, pid)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPT_FAILED)
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            raise EndpointError(
                f"its socket {self._path} cannot be made ({error}): set TMPDIR to another folder"
            ) from None
        loop = asyncio.get_running_loop()
        loop.add_reader(int(self._socket.fd), self.exchange)
        loop.add_reader(int(self._monitor.fd), self._on_refusal, pid)
        self.exchange()  # a descriptor tells nothing until its socket has once said that there is nothing to do
        self._on_refusal(pid)

    def send(self, frame: bytes) -> None:
        """Send `frame` as soon as the core is there to take it."""
        self._outbox.append(frame)
        self.exchange()

    def exchange(self) -> None:
        """Send and take whatever can be.

        The socket's file descriptor is edge-triggered and any call on the socket can use up the edge, also that of the
        other direction. So both are exhausted until the socket itself says that nothing is left to do.
        """
        while self._exchange():
            pass

    def _exchange(self) -> bool:
        """Send and take once; True if the socket can do more."""
        if self._socket is not None:
            self._send_outbox(self._socket)
        self.drain()
        if self._socket is None:
            return False
        wanted = zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0)
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & wanted)

    def _send_outbox(self, socket: "zmq.Socket[bytes]") -> None:
        with contextlib.suppress(zmq.Again):  # the core has not connected yet; the descriptor tells when it does
            while self._outbox:
                socket.send(self._outbox[0], zmq.NOBLOCK)
                self._outbox.popleft()
                self._remove_directory()

    def drain(self) -> None:
        """Take everything that has come."""
        while self._socket is not None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frame(frame)

    def _on_refusal(self, pid: int) -> None:
        """Log the first connection that was not let in: who tries again would fill the log."""
        while self._monitor is not None:
            try:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if not self._refused:
                self._refused = True
                logger.warning("a connection to the engine core's socket was refused: only process %d may use it", pid)

    def close(self) -> None:
        """Close the socket and remove its directory. May be called at any time and more than once."""
        if self._socket is not None and self._context is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(int(self._socket.fd))
            if self._monitor is not None:
                loop.remove_reader(int(self._monitor.fd))
                self._socket.disable_monitor()
                self._monitor = None
            self._socket.close()
            self._context.destroy(linger=0)
            self._socket = self._context = None
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
