"""Stands in front of LiteLLM: who may ask, and for which routes. It does not read bodies.

LiteLLM is made for another place: without its database it answers a missing key with a traceback and a wrong one with a
word on its database, it lets every web page read its answers, and it shows some 500 routes, a control panel among them.
So every route that an agent needs is named here, and all others end here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from start_llm.core.errors import BadRequest, MethodNotAllowed, NotFound, StartLLMError
from start_llm.core.hosts import check_host, check_key, check_origin, preflight
from start_llm.core.protocol import RETRY_HEADER
from start_llm.proxy.asgi import JSON, START, error_answer

READY_BODY = b'{"status":"healthy","proxy_of":"start_llm"}'
_READY = re.compile(r"/health/(readiness|liveliness|liveness)")
_ROUTES = {
    "POST": re.compile(
        r"(/v1)?/(chat/completions|completions|messages|messages/count_tokens|responses|responses/input_tokens"
        r"|embeddings|audio/transcriptions|audio/speech)"
    ),
    "GET": re.compile(
        r"(/v1)?/(models|models/.+|responses/[^/]+|responses/[^/]+/input_items)|(/v[12])?/model/info|/model_group/info"
    ),
    "DELETE": re.compile(r"(/v1)?/responses/[^/]+"),
}
_VALUE = re.compile(rb"(?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?")
_WHERE = "This proxy's key is LITELLM_MASTER_KEY, in the file .env of the server's folder; `status` says where that is."
_RETRY = RETRY_HEADER.encode()
_KEY_HEADERS = {b"authorization", b"x-api-key", b"api-key", b"x-litellm-api-key", b"x-goog-api-key"}


class ProxyAccess:
    """ASGI middleware, the outermost.

    `key`: what every client must send, as a bearer token or ``x-api-key``. `names`: see `hosts.check_host`.
    """

    def __init__(self, app: ASGIApp, *, key: str, names: Collection[str]) -> None:
        self._app = app
        self._key = key
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers by itself what is refused, or needs no server; passes on the rest with no key but this proxy's."""
        if scope["type"] == "websocket":  # nothing that an agent needs
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        methods = [name for name, pattern in _ROUTES.items() if pattern.fullmatch(path)]
        origin, answer = None, None
        try:
            check_host(_only(headers, "Host") or "", self._names)
            if (page := _only(headers, "Origin")) is not None:
                check_origin(page)
            origin = page  # that of a page which may not ask is not told that it may read the error
            answer = self._own_answer(scope["method"], path, methods, headers, origin)
        except StartLLMError as error:
            answer = error_answer(path, error, _cors(origin))
        if answer is not None:
            await answer(scope, receive, send)
            return
        known = [header for header in scope["headers"] if header[0] not in _KEY_HEADERS]
        scope = dict(scope) | {"headers": [*known, (b"authorization", b"Bearer " + self._key.encode())]}
        await self._app(scope, receive, _with_own_headers(send, origin))

    def _own_answer(
        self, method: str, path: str, methods: Sequence[str], headers: Headers, origin: str | None
    ) -> Response | None:
        """What needs no server behind; ``None``: LiteLLM is to answer. Raises StartLLMError: it is refused."""
        if method in {"GET", "HEAD"} and _READY.fullmatch(path):
            return Response(READY_BODY, 200, _cors(origin), JSON)
        if not methods:
            raise NotFound("There is nothing at this path.")
        if method == "OPTIONS":
            allowed = preflight(methods, headers, is_page=origin is not None)
            return Response(status_code=204, headers=allowed | _cors(origin))
        if ("GET" if method == "HEAD" else method) not in methods:
            raise MethodNotAllowed(f"{method} is not allowed here, but {', '.join(methods)} is.", methods)
        check_key(headers, self._key, _WHERE)
        return None


def _only(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    if len(values) > 1:
        raise BadRequest(f"There is more than one {name} header.", param=name)
    return values[0] if values else None


def _with_own_headers(send: Send, origin: str | None) -> Send:
    """LiteLLM lets every page read its answers; here only the page that asked may, and only if it is a local one.

    It also puts words of the client into headers (the model's name). A line break there would end the connection. It
    renames `RETRY_HEADER`, which tells SDKs not to send again what is not supported: SDKs do not know it by that name.
    """
    added = Headers(_cors(origin)).raw

    async def restricted(message: Message) -> None:
        if message["type"] == START:
            kept = [
                (name, value)
                for name, value in message.get("headers", [])
                if not name.startswith(b"access-control-") and name != _RETRY and _VALUE.fullmatch(value)
            ]
            if message["status"] == HTTPStatus.NOT_IMPLEMENTED:
                kept.append((_RETRY, b"false"))
            message = dict(message) | {"headers": [*kept, *added]}
        await send(message)

    return restricted


def _cors(origin: str | None) -> dict[str, str]:
    if origin is None:
        return {}
    return {"access-control-allow-origin": origin, "access-control-expose-headers": "*", "vary": "Origin"}
