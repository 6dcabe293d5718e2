"""Answers as bytes: heads, whole replies, errors. Knows no sockets."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus

from start_llm.api.common.dialect import Reply
from start_llm.api.common.routes import WrongMethod
from start_llm.api.common.run import CACHE_HEADER, ID_HEADER
from start_llm.api.http import sse
from start_llm.core.errors import StartLLMError
from start_llm.core.protocol import error_body, error_headers, style_of

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def encode_head(status: int, headers: Mapping[str, str], origin: str | None, *, close: bool) -> bytes:
    """Up to and with the empty line.

    Args:
        origin: of the web page that may read the answer.
        close: the connection takes no further request.
    """
    fields = {"Date": formatdate(usegmt=True), **headers}
    if origin is not None:
        fields["Access-Control-Allow-Origin"] = origin
        fields["Access-Control-Expose-Headers"] = f"{CACHE_HEADER}, {ID_HEADER}, retry-after"
        fields["Vary"] = "Origin"
    fields["Connection"] = "close" if close else "keep-alive"
    lines = [f"HTTP/1.1 {status} {_phrase(status)}", *(f"{name}: {_one_line(fields[name])}" for name in fields)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def encode_reply(reply: Reply, origin: str | None, *, close: bool, head_only: bool = False) -> bytes:
    """A whole answer. `head_only`: to a HEAD request, which gets no body."""
    headers = dict(reply.headers)
    if reply.status != HTTPStatus.NO_CONTENT:
        headers = {"Content-Type": reply.content_type, "Content-Length": str(len(reply.body)), **headers}
    head = encode_head(reply.status, headers, origin, close=close)
    return head if head_only else head + reply.body


def error_reply(error: StartLLMError, path: str) -> Reply:
    """The error in the dialect of `path`."""
    body, kind = error_body(error, style_of(path))
    headers = error_headers(error)
    if isinstance(error, WrongMethod):
        headers["Allow"] = ", ".join(error.allowed)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return Reply(sse.dumps(body), error.status, kind, headers)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _one_line(value: str) -> str:
    return value.replace("\r", " ").replace("\n", " ")
