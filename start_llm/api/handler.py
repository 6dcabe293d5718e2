"""One complete request on its HTTP thread: asks its route's handler, and writes the answer."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from start_llm.api.common.answers import STREAM_HEADERS, encode_head, encode_reply, error_reply
from start_llm.api.common.dialect import Feed, Inbound, Reply, Task
from start_llm.api.common.routes import Routes
from start_llm.api.common.run import HEADER_WAIT, ExchangeRunner, StreamFailed
from start_llm.api.http.front import Request
from start_llm.api.http.wire import is_gone, send_now
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


class ApiHandler:
    """Lives for one request; `run.Out` for its answer.

    Attributes:
        outgoing: of the answer, what the client has not taken at once; the front sends it.
        keep: the connection can take another request after that.
    """

    def __init__(self, request: Request, edge: Edge) -> None:
        self.outgoing = b""
        self.keep = request.head.keep_alive and not request.unread
        self._request = request
        self._edge = edge
        self._connection = request.connection
        self._head_sent = False

    def run(self) -> None:
        """Never raises StartLLMError. Raises OSError: the connection failed."""
        try:
            if not self._request.admitted.quick and is_gone(self._connection):
                raise ClientGone("The client went away before its request was looked at.")
            self._answer()
        except ClientGone as gone:
            self.keep = False
            log.info("499 %s: %s", self._name(), gone.message)

    def _answer(self) -> None:
        head, admitted = self._request.head, self._request.admitted
        try:
            if admitted.handler is None:
                self._options()
                return
            body = self._request.body.read()
            received, visitor = self._request.received, admitted.visitor
            inbound = Inbound(head.method, head.path, head.headers, body, admitted.params, received, visitor)
            answer = admitted.handler(inbound)
            if isinstance(answer, Reply):
                self.reply(answer)
            elif isinstance(answer, Feed):
                self.open_stream({})
                for message in answer.messages if head.method != "HEAD" else ():
                    self.write(message)
            elif isinstance(answer, Task):
                self._edge.runner.run_task(answer, self)
            else:
                waits = head.headers.get(HEAD_HEADER, "").strip().lower() == WHEN_PLANNED
                self._edge.runner.run(answer, self, header_wait=math.inf if waits else HEADER_WAIT)
        except ClientGone:
            raise
        except StreamFailed as failed:
            log.info("%d %s: %s", failed.status, self._name(), failed.message)  # observers have told it
        except StartLLMError as error:
            self._fail(error)
        except Exception:  # the edge: whatever a handler did not foresee
            log.warning("unexpected error in %s", self._name(), exc_info=True)
            self._edge.metrics.errors.labels("api").inc()
            self._fail(Internal("An unexpected error happened; the server's log has the details."))

    def _options(self) -> None:
        methods = ", ".join(self._request.admitted.methods)
        headers = {"Allow": methods}
        if self._request.admitted.origin is not None:
            asked = self._request.head.headers.get("Access-Control-Request-Headers")
            headers["Access-Control-Allow-Methods"] = methods
            headers["Access-Control-Allow-Headers"] = asked or "authorization, content-type, x-api-key"
            headers["Access-Control-Max-Age"] = "600"
        self.reply(Reply(b"", status=204, headers=headers))

    # --- answering (`run.Out`) ---

    def connection_socket(self) -> socket.socket:
        return self._connection

    def reply(self, reply: Reply) -> None:
        self._head_sent = True
        head_only = self._request.head.method == "HEAD"
        data = encode_reply(reply, self._request.admitted.origin, close=not self.keep, head_only=head_only)
        try:
            self.outgoing = send_now(self._connection, data)
        except OSError as error:
            raise ClientGone(f"The client closed the connection ({error}).") from None

    def open_stream(self, headers: Mapping[str, str]) -> None:
        self._head_sent = True
        self.keep = False
        self._connection.settimeout(SILENCE_SECONDS)
        self.write(encode_head(200, {**STREAM_HEADERS, **headers}, self._request.admitted.origin, close=True))

    def write(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise ClientGone(f"The client closed the connection ({error}).") from None

    def _fail(self, error: StartLLMError) -> None:
        log.info("%d %s: %s", error.status, self._name(), error.message)
        if self._head_sent:
            self.keep = False
            return
        self.reply(error_reply(error, self._request.head.path))

    def _name(self) -> str:
        return f"{self._request.head.method} {self._request.head.target[:200]}"
