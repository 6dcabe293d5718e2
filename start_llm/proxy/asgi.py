"""What the layers around LiteLLM share: the types of ASGI, whole bodies, and errors in the client's dialect.

It knows neither LiteLLM nor what a request asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from start_llm.core.errors import StartLLMError, TooLarge
from start_llm.core.protocol import anthropic_error, openai_error

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

START = "http.response.start"
BODY = "http.response.body"
JSON = b"application/json"
_OF_THE_BODY = (b"content-length", b"transfer-encoding")
_CONVERSATION = re.compile(r"(?:/v1)?/(chat/completions|messages|responses)")


def dialect_of(scope: Scope) -> str | None:
    """``chat/completions``, ``messages`` or ``responses``; ``None`` where no answer of a model is asked for."""
    path = _CONVERSATION.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
    return path and path[1]


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Values of the header `name` (lower case), in their order."""
    return [value for known, value in scope["headers"] if known == name]


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


def with_body(scope: Scope, body: bytes, content_type: bytes | None = None) -> Scope:
    """`scope` of a request that has this body now. `content_type` replaces the client's."""
    replaced = (*_OF_THE_BODY, b"content-type") if content_type else _OF_THE_BODY
    headers = [header for header in scope["headers"] if header[0] not in replaced]
    headers.append((b"content-length", str(len(body)).encode()))
    if content_type:
        headers.append((b"content-type", content_type))
    return dict(scope) | {"headers": headers}


def replay(body: bytes, receive: Receive) -> Receive:
    """A `Receive` that gives a whole body, and then what `receive` gives."""
    whole = [body]

    async def once() -> Message:
        if whole:
            return {"type": "http.request", "body": whole.pop(), "more_body": False}
        return await receive()

    return once


async def send_answer(send: Send, status: int, body: bytes = b"", headers: Iterable[Header] = ()) -> None:
    """A whole answer; without a body it has no content type."""
    length = [(b"content-length", str(len(body)).encode())] if status != 204 else []
    typed = [(b"content-type", JSON)] if body else []
    await send({"type": START, "status": status, "headers": [*typed, *length, *headers]})
    await send({"type": BODY, "body": body})


async def send_error(send: Send, path: str, error: StartLLMError, headers: Iterable[Header] = ()) -> None:
    """`error` in the dialect of `path`, which LiteLLM also knows without ``/v1``."""
    content = anthropic_error(error) if path.startswith(("/v1/messages", "/messages")) else openai_error(error)
    await send_answer(send, error.status, json.dumps(content).encode(), headers)
