"""What this server cannot answer is sent to FALLBACK_MODEL. Runs in LiteLLM's process; `child.py` loads it by path.

LiteLLM's own `fallbacks` follow upon every error, a bad request's too. The server says by a header which errors are its
own: the request is sound, and another model could answer it. Only such a request is put to LiteLLM a second time, by
the name of the entry of FALLBACK_MODEL. All the rest is LiteLLM's: the way to the provider, retries and cool-downs.

Used of LiteLLM: the hooks of its `CustomLogger`, and its application as an ASGI app.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from litellm.integrations.custom_logger import CustomLogger

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CARRIED = Path(__file__).with_name("carried.py")
OUTBOUND = Path(__file__).with_name("outbound.py")
REFUSAL_HEADER = "x-start-llm-refusal"
"""The server's word for why it cannot answer a sound request."""
HEADER = "x-start-llm-fallback"
"""Of a request: ``off`` (or ``on``). Of an answer: ``MODEL; REASON``, then ``; failed`` with the server's own error."""
START = "http.response.start"
_PATHS = re.compile(r"(?:/v1)?/((?:chat/)?completions|messages|responses)")
_SIGN_OF_LIFE = re.compile(rb"(: ?ping|event: ping\r?\ndata: ?\{[^\n]*\})\s*")
_WORD = re.compile(r"[a-z_]{1,40}")
_CODES = {"context_length_exceeded": "context_length_exceeded", "queue_full": "rate_limit_exceeded"}
"""Words of the Responses API for the server's, as in `api/openai/responses_stream`."""
_BODY_NAMES = ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks")


@dataclass(slots=True)
class _Note:
    """What LiteLLM's hooks tell of one request while it passes.

    Attributes:
        second: it is FALLBACK_MODEL that is asked.
        reason: the server's `REFUSAL_HEADER`.
        error: the server's own error object.
    """

    second: bool = False
    failed: bool = False
    reason: str | None = None
    error: dict[str, Any] | None = None


_note: ContextVar[_Note | None] = ContextVar("start_llm_fallback", default=None)


class Hooks(CustomLogger):  # type: ignore[misc]  # LiteLLM is not typed
    """LiteLLM calls them while a request passes.

    Args:
        name: of the entry of FALLBACK_MODEL, which nobody else may ask for.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> None:
        """Raises HTTPException for a client that asks for the entry itself: nothing goes there but what is counted."""
        note = _note.get()
        if note is not None and note.second:
            return
        asked = [data.get("model"), *(data.get(name) for name in _BODY_NAMES)]
        if any(self._name in str(one) for one in asked if one):
            raise HTTPException(404, f"{self._name!r} cannot be asked for: it gets what this server cannot answer.")

    async def async_filter_listed_models(self, user_api_key_dict: Any, model_names: Sequence[str]) -> Sequence[str]:
        return [name for name in model_names if name != self._name]

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> None:
        note = _note.get()
        if note is not None:
            note.failed, note.reason = True, note.reason or _refusal(original_exception)
            note.error = note.error or _own_error(original_exception)


def _refusal(error: Any) -> str | None:
    """The server's word in the headers of its answer, which LiteLLM keeps in several places of its errors."""
    places = (error, getattr(error, "response", None))
    found = [getattr(place, "headers", None) for place in places] + [getattr(error, "litellm_response_headers", None)]
    for headers in found:
        if isinstance(headers, Mapping):
            for name, value in headers.items():
                if str(name).lower().removeprefix("llm_provider-") == REFUSAL_HEADER and _WORD.fullmatch(str(value)):
                    return str(value)
    return None


def _own_error(error: Exception) -> dict[str, Any] | None:
    """The server's error object, which LiteLLM keeps as text behind words of its own."""
    text = str(getattr(error, "message", error))
    begin = text.find("{")
    try:
        body = json.JSONDecoder().raw_decode(text[begin:])[0] if begin >= 0 else {}
    except (ValueError, RecursionError):
        return None
    found = body.get("error")
    return found if isinstance(found, dict) and isinstance(found.get("message"), str) else None


class Fallback:
    """ASGI middleware around LiteLLM, within the gate.

    Args:
        model: FALLBACK_MODEL.
        name: of its entry in LiteLLM's configuration.
        record: file that tells what was sent, see `_Record`.
    """

    def __init__(self, app: App, *, model: str, name: str, record: str) -> None:
        self._app = app
        self._model, self._name = model, name
        self._record = _Record(Path(record))
        self._outbound = runpy.run_path(str(OUTBOUND))["for_elsewhere"]
        carried = runpy.run_path(str(CARRIED))
        self._with_length, self._replay = carried["with_length"], carried["replay"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _PATHS.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if path is None:
            await self._app(scope, receive, send)
            return
        note, taken = _Note(), _Taken(receive)
        first = _First(path[1], send, note, taken)
        await self._run(note, scope, taken, first)
        if note.reason and first.kept and path[1] != "completions" and not _asks_off(scope):
            await self._again(path[1], scope, taken, first, note.reason)
        elif first.kept:
            await first.let_go()

    async def _run(self, note: _Note, scope: Scope, receive: Receive, send: Send) -> None:
        mark = _note.set(note)
        try:
            await self._app(dict(scope) | {"state": dict(scope.get("state") or {})}, receive, send)
        finally:
            _note.reset(mark)

    async def _again(self, dialect: str, scope: Scope, taken: _Taken, first: _First, reason: str) -> None:
        """The server has refused with `reason`; its answer was kept back."""
        body = None if taken.gone else self._body(dialect, taken.body)
        if body is None:
            await first.let_go()
            return
        note, told = _Note(second=True), f"{self._model}; {reason}"
        second = _Second(first, note, told)
        await self._run(note, self._with_length(scope, body), self._replay(body, taken), second)
        if not second.went:
            await first.let_go(f"{told}; failed")
        self._record.add(reason, ok=second.went)

    def _body(self, dialect: str, raw: bytes) -> bytes | None:
        """What is sent; ``None``: this request must stay here."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict) or body.get("disable_fallbacks") or body.get("previous_response_id"):
            return None
        return json.dumps(self._outbound(dialect, body) | {"model": self._name}).encode()


class _Taken:
    """A `Receive` that keeps the body for a second time."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._parts: list[bytes] = []
        self.keeps = True
        self.gone = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.gone = self.gone or message["type"] == "http.disconnect"
        if self.keeps:
            self._parts.append(message.get("body", b""))
        return message

    def forget(self) -> None:
        self.keeps = False
        self._parts.clear()

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)


