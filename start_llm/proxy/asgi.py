"""What the layers around LiteLLM share: whole bodies, signs of life, and errors in the client's dialect.

It knows neither LiteLLM nor what a request asks for.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from start_llm.core.errors import StartLLMError, TooLarge
from start_llm.core.jsontext import LARGE
from start_llm.core.protocol import anthropic_error, error_headers, openai_error, responses_code

START = "http.response.start"
BODY = "http.response.body"
JSON = "application/json"
_OF_THE_BODY = (b"content-length", b"transfer-encoding")
_SIGN_OF_LIFE = re.compile(rb"(: ?ping|event: ping\r?\ndata: ?\{[^\n]*\})\s*")
CONVERSATIONS = ("chat/completions", "messages", "responses")
"""Paths behind ``/v1/`` that ask for an answer of a model."""
FORWARDED = (
    "messages/count_tokens", "responses/input_tokens", "completions", "embeddings", "audio/transcriptions",
    "audio/speech",
)  # fmt: skip
"""Paths behind ``/v1/`` that go past LiteLLM: it leaves out or refuses much of what these may ask for."""


def asked_for(scope: Scope) -> str:
    """The path of a POST, behind ``/v1/``; empty: the request is none."""
    is_post = scope["type"] == "http" and scope["method"] == "POST"
    return scope["path"].removeprefix("/v1").strip("/") if is_post else ""


async def read_body(receive: Receive, most_bytes: int) -> bytes | None:
    """The whole body; ``None`` if the client has gone. Raises TooLarge."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > most_bytes:
            raise TooLarge(f"The body may have at most {most_bytes} bytes.", code="body_too_large")
        if not message.get("more_body"):
            return bytes(body)


async def off_the_loop[T](size: int, read: Callable[..., T], *arguments: Any) -> T:
    """What `read` returns, which looks into a body of `size` bytes.

    A large one is read in a thread: all requests of the proxy share one event loop.
    """
    return await asyncio.to_thread(read, *arguments) if size > LARGE else read(*arguments)


def with_body(scope: Scope, body: bytes, content_type: str | None = None) -> Scope:
    """`scope` of a request that has this body now. `content_type` replaces the client's."""
    replaced = (*_OF_THE_BODY, b"content-type") if content_type else _OF_THE_BODY
    headers = [header for header in scope["headers"] if header[0] not in replaced]
    headers.append((b"content-length", str(len(body)).encode()))
    if content_type:
        headers.append((b"content-type", content_type.encode()))
    return dict(scope) | {"headers": headers}


def replay(body: bytes, receive: Receive) -> Receive:
    """A `Receive` that gives a whole body, and then what `receive` gives."""
    whole = [body]

    async def once() -> Message:
        if whole:
            return {"type": "http.request", "body": whole.pop(), "more_body": False}
        return await receive()

    return once


def error_answer(path: str, error: StartLLMError, headers: Mapping[str, str] | None = None) -> Response:
    """`error` in the dialect of `path`, which LiteLLM also knows without ``/v1``."""
    content = anthropic_error(error) if path.startswith(("/v1/messages", "/messages")) else openai_error(error)
    return Response(json.dumps(content), error.status, error_headers(error) | dict(headers or {}), JSON)


def says_something(message: Message) -> bool:
    """Whether a piece of the body is more than a sign of life."""
    body = message.get("body", b"")
    return bool(body) and _SIGN_OF_LIFE.fullmatch(body) is None


def last_event(dialect: str, error: dict[str, Any]) -> bytes:
    """An error as the last event of a stream, as the server would write it. `dialect`: a path of `CONVERSATIONS`."""
    if dialect == "chat/completions":
        return f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode()
    kind = "error"
    data: dict[str, Any] = {"type": kind, "error": error}
    if dialect == "responses":
        kind = "response.failed"
        failure = {"code": responses_code(str(error.get("type")), error.get("code")), "message": error["message"]}
        response: dict[str, Any] = {"id": "resp_refused", "object": "response", "created_at": int(time.time())}
        response |= {"status": "failed", "error": failure, "incomplete_details": None, "model": "", "output": []}
        data = {"type": kind, "sequence_number": 0, "response": response | {"usage": None}}
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()
