"""Answers as bytes: heads and whole replies. Knows no sockets, and not what a body says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus

from start_llm.api.http.routes import Reply
from start_llm.core.protocol import status_phrase

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CACHE_HEADER = "x-start-llm-cache"
ID_HEADER = "x-request-id"
ANTHROPIC_ID_HEADER = "request-id"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Beside the content's type."""


def encode_head(status: int, headers: Mapping[str, str], origin: str | None, *, close: bool) -> bytes:
    """Up to and with the empty line. `origin`: of the web page that may read the answer."""
    fields = {"Date": formatdate(usegmt=True), **headers}
    if origin is not None:
        fields["Access-Control-Allow-Origin"] = origin
        fields["Access-Control-Expose-Headers"] = f"{CACHE_HEADER}, {ID_HEADER}, retry-after"
        fields["Vary"] = "Origin"
    fields["Connection"] = "close" if close else "keep-alive"
    lines = [f"HTTP/1.1 {status} {status_phrase(status)}", *(f"{name}: {value}" for name, value in fields.items())]
    one_line_each = (re.sub(r"[\r\n]", " ", line) for line in lines)
    return ("\r\n".join(one_line_each) + "\r\n\r\n").encode("latin-1", "replace")


def encode_reply(reply: Reply, origin: str | None, *, close: bool, head_only: bool = False) -> bytes:
    """A whole answer. `head_only`: to a HEAD request, which gets no body."""
    headers = dict(reply.headers)
    if reply.status != HTTPStatus.NO_CONTENT:
        headers = {"Content-Type": reply.content_type, "Content-Length": str(len(reply.body)), **headers}
    head = encode_head(reply.status, headers, origin, close=close)
    return head if head_only else head + reply.body
