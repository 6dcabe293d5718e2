"""A node for the balancer's tests: it says what it has stored, answers in each dialect, and fails as it is told."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.proxy.stub import (
    HEADER,
    UNKNOWN,
    chat_body,
    chat_events,
    messages_body,
    messages_events,
    responses_body,
    responses_events,
    send_json,
)

_BODIES = {"chat/completions": chat_body, "messages": messages_body, "responses": responses_body}
_EVENTS = {"chat/completions": chat_events, "messages": messages_events, "responses": responses_events}
_CUT_AT = {"chat/completions": 2, "messages": 6, "responses": 4}  # the event that has text of the answer in it
_LOCKED = {"error": {"message": "A valid API key is needed.", "type": "authentication_error"}}
_ELSE = {
    "embeddings": {"object": "list", "data": []},
    "completions": {"object": "text_completion", "choices": []},
    "messages/count_tokens": {"input_tokens": 12},
    "responses/input_tokens": {"object": "response.input_tokens", "input_tokens": 12},
}


class Seen(NamedTuple):
    """A request as it arrived. `path`: behind `/v1/`; `headers`: their names in small letters."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


@dataclass
class NodeStub:
    """
    Attributes:
        mode: ``ok``; ``full`` (429), ``loading`` (503, `/health` too), ``locked`` (401: it does not take the key),
            ``drop`` (the connection closes without an answer), ``gone`` (so does every one), ``cut`` (it closes after
            some events of a stream, once `was_read` is set: what was not read yet would be lost with the connection),
            ``frozen`` (nothing is answered any more), ``lies`` (counts are no numbers).
        stored: what `explain` says, tokens of a prompt of 1,000, but of one with as many words as nobody has sent;
            with `invents` of that one too.
        models: their names, or their cards. One that is called "nobody..." is unknown.
        go: while it is cleared, streams stop after their first event, as a long prefill does.
        seen: what came, explain left out. `keys`: what came as the API key with any request.
        looks: how often `/health` was asked.
        instead: writes every answer, in place of all that follows from the other attributes. `cookies`: what came as
            such with any request.
    """

    mode: str = "ok"
    stored: int = 0
    invents: bool = False
    models: list[Any] = field(default_factory=lambda: ["served"])
    running: int = 0
    waiting: int = 0
    looks: int = 0
    seen: list[Seen] = field(default_factory=list)
    explained: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    instead: Callable[[BaseHTTPRequestHandler], None] | None = None
    cookies: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)  # ids of responses that are stored there
    thaw: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    was_read: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        stub = self
        self.go.set()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                stub.cookies += self.headers.get_all("Cookie", [])
                (stub.instead or stub._get)(self)

            def do_DELETE(self) -> None:
                stub._note_key(self)
                stub._kept(self)

            def do_POST(self) -> None:
                stub.cookies += self.headers.get_all("Cookie", [])
                (stub.instead or stub._post)(self)

        self._httpd = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._httpd.serve_forever, daemon=True).start()

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self._httpd.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.name}"

    def use_tls(self, context: ssl.SSLContext) -> None:
        self._httpd.socket = context.wrap_socket(self._httpd.socket, server_side=True)

    def stop(self) -> None:
        self.thaw.set()
        self._httpd.shutdown()
        self._httpd.server_close()

    def reset(self) -> None:
        self.mode, self.stored, self.running, self.waiting = "ok", 0, 0, 0
        self.was_read.clear()
        self.seen.clear()
        self.explained.clear()
        self.instead = None

    # --- answers ------------------------------------------------------------

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        if self.mode == "gone":
            _hang_up(handler)
            return
        if self.mode == "frozen":
            self.thaw.wait(120)
        if handler.path == "/health":
            self.looks += 1
            state = "loading" if self.mode == "loading" else "ready"
            body = {"state": state, "running": self.running, "queued": self.waiting}
            body |= {"running": None, "queued": "many"} if self.mode == "lies" else {}
            send_json(handler, body, 200 if state == "ready" else 503)
            return
        self._note_key(handler)
        if self.mode == "locked":
            send_json(handler, _LOCKED, 401)
            return
        if "/responses/" in handler.path:
            self._kept(handler)
            return
        usual = {"object": "model", "details": {"state": "ready"}}
        cards = [each if isinstance(each, dict) else {"id": each, **usual} for each in self.models]
        _, _, name = handler.path.partition("/models/")
        one = next((card for card in cards if card["id"] == name), None)
        send_json(handler, one or {"object": "list", "data": cards})

    def _kept(self, handler: BaseHTTPRequestHandler) -> None:
        """What is asked of a stored response: its body, its items, that it is gone."""
        path = handler.path.partition("?")[0].removeprefix("/v1/")
        self.seen.append(Seen(f"{handler.command} {path}", {}, {}))
        name = path.split("/")[1]
        if name not in self.kept:
            send_json(handler, {"error": {"message": "There is no stored response."}}, 404)
        elif handler.command == "DELETE":
            send_json(handler, {"id": name, "object": "response", "deleted": True})
        elif path.endswith("/input_items"):
            send_json(handler, {"object": "list", "data": [], "has_more": False})
        else:
            send_json(handler, responses_body({"model": "served"}) | {"id": name})

    def _note_key(self, handler: BaseHTTPRequestHandler) -> None:
        for name in ("authorization", "x-api-key"):
            if handler.headers.get(name):
                self.keys.add(handler.headers[name].removeprefix("Bearer "))

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        path = handler.path.partition("?")[0].removeprefix("/v1/")
        self._note_key(handler)
        if self.mode == "frozen":
            self.thaw.wait(120)
        if path == "cache/explain":
            unseen = len(set(str(body.get("messages", [{}])[0].get("content")).split())) > 100
            if not unseen:
                self.explained.append(body)
            said = {"reused": 0 if unseen and not self.invents else self.stored, "prompt": 1000}
            send_json(handler, [{"reused": "all"}] if self.mode == "lies" else said)
            return
        self.seen.append(Seen(path, body, {name.lower(): value for name, value in handler.headers.items()}))
        if self.mode == "drop":
            _hang_up(handler)
        elif self.mode == "locked":
            send_json(handler, _LOCKED, 401)
        elif self.mode in {"full", "loading"}:
            error = {"message": "64 requests are waiting already.", "type": "rate_limit_error"}
            refusal = {"x-start-llm-refusal": "queue_full"} if self.mode == "full" else {}
            send_json(handler, {"error": error}, 429 if self.mode == "full" else 503, **refusal)
        elif "nobody" in str(body.get("model")):
            send_json(handler, {"type": "error", "error": {"type": "not_found_error", "message": UNKNOWN}}, 404)
        elif body.get("stream") and path in _EVENTS:
            self._stream(handler, path, _EVENTS[path](body))  # type: ignore[operator]
        else:
            send_json(handler, _BODIES[path](body) if path in _BODIES else _ELSE[path])  # type: ignore[operator]

    def _stream(self, handler: BaseHTTPRequestHandler, path: str, events: Iterator[tuple[str | None, Any]]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("x-start-llm-cache", HEADER)
        handler.end_headers()
        for number, (name, data) in enumerate(events):
            text = data if isinstance(data, str) else json.dumps(data)
            piece = f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
            handler.wfile.write(f"{len(piece.encode()):x}\r\n{piece}\r\n".encode())
            self.go.wait(60)
            if self.mode == "cut" and number == _CUT_AT[path]:
                self.was_read.wait(20)
                _hang_up(handler)
                return
        handler.wfile.write(b"0\r\n\r\n")


def _hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is no error here."""


@contextmanager
def nodes(count: int) -> Iterator[list[NodeStub]]:
    stubs = [NodeStub() for _ in range(count)]
    try:
        yield stubs
    finally:
        for stub in stubs:
            stub.stop()
