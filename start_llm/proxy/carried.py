"""Carries what only this server knows of a request through LiteLLM. Runs in its process; `child.py` loads it by path.

LiteLLM (1.106) passes chat completions on with every field, but leaves out of messages and responses what their vendors
do not know. An adapter goes with the model's name, which passes in every dialect; the rest of a Responses request
goes in `extra_body`, which LiteLLM unfolds. For messages there is no such place.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OUTBOUND = Path(__file__).with_name("outbound.py")
ADAPTER = "adapter"
SIGN = "+"
"""As `modelmap.ADAPTER_SIGN`; a test compares them."""
_PATHS = re.compile(r"(?:/v1)?/((?:chat/)?completions|messages(?:/count_tokens)?|responses(?:/input_tokens)?)")
_LENGTH = b"content-length"


class Carried:
    """ASGI middleware around LiteLLM, within the gate, which has bounded the body.

    Args:
        behind: the server's names of models by those that it does not know (PROXY_MODEL_ID).
    """

    def __init__(self, app: App, *, behind: Mapping[str, str]) -> None:
        self._app, self._behind = app, behind
        self._own: frozenset[str] = runpy.run_path(str(OUTBOUND))["OWN_PARAMETERS"] | {"top_k"}
        self._signs = re.compile("|".join(f'"{name}"' for name in sorted(self._own)).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _PATHS.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if path is None:
            await self._app(scope, receive, send)
            return
        parts = []
        while True:
            message = await receive()
            if message["type"] != "http.request":  # it has gone
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        raw = b"".join(parts)
        body = self._folded(path[1], raw)
        await self._app(with_length(scope, body), replay(body, receive), send)

    def _folded(self, dialect: str, raw: bytes) -> bytes:
        """`raw` itself, where there is nothing to carry or it is no request: the server says what is wrong with it."""
        if self._signs.search(raw) is None:
            return raw
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return raw
        if not isinstance(body, dict):
            return raw
        folded = self._with_adapter(body)
        own = {name: folded[name] for name in folded if name in self._own}
        if dialect == "responses" and own:
            nested = own.pop("extra_body", None)
            rest = {name: value for name, value in folded.items() if name not in self._own}
            folded = rest | {"extra_body": own | (nested if isinstance(nested, dict) else {})}
        return raw if folded == body else json.dumps(folded).encode()

    def _with_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        """With `adapter` as a part of the model's name, whatever it is: the server says what is wrong with it."""
        nested: Any = body.get("extra_body")
        if not isinstance(nested, dict):
            nested = {}
        adapter, model = body.get(ADAPTER), body.get("model")
        if adapter is None:
            adapter = nested.get(ADAPTER)
        if adapter is None or not isinstance(model, str):
            return body
        kept = {name: value for name, value in body.items() if name != ADAPTER}
        if ADAPTER in nested:
            kept["extra_body"] = {name: value for name, value in nested.items() if name != ADAPTER}
        return kept | {"model": f"{self._behind.get(model, model)}{SIGN}{adapter}"}


def with_length(scope: Scope, body: bytes) -> Scope:
    """`scope` of a request that has another body now."""
    headers = [header for header in scope["headers"] if header[0] not in (_LENGTH, b"transfer-encoding")]
    return dict(scope) | {"headers": [*headers, (_LENGTH, str(len(body)).encode())]}


def replay(body: bytes, receive: Receive) -> Receive:
    """A `Receive` that gives a whole body, and then what `receive` gives."""
    whole = [body]

    async def once() -> Message:
        if whole:
            return {"type": "http.request", "body": whole.pop(), "more_body": False}
        return await receive()

    return once
