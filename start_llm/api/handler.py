"""One HTTP request on one connection: checks, body, answer. Uses `http.server` for the protocol's grammar."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from start_llm.api import sse
from start_llm.api.access import allowed_origin, check_host, check_key
from start_llm.api.dialect import Inbound, Reply
from start_llm.api.errors import error_body, error_headers, style_of
from start_llm.api.routes import WrongMethod
from start_llm.api.run import CACHE_HEADER, ID_HEADER, StreamFailed
from start_llm.api.wire import Headers, Reader, body_length, read_chunked
from start_llm.core.errors import BadRequest, ClientGone, Internal, StartLLMError, UnsupportedMediaType

if TYPE_CHECKING:
    from start_llm.api.server import Edge

log = logging.getLogger(__name__)

BODY_SECONDS = 120.0
SILENCE_SECONDS = 20.0
OPEN_PATHS = frozenset({"/health"})


class ApiHandler(BaseHTTPRequestHandler):
    """Lives for one request.

    `close_connection` tells afterwards whether the connection can take another, `body_unread`
    whether part of this one may still be on its way.
    """

    protocol_version = "HTTP/1.1"
    timeout = SILENCE_SECONDS
    rfile: Reader  # type: ignore[assignment]
    connection: socket.socket

    def __init__(self, connection: socket.socket, address: tuple[str, int], received: bytes, edge: Edge) -> None:
        self._edge = edge
        self._received = received
        self.body_unread = False
        self._head_sent = False
        self._expects = False
        self._origin: str | None = None
        self._fields = Headers()
        super().__init__(connection, address, edge)  # type: ignore[arg-type]

    # --- http.server's hooks ---

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = Reader(self.connection, self._received)

    def handle(self) -> None:
        self.close_connection = True
        try:
            self.raw_requestline = self.rfile.readline()
            if not self.raw_requestline.endswith(b"\n"):
                self.requestline, self.command = "", ""
                self.send_error(414, "the first line is too long")
            elif self.parse_request():
                self._answer()
        except ClientGone as gone:
            self.close_connection = True
            log.info("499 %s: %s", self._name(), gone.message)

    def version_string(self) -> str:
        return "start_llm"

    def handle_expect_100(self) -> bool:
        self._expects = True  # the go-ahead is given once the head has been judged
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by `http.server` for heads it cannot read."""
        error = BadRequest(f"The request cannot be read: {message or code}.")
        error.status = int(code)
        self.request_version = self.protocol_version  # of HTTP/0.9 it would send no head
        self.close_connection = True
        self._fail(error, "/")

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.address_string(), format % args)

    # --- one request ---

    def _answer(self) -> None:
        self._fields = Headers(self.headers.items())
        path = "/"
        try:
            path = _path_of(self.path)
            lengths = self.headers.get_all("Content-Length") or []
            self.body_unread = "Transfer-Encoding" in self.headers or lengths not in ([], ["0"])
            self._check(path)
            if self.command == "OPTIONS":
                self._options(path)
                return
            handler, params = self._edge.routes.resolve(self.command, path)
            body = self._read_body(lengths) if self.command == "POST" else b""
            inbound = Inbound(self.command, path, self._fields, body, params, time.monotonic())
            answer = handler(inbound)
            if isinstance(answer, Reply):
                self.reply(answer)
            else:
                self._edge.runner.run(answer, self)
        except ClientGone:
            raise
        except StreamFailed as failed:
            log.info("%d %s: %s", failed.status, self._name(), failed.message)  # observers have told it
        except StartLLMError as error:
            self._fail(error, path)
        except Exception:  # the edge: whatever a handler did not foresee
            log.warning("unexpected error in %s", self._name(), exc_info=True)
            self._edge.metrics.errors.labels("api").inc()
            self._fail(Internal("An unexpected error happened; the server's log has the details."), path)

    def _check(self, path: str) -> None:
        check_host(self._fields, self._edge.settings.mlx_host)
        self._origin = allowed_origin(self._fields)
        if path not in OPEN_PATHS and self.command != "OPTIONS":
            check_key(self._fields, self._edge.settings.api_key)

    def _options(self, path: str) -> None:
        route, _ = self._edge.routes.find(path)
        methods = ", ".join(route.methods)
        headers = {"Allow": methods}
        if self._origin is not None:
            asked = self.headers.get("Access-Control-Request-Headers", "authorization, content-type, x-api-key")
            headers |= {"Access-Control-Allow-Methods": methods, "Access-Control-Allow-Headers": asked}
            headers["Access-Control-Max-Age"] = "600"
        self.reply(Reply(b"", status=204, headers=headers))

    def _read_body(self, lengths: list[str]) -> bytes:
        """Raises BadRequest, TooLarge, UnsupportedMediaType, ClientGone."""
        limit = self._edge.settings.max_body_bytes
        length = body_length(self._fields, lengths, limit)
        if length == 0:
            return b""
        kind = self.headers.get_content_type() if "Content-Type" in self.headers else "application/json"
        if kind != "application/json" and not kind.endswith("+json"):
            raise UnsupportedMediaType(f"Content-Type must be application/json, but is {kind!r}.", param="Content-Type")
        coding = self.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in {"", "identity"}:
            raise UnsupportedMediaType(
                f"Content-Encoding {coding!r} is not supported; send the body as it is.", param="Content-Encoding"
            )
        if self._expects:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.rfile.set_deadline(BODY_SECONDS)
        body = read_chunked(self.rfile, limit) if length is None else self.rfile.read(length)
        self.body_unread = False
        return body

    # --- answering (`run.Out`) ---

    def connection_socket(self) -> socket.socket:
        return self.connection

    def reply(self, reply: Reply) -> None:
        if self.body_unread:
            self.close_connection = True
        self.send_response_only(reply.status)
        self.send_header("Date", self.date_time_string())
        if reply.status != 204:
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(reply.body)))
        self._send_head(reply.headers)
        if self.command != "HEAD":
            self._send(reply.body)

    def open_stream(self, headers: Mapping[str, str]) -> None:
        self.close_connection = True
        self.send_response_only(200)
        self.send_header("Date", self.date_time_string())
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Accel-Buffering", "no")
        self._send_head(headers)

    def write(self, data: bytes) -> None:
        self._send(data)

    def _send_head(self, headers: Mapping[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value.encode("latin-1", "replace").decode("latin-1"))
        if self._origin is not None:
            self.send_header("Access-Control-Allow-Origin", self._origin)
            self.send_header("Access-Control-Expose-Headers", f"{CACHE_HEADER}, {ID_HEADER}, retry-after")
            self.send_header("Vary", "Origin")
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self._head_sent = True
        try:
            self.end_headers()
        except OSError as error:
            raise ClientGone(f"The client closed the connection ({error}).") from None

    def _send(self, data: bytes) -> None:
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise ClientGone(f"The client closed the connection ({error}).") from None

    def _fail(self, error: StartLLMError, path: str) -> None:
        log.info("%d %s: %s", error.status, self._name(), error.message)
        if self._head_sent:
            self.close_connection = True
            return
        body, kind = error_body(error, style_of(path))
        headers = error_headers(error)
        if isinstance(error, WrongMethod):
            headers["Allow"] = ", ".join(error.allowed)
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self.reply(Reply(sse.dumps(body), error.status, kind, headers))

    def _name(self) -> str:
        return getattr(self, "requestline", "") or "request"


def _path_of(target: str) -> str:
    """The path of a request's target, without the slashes at its end. Raises BadRequest."""
    try:
        return urlsplit(target).path.rstrip("/") or "/"
    except ValueError as error:
        raise BadRequest(f"{target[:80]!r} is no address: {error}.") from None