class _First:
    """A `Send` that passes LiteLLM's first answer on, unless it is the server's refusal: that is kept.

    So is an error of any kind that comes when the head of a stream and signs of life are out: LiteLLM writes it
    without the server's words, and in one form for all dialects.

    Attributes:
        send: to the client.
        opened: the client has the head of a stream, and signs of life.
        kept: messages of the answer that were kept back.
    """

    def __init__(self, dialect: str, send: Send, note: _Note, taken: _Taken) -> None:
        self._dialect = dialect
        self.send = send
        self.opened = False
        self.kept: list[Message] = []
        self._note, self._taken = note, taken
        self._begun = False

    async def __call__(self, message: Message) -> None:
        refused = self._note.failed and (self.opened or self._note.reason is not None)
        if self.kept or (refused and not self._begun):
            self.kept.append(message)
            return
        if message["type"] == START:
            self.opened = message["status"] < 400
            self._begun = not self.opened
        elif _says_something(message):
            self._begun = True
            self._taken.forget()
        await self.send(message)

    async def let_go(self, told: str = "") -> None:
        """Sends what was kept. `told`: the value of `HEADER`."""
        if not self.opened:
            for message in self.kept:
                await self.send(_with_header(message, told) if told and message["type"] == START else message)
            return
        body = b"".join(message.get("body", b"") for message in self.kept)
        if self._note.error is not None:
            body = _last_event(self._dialect, self._note.error)
        elif self.kept[0]["type"] == START:
            body = b"data: " + body + b"\n\ndata: [DONE]\n\n"
        await self.send({"type": "http.response.body", "body": (_comment(told) if told else b"") + body})


class _Second:
    """A `Send` for the answer of FALLBACK_MODEL. It passes nothing on of an error: the server's own is better.

    Attributes:
        went: the answer has gone to the client.
    """

    def __init__(self, first: _First, note: _Note, told: str) -> None:
        self.went = False
        self._first, self._note, self._told = first, note, told
        self._passes = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == START:
            await self._start(message)
        elif self._passes and (self.went or not self._note.failed):
            self.went = self.went or _says_something(message) or not message.get("more_body")
            await self._first.send(message)

    async def _start(self, message: Message) -> None:
        self._passes = message["status"] < 400
        if not self._passes:
            return
        if self._first.opened:  # the head is out, so the stream says it
            message = {"type": "http.response.body", "body": _comment(self._told), "more_body": True}
            await self._first.send(message)
            return
        self._first.opened = True
        await self._first.send(_with_header(message, self._told))


@dataclass(slots=True)
class _Record:
    """A JSON file, written anew with each request that was sent: counts since the proxy's start, and the last one."""

    path: Path
    counts: dict[str, int] = field(default_factory=dict)
    failed: int = 0

    def add(self, reason: str, *, ok: bool) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.failed += not ok
        last = {"reason": reason, "ok": ok, "time": time.time()}
        told = json.dumps({"counts": self.counts, "failed": self.failed, "last": last})
        temporary = self.path.with_suffix(".tmp")
        try:
            temporary.write_text(told, encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as error:  # a full disk; LiteLLM's log has it, and the client its answer
            print(f"{HEADER}: {told} cannot be written: {error}", flush=True)


def _asks_off(scope: Scope) -> bool:
    """Whatever else a client writes there, it does not say yes."""
    return any(name == HEADER.encode() and value.strip().lower() != b"on" for name, value in scope["headers"])


def _says_something(message: Message) -> bool:
    """Whether a piece of the body is more than a sign of life."""
    body = message.get("body", b"")
    return bool(body) and _SIGN_OF_LIFE.fullmatch(body) is None


def _comment(told: str) -> bytes:
    """Of an event stream: clients pass it over, people find it."""
    return f": {HEADER}: {told}\n\n".encode()


def _last_event(dialect: str, error: dict[str, Any]) -> bytes:
    """The server's error as the end of a stream, as it writes it itself where it is asked directly."""
    if dialect.endswith("completions"):
        return f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode()
    kind = "error"
    data: dict[str, Any] = {"type": kind, "error": error}
    if dialect == "responses":
        kind = "response.failed"
        told = {"code": _CODES.get(str(error.get("code")), "server_error"), "message": error["message"]}
        response: dict[str, Any] = {"id": "resp_refused", "object": "response", "status": "failed", "error": told}
        response |= {
            "created_at": int(time.time()),
            "incomplete_details": None,
            "model": "",
            "output": [],
            "usage": None,
        }
        data = {"type": kind, "sequence_number": 0, "response": response}
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def _with_header(message: Message, told: str) -> Message:
    return dict(message) | {"headers": [*message.get("headers", []), (HEADER.encode(), told.encode())]}
