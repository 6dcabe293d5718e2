"""One complete request on its HTTP thread: asks its route's handler, and writes the answer."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from start_llm.api.common.dialect import Exchange, Task, error_reply
from start_llm.api.common.run import HEADER_WAIT, ExchangeRunner, StreamFailed
from start_llm.api.http.answers import STREAM_HEADERS, encode_head, encode_reply
from start_llm.api.http.connection import Connection, send_now
from start_llm.api.http.routes import Feed, Reply, Request, Routes
from start_llm.api.http.watcher import is_gone
from start_llm.core.errors import ClientGone, Internal, StartLLMError
from start_llm.core.protocol import HEAD_HEADER, WHEN_PLANNED
from start_llm.core.settings import Settings
from start_llm.dashboard.metrics import Metrics

log = logging.getLogger(__name__)

SILENCE_SECONDS = 20.0
"""The reader of a stream may take nothing of it so long."""


@dataclass(frozen=True, slots=True)
class Edge:
    """What every handler needs; shared by all threads, never changed."""

    settings: Settings
    routes: Routes
    runner: ExchangeRunner
    metrics: Metrics


class RequestHandler:
    """Lives for one request; `run.Out` for its answer.

    Attributes:
        outgoing: of the answer, what the client has not taken at once; the front sends it.
        keep: the connection can take another request after that.
    """

    def __init__(self, connection: Connection, request: Request, edge: Edge) -> None:
        self.outgoing = b""
        self.keep = connection.reader.keeps_alive
        self._connection = connection
        self._request = request
        self._edge = edge
        self._head_sent = False

    def answer(self) -> None:
        """Never raises StartLLMError. Raises OSError: the connection failed."""
        try:
            if self._request.lane != "quick" and is_gone(self._connection.socket):
                raise ClientGone("The client went away before its request was looked at.")
            self._answer()
        except ClientGone as gone:
            self.keep = False
            log.info("499 %s: %s", self._name(), gone.message)

    def _answer(self) -> None:
        try:
            if self._request.handler is None:
                self._options()
                return
            reader = self._connection.reader
            request = replace(self._request, body=reader.body.read(), received=reader.received)
            self._write_answer(self._request.handler(request))
        except ClientGone:
            raise
        except StreamFailed as failed:
            log.info("%d %s: %s", failed.status, self._name(), failed.message)  # observers know it already
        except StartLLMError as error:
            self._fail(error)
        except Exception:  # the edge: whatever a handler did not foresee
            log.warning("unexpected error in %s", self._name(), exc_info=True)
            self._edge.metrics.errors.labels("api").inc()
            self._fail(Internal("An unexpected error happened; the server's log has the details."))

    def _write_answer(self, answer: Reply | Feed | Task | Exchange) -> None:
        if isinstance(answer, Reply):
            self.reply(answer)
        elif isinstance(answer, Feed):
            self.open_stream({})
            for message in answer.messages if self._request.method != "HEAD" else ():
                self.write(message)
        elif isinstance(answer, Task):
            self._edge.runner.run_task(answer, self)
        else:
            waits = self._request.headers.get(HEAD_HEADER, "").strip().lower() == WHEN_PLANNED
            self._edge.runner.run_exchange(answer, self, header_wait=math.inf if waits else HEADER_WAIT)

    def _options(self) -> None:
        methods = ", ".join(self._request.methods)
        headers = {"Allow": methods}
        if self._request.origin is not None:
            asked = self._request.headers.get("Access-Control-Request-Headers")
            headers["Access-Control-Allow-Methods"] = methods
            headers["Access-Control-Allow-Headers"] = asked or "authorization, content-type, x-api-key"
            headers["Access-Control-Max-Age"] = "600"
        self.reply(Reply(b"", status=204, headers=headers))

    # --- answering (`run.Out`) ---

    def connection_socket(self) -> socket.socket:
        return self._connection.socket

    def reply(self, reply: Reply) -> None:
        self._head_sent = True
        head_only = self._request.method == "HEAD"
        data = encode_reply(reply, self._request.origin, close=not self.keep, head_only=head_only)
        try:
            self.outgoing = send_now(self._connection.socket, data)
        except OSError as error:
            raise ClientGone(f"The client closed the connection ({error}).") from None

    def open_stream(self, headers: Mapping[str, str]) -> None:
        self._head_sent = True
        self.keep = False
        self._connection.socket.settimeout(SILENCE_SECONDS)
        self.write(encode_head(200, {**STREAM_HEADERS, **headers}, self._request.origin, close=True))

    def write(self, data: bytes) -> None:
        try:
            self._connection.socket.sendall(data)
        except OSError as error:
            raise ClientGone(f"The client closed the connection ({error}).") from None

    def _fail(self, error: StartLLMError) -> None:
        log.info("%d %s: %s", error.status, self._name(), error.message)
        if self._head_sent:
            self.keep = False
            return
        self.reply(error_reply(error, self._request.path))

    def _name(self) -> str:
        return f"{self._request.method} {self._request.path[:200]}"
