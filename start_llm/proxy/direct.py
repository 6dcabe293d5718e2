"""Puts a request straight to the server where LiteLLM fails on it by itself.

LiteLLM reads much of a body on the way and ends with a status of 500 where it does not understand it. The server
answers such a request, or says in a sentence what is wrong with it, as it does at its own port.
"""

from __future__ import annotations

import re

from starlette.requests import Request

from start_llm.proxy.asgi import START, App, Message, Receive, Scope, Send, read_body, replay
from start_llm.proxy.outcome import RequestOutcome, current
from start_llm.proxy.passthrough import ServerRoutes

_PATHS = re.compile(r"(?:/v1)?/(chat/completions|messages|responses)")


class Direct:
    """ASGI middleware around LiteLLM, within `bodies.RequestBodies`. Each request has a `RequestOutcome`."""

    def __init__(self, app: App, *, server: ServerRoutes, most_bytes: int) -> None:
        self._app, self._server, self._most_bytes = app, server, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        outcome = RequestOutcome()
        mark = current.set(outcome)
        try:
            await self._ask(outcome, scope, receive, send)
        finally:
            current.reset(mark)

    async def _ask(self, outcome: RequestOutcome, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or not _PATHS.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        body = await read_body(receive, self._most_bytes)
        if body is None:
            return
        failed = False

        async def unless_failed(message: Message) -> None:
            nonlocal failed
            if message["type"] == START:
                failed = message["status"] >= 500 and outcome.error is None
            if not failed:
                await send(message)

        await self._app(scope, replay(body, receive), unless_failed)
        if failed:
            response = await self._server.forward(Request(scope, replay(body, receive)))
            await response(scope, receive, send)
