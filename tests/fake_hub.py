"""A hub on loopback that serves one repository: the routes that huggingface_hub needs, and faults on demand."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

REPO = "tiny-org/tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: dict[str, str]
    server: str


@dataclass
class FakeHub:
    """State of the hub, to be changed by a test between requests."""

    files: dict[str, bytes] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str | None = None
    """What a client must send to read the repository."""
    status: int | None = None
    """Answer everything with this status."""
    cut_after: int | None = None
    """Close the connection after so many bytes of the next file that is larger; once."""
    silent: str | None = None
    """Never answer a path that holds this."""
    redirect: str | None = None
    """Where files are said to lie instead."""
    requests: list[Request] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def downloaded(self) -> set[str]:
        """Names of the files that were sent."""
        return {request.path.split("/")[-1] for request in self.requests if request.method == "GET"} & set(self.files)


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a model directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    name: str

    def log_message(self, *args: object) -> None:
        """Not to stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(Request(self.command, path, {k.lower(): v for k, v in self.headers.items()}, self.name))
        if hub.silent is not None and hub.silent in path:
            hub.closing.wait(30.0)
            self.close_connection = True
        elif hub.status is not None:
            self._send(hub.status, b"{}")
        elif path.startswith("/files/"):
            self._send_file(path.removeprefix("/files/"), {})
        elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(403 if "Authorization" in self.headers else 401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith(f"/api/models/{REPO}/"):
            self._api(path.removeprefix(f"/api/models/{REPO}/"))
        elif path.startswith(f"/{REPO}/resolve/"):
            _, name = path.removeprefix(f"/{REPO}/resolve/").split("/", 1)
            self._resolve(name)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _api(self, path: str) -> None:
        kind, _, rest = path.partition("/")
        commit = self.hub.branches.get(rest.split("/")[0], rest if rest in self.hub.branches.values() else None)
        if commit is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "revision":
            detailed = "blobs" in parse_qs(urlsplit(self.path).query)
            siblings = [
                {"rfilename": name} | ({"size": len(content), "blobId": _etag(content)} if detailed else {})
                for name, content in self.hub.files.items()
            ]
            self._send(200, json.dumps({"id": REPO, "sha": commit, "siblings": siblings}).encode())
        else:
            listing = [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in self.hub.files.items()
            ]
            self._send(200, json.dumps(listing).encode())

    def _resolve(self, name: str) -> None:
        content = self.hub.files.get(name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        facts = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(content)}"', "X-Linked-Size": str(len(content))}
        if self.hub.redirect is None:
            self._send_file(name, facts)
        else:
            facts |= {"X-Linked-Etag": facts["ETag"], "Location": f"{self.hub.redirect}/files/{name}"}
            self._send(302, b"", facts)

    def _send_file(self, name: str, facts: dict[str, str]) -> None:
        content = self.hub.files[name]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if first:
            facts = facts | {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
        self._send(206 if first else 200, content[first:], facts)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_after
        if cut is not None and len(body) > cut:
            self.hub.cut_after = None
            self.wfile.write(body[:cut])
            self.close_connection = True
        else:
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve(hub: FakeHub, name: str = "hub") -> Iterator[str]:
    """Serve `hub` on a free port of loopback; yields the URL."""
    handler = type("Handler", (_Handler,), {"hub": hub, "name": name})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
