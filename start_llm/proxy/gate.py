"""What stands in front of LiteLLM: who may ask, and for what. Runs in LiteLLM's process; `child.py` loads it by path.

LiteLLM is made for another place: without its database it answers a missing key with a traceback and a wrong one with a
word on its database, it lets every web page read its answers, and it shows some 500 routes, a control panel among them.
So everything that an agent needs is named here, and all else ends here.
"""

from __future__ import annotations

import hmac
import json
import re
import runpy
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

HOSTS = Path(__file__).parents[1] / "core" / "hosts.py"

READY_BODY = b'{"status":"healthy","proxy_of":"start_llm"}'
_READY = re.compile(r"/health/(readiness|liveliness|liveness)")
_ROUTES = {
    "POST": re.compile(
        r"(/v1)?/(chat/completions|completions|messages|messages/count_tokens|responses|responses/input_tokens"
        r"|embeddings|rerank|audio/transcriptions|audio/speech)"
    ),
    "GET": re.compile(
        r"(/v1)?/(models|models/.+|responses/[^/]+|responses/[^/]+/input_items)|(/v[12])?/model/info|/model_group/info"
    ),
    "DELETE": re.compile(r"(/v1)?/responses/[^/]+"),
}
_KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key", b"x-litellm-api-key", b"x-goog-api-key")
_TYPES = {  # OpenAI's and Anthropic's word for a kind of error
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
}


class GateRefusal(Exception):
    """A request that ends here. The message is one sentence for the client."""

    def __init__(self, status: int, message: str, headers: Iterable[Header] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = list(headers)


class ProxyGate:
    """ASGI middleware, the outermost.

    Args:
        key: what every client must send, as a bearer token or ``x-api-key``.
        names: by which it may be called, beside this machine's own and IP addresses, see `hosts.host_allowed`.
        most_bytes: of a request's body.
    """

    def __init__(self, app: App, *, key: str, names: list[str], most_bytes: int) -> None:
        self._app = app
        self._key = key.encode()
        self._names = names
        self._most_bytes = most_bytes
        rules = runpy.run_path(str(HOSTS))
        self._host_name, self._host_allowed = rules["host_name"], rules["host_allowed"]
        self._origin_allowed = rules["origin_allowed"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # nothing that an agent needs
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin: bytes | None = None
        try:
            self._check_host(_values(scope, b"host"))
            origin = self._check_origin(_values(scope, b"origin"))
            if scope["method"] == "OPTIONS":
                await _answer(send, 204, b"", _preflight(scope, origin))
                return
            if scope["method"] in {"GET", "HEAD"} and _READY.fullmatch(scope["path"]):
                await _answer(send, 200, READY_BODY, _shared(origin))
                return
            _check_route(scope["method"], scope["path"])
            self._check_key(scope)
            self._check_length(_values(scope, b"content-length"))
        except GateRefusal as refused:
            body = _error_body(scope["path"], refused)
            await _answer(send, refused.status, body, [*refused.headers, *_shared(origin)])
            return
        known = [header for header in scope["headers"] if header[0] not in _KEY_HEADERS]
        scope = dict(scope) | {"headers": [*known, (b"authorization", b"Bearer " + self._key)]}
        await self._app(scope, _bounded(receive, self._most_bytes), _with_origin(send, origin))

    def _check_host(self, values: list[bytes]) -> None:
        if len(values) > 1:
            raise GateRefusal(400, "There is more than one Host header.")
        host = values[0].decode("latin-1") if values else ""
        name = self._host_name(host) if host else None
        if name is None:
            raise GateRefusal(400, f"Host {host[:80]!r} is no host name.")
        if not self._host_allowed(name, names=self._names):
            use = "Use localhost or an IP address, or add it to ALLOWED_HOSTS"
            raise GateRefusal(403, f"Host {host[:80]!r} is not this machine. {use}.")

    def _check_origin(self, values: list[bytes]) -> bytes | None:
        if not values:
            return None
        origin = values[0].decode("latin-1")
        if len(values) > 1 or not self._origin_allowed(origin):
            raise GateRefusal(403, f"Origin {origin[:80]!r} may not use this server; only pages of localhost may.")
        return values[0]

    def _check_key(self, scope: Scope) -> None:
        offered = [value.strip() for name in _KEY_HEADERS[1:3] for value in _values(scope, name)]
        for value in _values(scope, b"authorization"):
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                offered.append(token.strip())
        if not any(hmac.compare_digest(key, self._key) for key in offered):
            how = "A valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise GateRefusal(401, how, [(b"www-authenticate", b"Bearer")])

    def _check_length(self, values: list[bytes]) -> None:
        if any(value.isdigit() and int(value[:20]) > self._most_bytes for value in values):
            raise GateRefusal(413, f"The body may have at most {self._most_bytes} bytes.")


def _check_route(method: str, path: str) -> None:
    wanted = _ROUTES.get("GET" if method == "HEAD" else method)
    if wanted is not None and wanted.fullmatch(path):
        return
    known = [name for name, pattern in _ROUTES.items() if pattern.fullmatch(path)]
    if known:
        allowed = ", ".join(known)
        raise GateRefusal(405, f"{method} is not allowed here, but {allowed} is.", [(b"allow", allowed.encode())])
    raise GateRefusal(404, "There is nothing at this path.")


def _bounded(receive: Receive, most_bytes: int) -> Receive:
    """A body without Content-Length that gets too long ends as if the client had gone."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return message if seen <= most_bytes else {"type": "http.disconnect"}

    return counted


def _with_origin(send: Send, origin: bytes | None) -> Send:
    """LiteLLM lets every page read its answers; here only the page that asked may, and only if it is a local one."""

    async def shared(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [header for header in message.get("headers", []) if not header[0].startswith(b"access-control-")]
            message = dict(message) | {"headers": [*kept, *_shared(origin)]}
        await send(message)

    return shared


def _shared(origin: bytes | None) -> list[Header]:
    if origin is None:
        return []
    names = [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", b"*")]
    return [*names, (b"vary", b"Origin")]


def _preflight(scope: Scope, origin: bytes | None) -> list[Header]:
    methods = ", ".join(name for name, pattern in _ROUTES.items() if pattern.fullmatch(scope["path"]))
    if not methods:
        raise GateRefusal(404, "There is nothing at this path.")
    if origin is None:
        return [(b"allow", methods.encode())]
    asked = next(iter(_values(scope, b"access-control-request-headers")), b"authorization, content-type, x-api-key")
    allowed = [(b"access-control-allow-methods", methods.encode()), (b"access-control-allow-headers", asked)]
    return [(b"allow", methods.encode()), *allowed, (b"access-control-max-age", b"600"), *_shared(origin)]


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for known, value in scope["headers"] if known == name]


def _error_body(path: str, refused: GateRefusal) -> bytes:
    error = {"type": _TYPES[refused.status], "message": refused.message}
    if path.startswith(("/v1/messages", "/messages")):
        return json.dumps({"type": "error", "error": error}).encode()
    code = "invalid_api_key" if refused.status == 401 else None
    return json.dumps({"error": error | {"param": None, "code": code}}).encode()


async def _answer(send: Send, status: int, body: bytes, headers: list[Header]) -> None:
    kind = [(b"content-type", b"application/json")] if body else []
    length = [(b"content-length", str(len(body)).encode())] if status != 204 else []
    await send({"type": "http.response.start", "status": status, "headers": [*kind, *length, *headers]})
    await send({"type": "http.response.body", "body": body})
