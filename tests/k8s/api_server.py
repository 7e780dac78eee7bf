"""A stand-in Kubernetes API server on loopback, by plain HTTP: enough for Dynamo's discovery, helm and kubectl.

Serves list, watch, get, create, update, patch (apply and merge) and delete for what its store has, asks RBAC for each
call with a ServiceAccount's token, and remembers all calls.
"""

import json
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

from tests.k8s.api_kinds import describe
from tests.k8s.api_requests import Request, decode, perform, watch
from tests.k8s.api_rules import Account, allowed
from tests.k8s.api_store import ApiError, Object, Store

_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/(?P<version>[^/]+))(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Call(NamedTuple):
    """One call, and what came of it."""

    account: str
    """Name of a ServiceAccount, `admin`, or empty for a caller without a known token."""
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    code: int


class ApiServer:
    """Serves a store while the context lasts."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: list[Call] = []
        self.admin_token = secrets.token_hex(8)
        self._accounts: dict[str, Account] = {}
        self.over = False
        self.down = False
        handler = type("Handler", (_Handler,), {"api": self})
        self._http = _Threads(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="api-server", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def token(self, account: Account) -> str:
        """A new token for a ServiceAccount."""
        token = secrets.token_hex(8)
        self._accounts[token] = account
        return token

    def kubeconfig(self, token: str, namespace: str) -> str:
        """The text of a configuration for clients. An empty token is a caller whom nobody knows."""
        # Go's clients send no token by plain HTTP: the administrator's is part of the path.
        server = f"{self.url}/{token}" if token == self.admin_token else self.url
        user = {"token": token} if token else {}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "here", "cluster": {"server": server}}],
                "users": [{"name": "me", "user": user}],
                "contexts": [{"name": "it", "context": {"cluster": "here", "user": "me", "namespace": namespace}}],
                "current-context": "it",
            }
        )

    def caller(self, authorization: str) -> Account | None:
        """Whose token it is; None for nobody's, and for the administrator's."""
        return self._accounts.get(authorization.removeprefix("Bearer "))

    def authorize(self, authorization: str, request: Request) -> None:
        """Raises `ApiError` if the caller may not do this."""
        if authorization == f"Bearer {self.admin_token}":
            return
        account = self.caller(authorization)
        verbs = [request.verb]
        # An apply that makes the object is a create, too.
        if request.verb == "patch" and not self.store.find(request.resource, request.namespace, request.name):
            verbs.append("create")
        for verb in verbs:
            if account is None or not allowed(self.store, account, verb, request):
                what = f'cannot {verb} resource "{request.resource.plural}" in API group "{request.resource.group}"'
                raise ApiError(403, "Forbidden", f'forbidden: User "{account or "system:anonymous"}" {what}')

    @contextmanager
    def away(self) -> Iterator[None]:
        """Watches end, and calls are answered 503, until the context is left."""
        self.down = True
        try:
            yield
        finally:
            self.down = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        with self.store.changed:
            self.store.changed.notify_all()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Threads(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the calls are remembered."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        prefix = f"/{self.api.admin_token}"
        if self.path.startswith(prefix):
            self.path = self.path.removeprefix(prefix)
            self.headers["Authorization"] = f"Bearer {self.api.admin_token}"
        try:
            if self.api.down:
                raise ApiError(503, "ServiceUnavailable", "the server is down")
            request = self._request(body)
            if request is None:
                described = describe(urlsplit(self.path).path, self.api.store.resources())
                self._answer(200, described)
            else:
                self._carry_out(request)
        except ApiError as error:
            self._refuse(error)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _request(self, body: bytes) -> Request | None:
        """What is asked for; None if it is no object. Raises `ApiError` for a resource that is not there."""
        parts = urlsplit(self.path)
        match = _PATH.fullmatch(parts.path)
        if match is None:
            return None
        where = (match["group"] or "", match["version"] or "v1", match["plural"])
        found = [one for one in self.api.store.resources() if (one.group, one.version, one.plural) == where]
        if not found or match["sub"]:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        query = dict(parse_qsl(parts.query))
        verb = _VERBS[self.command]
        if not match["name"] and verb == "get":
            verb = "watch" if query.get("watch") in ("1", "true") else "list"
        content_type = self.headers.get("Content-Type") or ""
        content = decode(content_type, body) if body and verb != "delete" else {}
        return Request(verb, found[0], match["namespace"] or "", match["name"] or "", query, content, content_type)

    def _carry_out(self, request: Request) -> None:
        code = 200
        try:
            self.api.authorize(self.headers.get("Authorization") or "", request)
            if request.verb == "watch":
                self._note(request, 200)
                self._watch(request)
                return
            code, answer = perform(self.api.store, request)
        except ApiError as error:
            self._note(request, error.code)
            raise
        self._note(request, code)
        self._answer(code, answer)

    def _note(self, request: Request, code: int) -> None:
        authorization = self.headers.get("Authorization") or ""
        account = self.api.caller(authorization)
        name = account.name if account else "admin" if authorization == f"Bearer {self.api.admin_token}" else ""
        resource = request.resource
        call = Call(name, request.verb, resource.group, resource.plural, request.namespace, request.name, code)
        self.api.calls.append(call)

    def _answer(self, code: int, body: Object) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, error: ApiError) -> None:
        status = {"status": "Failure", "reason": error.reason, "message": str(error), "code": error.code}
        self._answer(error.code, {"kind": "Status", "apiVersion": "v1", "metadata": {}, **status})

    def _watch(self, request: Request) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            watch(self.api.store, request, self._line, lambda: self.api.over or self.api.down)
        except ConnectionError:
            return

    def _line(self, kind: str, obj: Object) -> None:
        self.wfile.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")
