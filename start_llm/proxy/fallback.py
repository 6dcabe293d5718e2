"""Sends what this server cannot answer to FALLBACK_MODEL. Part of LiteLLM's process.

LiteLLM's own `fallbacks` follow upon every error, a bad request's too. The server says by a header which errors are its
own: the request is sound, and another model could answer it. Only such a request is put to LiteLLM a second time, by
the name of the entry of FALLBACK_MODEL. All the rest is LiteLLM's: the way to the provider, retries and cool-downs.
"""

from __future__ import annotations

import json
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from start_llm.proxy.asgi import BODY, START, dialect_of, last_event, off_the_loop, replay, says_something, with_body
from start_llm.proxy.outcome import RequestOutcome, current
from start_llm.proxy.own_fields import for_provider
from start_llm.proxy.sent import SentRecord

HEADER = "x-start-llm-fallback"
"""Of a request: ``off`` (or ``on``). Of an answer: ``MODEL; REASON``, then ``; failed`` with the server's own error."""


class Fallback:
    """ASGI middleware around LiteLLM, within `bodies.RequestBodies`: a body comes in one message.

    `model`: FALLBACK_MODEL; `name`: of its entry in LiteLLM's configuration; `record`: the file of `sent.SentRecord`.
    """

    def __init__(self, app: ASGIApp, *, model: str, name: str, record: str) -> None:
        self._app = app
        self._model, self._name = model, name
        self._record = SentRecord(Path(record))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect, outcome = dialect_of(scope), current.get() or RequestOutcome()
        if dialect is None:
            await self._app(scope, receive, send)
            return
        kept_body, first = _KeptBody(receive), _FirstAnswer(dialect, send, outcome)
        await self._ask_litellm(outcome, scope, kept_body, first)
        if outcome.reason and first.kept and not _asks_off(scope):
            await self._ask_fallback(dialect, scope, kept_body, first, outcome.reason)
        elif first.kept:
            await first.release()

    async def _ask_litellm(self, outcome: RequestOutcome, scope: Scope, receive: Receive, send: Send) -> None:
        current.set(outcome)
        await self._app(dict(scope) | {"state": dict(scope.get("state") or {})}, receive, send)

    async def _ask_fallback(
        self, dialect: str, scope: Scope, kept_body: _KeptBody, first: _FirstAnswer, reason: str
    ) -> None:
        """The server has refused with `reason`; its answer was kept back."""
        raw = b"" if kept_body.client_left else kept_body.body
        body = await off_the_loop(len(raw), self._provider_body, dialect, raw) if raw else None
        if body is None:
            await first.release()
            return
        outcome, label = RequestOutcome(of_fallback=True), f"{self._model}; {reason}"
        second = _SecondAnswer(first, outcome, label)
        await self._ask_litellm(outcome, with_body(scope, body), replay(body, kept_body), second)
        if not second.arrived:
            await first.release(f"{label}; failed")
        self._record.add(reason, ok=second.arrived)

    def _provider_body(self, dialect: str, raw: bytes) -> bytes | None:
        """What is sent; ``None``: this request must stay here."""
        body = json.loads(raw)
        if body.get("disable_fallbacks") or body.get("previous_response_id"):
            return None
        return json.dumps(for_provider(dialect, body) | {"model": self._name}).encode()


class _KeptBody:
    """A `Receive` that keeps the body for a second time."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.body = b""
        self.client_left = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.client_left = self.client_left or message["type"] == "http.disconnect"
        self.body = message.get("body", b"") or self.body
        return message


class _FirstAnswer:
    """A `Send` that passes LiteLLM's first answer on, unless it is the server's refusal: that is kept.

    So is an error of any kind that comes when the head of a stream and signs of life are out: LiteLLM writes it
    without the server's words, and in one form for all dialects.
    """

    def __init__(self, dialect: str, send: Send, outcome: RequestOutcome) -> None:
        self._dialect = dialect
        self.send = send
        self._outcome = outcome
        self.head_sent = False  # the client has the head of a stream, and signs of life
        self._final = False  # what was passed on cannot be taken back
        self.kept: list[Message] = []  # of the answer

    async def __call__(self, message: Message) -> None:
        refused = self._outcome.failed and (self.head_sent or self._outcome.reason is not None)
        if self.kept or (refused and not self._final):
            self.kept.append(message)
            return
        if message["type"] == START:
            self.head_sent = message["status"] < 400
            self._final = not self.head_sent
        elif says_something(message):
            self._final = True
        await self.send(message)

    async def release(self, label: str = "") -> None:
        """Sends what was kept. `label`: the value of `HEADER`."""
        if not self.head_sent:
            for message in self.kept:
                await self.send(_with_header(message, label) if label and message["type"] == START else message)
            return
        body = b"".join(message.get("body", b"") for message in self.kept)
        if self._outcome.error is not None:
            body = last_event(self._dialect, self._outcome.error)
        elif self.kept[0]["type"] == START:
            body = b"data: " + body + b"\n\ndata: [DONE]\n\n"
        await self.send({"type": BODY, "body": (_comment(label) if label else b"") + body})


class _SecondAnswer:
    """A `Send` for the answer of FALLBACK_MODEL. It passes nothing on of an error: the server's own is better."""

    def __init__(self, first: _FirstAnswer, outcome: RequestOutcome, label: str) -> None:
        self._first = first
        self._outcome = outcome
        self._label = label
        self._is_answer = False
        self.arrived = False  # the answer has gone to the client

    async def __call__(self, message: Message) -> None:
        if message["type"] == START:
            await self._start(message)
        elif self._is_answer and (self.arrived or not self._outcome.failed):
            self.arrived = self.arrived or says_something(message) or not message.get("more_body")
            await self._first.send(message)

    async def _start(self, message: Message) -> None:
        self._is_answer = message["status"] < 400
        if not self._is_answer:
            return
        message = _with_header(message, self._label)
        if self._first.head_sent:  # the head is out, so the stream says it
            message = {"type": BODY, "body": _comment(self._label), "more_body": True}
        self._first.head_sent = True
        await self._first.send(message)


def _asks_off(scope: Scope) -> bool:
    """Whatever else a client writes there, it does not say yes."""
    return any(name == HEADER.encode() and value.strip().lower() != b"on" for name, value in scope["headers"])


def _comment(label: str) -> bytes:
    """Of an event stream: clients pass it over, people find it."""
    return f": {HEADER}: {label}\n\n".encode()


def _with_header(message: Message, label: str) -> Message:
    return dict(message) | {"headers": [*message.get("headers", []), (HEADER.encode(), label.encode())]}
