"""What a worker, its engine core and the frontend listen on under loopback settings: loopback."""

import os
import socket
import struct
from pathlib import Path

import psutil

from tests.stack import Stack

LISTEN = "0A"
LOOPBACK = {"127.0.0.1", "::1"}


def inodes(pid: int) -> set[str]:
    """Sockets that a process holds."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def address(text: str) -> str:
    """The address of /proc/net/tcp and tcp6: words of 32 bits in the machine's byte order."""
    host, _ = text.split(":")
    words = struct.pack(f"={len(host) // 8}I", *(int(host[i : i + 8], 16) for i in range(0, len(host), 8)))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def tcp_listeners(pid: int) -> list[tuple[str, int]]:
    """Address and port of every TCP socket on which a process listens."""
    own, found = inodes(pid), []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in own:
                found.append((address(fields[1]), int(fields[1].split(":")[1], 16)))
    return found


def unix_listeners(pid: int) -> list[str]:
    """Paths of the unix sockets on which a process listens."""
    own = inodes(pid)
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [row[7] if len(row) > 7 else "" for row in rows if int(row[3], 16) & 0x10000 and row[6] in own]


def test_nothing_listens_beyond_the_configured_addresses(stack: Stack):
    worker = psutil.Process(stack.workers[0].child.pid)
    assert stack.local.frontend is not None
    frontend = tcp_listeners(stack.local.frontend.pid)
    listening = tcp_listeners(worker.pid)
    assert {stack.local.port} <= {port for _, port in frontend}  # so that an empty list would show
    assert stack.workers[0].system_port in {port for _, port in listening}
    assert {host for host, _ in frontend} <= LOOPBACK
    assert {host for host, _ in listening} <= LOOPBACK
    assert {host for host, _ in tcp_listeners(os.getpid())} <= LOOPBACK  # the launcher holds the broker of events


def test_the_core_listens_on_nothing_and_the_path_to_its_socket_is_gone(stack: Stack):
    worker = psutil.Process(stack.workers[0].child.pid)
    (core,) = worker.children(recursive=True)
    assert (tcp_listeners(core.pid), unix_listeners(core.pid)) == ([], [])
    (path,) = unix_listeners(worker.pid)
    assert path.endswith("/core.sock")
    assert not Path(path).parent.exists()
