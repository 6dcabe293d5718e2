"""One complete request on its HTTP thread: asks its route's handler, runs what it says, and writes the answer."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from start_llm.api.common.dialect import Exchange, Task, error_reply
from start_llm.api.http import answers, sse
from start_llm.api.http.connection import Connection, send_now
from start_llm.api.http.routes import Answer, Feed, Reply, Request
from start_llm.api.http.watcher import DisconnectWatcher, is_gone
from start_llm.core.errors import ClientGone, Internal, StartLLMError, Unavailable
from start_llm.core.events import Done, Event, Failed, Progress, Started
from start_llm.core.hosts import preflight
from start_llm.core.protocol import HEAD_HEADER, WHEN_PLANNED
from start_llm.core.request import ChatRequest
from start_llm.core.service import EventStream
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.observer import Observer, Outcome

log = logging.getLogger(__name__)

SILENCE_SECONDS = 20.0
"""The reader of a stream may take nothing of it so long."""
LAST_WORD_SECONDS, STOPPING_SECONDS = 30.0, 0.5
"""A request that ended early waits so long for what it has cost: the model thread is within a chunk. The second: while
the server stops."""
HEADER_WAIT = 1.0
"""Seconds that the headers of a stream wait for the cache report."""


@dataclass(frozen=True, slots=True)
class Edge:
    """What every handler needs; shared by all threads, never changed. `ping_gap`: seconds between two pings."""

    watcher: DisconnectWatcher
    observers: Sequence[Observer]
    metrics: Metrics
    ping_gap: float


class RequestHandler:
    """Lives for one request.

    Attributes:
        outgoing: of the answer, what the client has not taken at once; the front sends it.
        keep: the connection can take another request after that.
        head_sent: the answer's head is out, so that an error cannot have a status any more.
    """

    def __init__(self, connection: Connection, request: Request, edge: Edge) -> None:
        self.outgoing = b""
        self.keep = connection.reader.keeps_alive
        self.head_sent = False
        self._connection = connection
        self._request = request
        self._edge = edge

    def answer(self, refusal: StartLLMError | None) -> None:
        """Never raises StartLLMError. Raises OSError: the connection failed. With a `refusal` that is the answer."""
        try:
            if self._request.lane != "quick" and is_gone(self._connection.socket):
                raise ClientGone("The client went away before its request was looked at.")
            self._answer(refusal)
        except ClientGone as gone:
            self.keep = False
            log.info("499 %s: %s", self._name(), gone.message)

    def _answer(self, refusal: StartLLMError | None) -> None:
        try:
            if refusal is not None:
                raise refusal
            if self._request.handler is None:
                self._options()
                return
            reader, has_left = self._connection.reader, partial(is_gone, self._connection.socket)
            request = replace(self._request, body=reader.body.read(), received=reader.received, has_left=has_left)
            self.write_answer(self._request.handler(request))
        except ClientGone:
            raise
        except StartLLMError as error:
            self._fail(error)
        except Exception:  # the edge: whatever a handler did not foresee
            log.warning("unexpected error in %s", self._name(), exc_info=True)
            self._edge.metrics.errors.labels("api").inc()
            self._fail(Internal("An unexpected error happened; the server's log has the details."))

    def write_answer(self, answer: Answer | Task | Exchange) -> None:
        """Raises StartLLMError where nothing has been sent yet."""
        if isinstance(answer, Mapping | list):
            answer = Reply(sse.dumps(answer), headers={"Cache-Control": "no-store"})
        if isinstance(answer, Reply):
            self.reply(answer)
        elif isinstance(answer, Feed):
            self.open_stream({"Content-Type": answer.content_type})
            for message in answer.messages if self._request.method != "HEAD" else ():
                self.write(message)
        else:
            self._run_exchange(answer)

    def _run_exchange(self, exchange: Exchange | Task) -> None:
        """Submits it, watches the client, writes the answer.

        Behind the last byte all is visible (`Observation`). So is what a failed stream leaves: the client is told of
        the failure behind all the rest.
        """
        request = exchange.request
        answer = self._streamed(exchange) if isinstance(exchange, Exchange) and request.stream else None
        try:
            with Observation(request, self._edge, self._connection.socket) as observation:
                events = observation.begin(exchange)
                if answer is not None:
                    answer.write_all(events, observation)
                    return
                reply = exchange.reply(events)
                observation.answered()
                self.reply(replace(reply, headers={**reply.headers, **_id_headers(request)}))
        except ClientGone:
            raise
        except Exception as error:  # `_answer` logs it; a client that reads a stream is told inside of it
            if answer is not None:
                ended = Internal("The answer ended before it was complete.")
                answer.fail(error if isinstance(error, StartLLMError) else ended)
            raise

    def _streamed(self, exchange: Exchange) -> _StreamedAnswer:
        waits = self._request.headers.get(HEAD_HEADER, "").strip().lower() == WHEN_PLANNED
        return _StreamedAnswer(exchange, self, self._edge.ping_gap, math.inf if waits else HEADER_WAIT)

    def _options(self) -> None:
        request = self._request
        headers = preflight(request.methods, request.headers, is_page=request.origin is not None)
        self.reply(Reply(b"", status=204, headers=headers))

    # --- the connection; each raises ClientGone if nobody listens ---

    def reply(self, reply: Reply) -> None:
        self.head_sent = True
        head_only = self._request.method == "HEAD"
        data = answers.encode_reply(reply, self._request.origin, close=not self.keep, head_only=head_only)
        try:
            self.outgoing = send_now(self._connection.socket, data)
        except OSError as error:
            raise ClientGone(f"The client closed the connection ({error}).") from None

    def open_stream(self, headers: Mapping[str, str]) -> None:
        self.head_sent = True
        self.keep = False
        self._connection.socket.settimeout(SILENCE_SECONDS)
        self.write(answers.encode_head(200, {**answers.STREAM_HEADERS, **headers}, self._request.origin, close=True))

    def write(self, data: bytes) -> None:
        try:
            self._connection.socket.sendall(data)
        except OSError as error:
            raise ClientGone(f"The client closed the connection ({error}).") from None

    def _fail(self, error: StartLLMError) -> None:
        """The whole answer is the error; behind a head nothing more is said here."""
        log.info("%d %s: %s", error.status, self._name(), error.message)
        if self.head_sent:
            self.keep = False
            return
        self.reply(error_reply(error, self._request.path))

    def _name(self) -> str:
        return f"{self._request.method} {self._request.path[:200]}"


def _id_headers(request: ChatRequest) -> dict[str, str]:
    """The request's id, for ``/v1/cache/requests/{id}``, under the names that the vendors' clients read."""
    return {answers.ID_HEADER: request.id, answers.ANTHROPIC_ID_HEADER: request.id}


class _StreamedAnswer:
    """The answer of one exchange as a stream.

    Its head waits for the cache report, at most `header_wait` seconds and one event. Before the head is out an error
    has a status; after that it is written into the stream.
    """

    def __init__(self, exchange: Exchange, out: RequestHandler, ping_gap: float, header_wait: float) -> None:
        self._writer = exchange.writer()
        self._request = exchange.request
        self._out = out
        self._began = time.monotonic()
        self._ping_gap = ping_gap
        self._header_wait = header_wait
        self._last_ping = -math.inf

    def write_all(self, events: Iterator[Event], observation: Observation) -> None:
        """Raises ClientGone; StartLLMError: `fail` tells the client of it."""
        for event in events:
            data = self._bytes(event)
            if isinstance(event, Done):
                observation.answered()
            if data:
                self._out.write(data)

    def fail(self, error: StartLLMError) -> None:
        """Tells the client inside the stream, unless its head is not out: then the error can still have a status."""
        if self._out.head_sent:
            self._out.write(self._writer.fail(error))

    def _bytes(self, event: Event) -> bytes:
        """What the client is told of it; before the first event the head is sent."""
        now, data = time.monotonic(), b""
        if not self._out.head_sent:
            if isinstance(event, Progress) and now - self._began < self._header_wait:
                return b""
            headers = {"Content-Type": self._writer.content_type} | _id_headers(self._request)
            if isinstance(event, Started):
                headers[answers.CACHE_HEADER] = event.report.header()
            self._out.open_stream(headers)
            data = self._writer.open()
        if isinstance(event, Progress):
            if now - self._last_ping < self._ping_gap:
                return data
            self._last_ping = now
        return data + self._writer.write(event)


class Observation:
    """A request from its beginning to its end: it is submitted, its client is watched, the observers are told of it.

    Whoever has the last byte of its answer may rely on all that follows from it. Before that byte, in this order:

    1. The model thread has stored the KV and given the memory back (`engine.schedule.requests`): its last word comes
       behind that.
    2. The turn is recorded (`chat.stream`): before the client reads that the answer is complete.
    3. The last bytes are made. A response that is to be stored is stored (`api.openai.responses_stream`).
    4. `answered`: nobody can cancel the request any more; the model is given back; the observers know the end (metrics,
       request log, audit, page).

    A request that fails is told so behind all of that, too.
    """

    def __init__(self, request: ChatRequest, edge: Edge, connection: socket.socket) -> None:
        """`connection`: of the client that is watched."""
        self._request = request
        self._edge = edge
        self._connection = connection
        self._began = request.received or time.monotonic()
        self._seconds_first: float | None = None
        self._held = ExitStack()  # the stream, and the watch on its client
        self._stream: EventStream | None = None
        self._done: Done | None = None
        self._ended = False

    def __enter__(self) -> Observation:
        for observer in self._edge.observers:
            observer.started(self._request)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held.close()
        if not self._ended:
            known = error if isinstance(error, StartLLMError) else Internal("An unexpected error happened.")
            report = None
            if self._stream is not None:
                stops = isinstance(self.watch.ended, Unavailable)
                report = self._stream.last_report(STOPPING_SECONDS if stops else LAST_WORD_SECONDS)
            self._end(Outcome(known.status, self._seconds(), report=report, error=known.message))

    def begin(self, exchange: Exchange | Task) -> Iterator[Event]:
        """Submits it. Its events; the last one is `Done`, and then `answered` is to be called.

        Raises the StartLLMError of a `Failed`, and of a request that was ended early.
        """
        self._stream = self._held.enter_context(closing(exchange.begin()))
        watching = self._edge.watcher.watch(self._connection, self._stream, self._request.id)
        self.watch = self._held.enter_context(watching)
        return self._events(self._stream)

    def _events(self, stream: EventStream) -> Iterator[Event]:
        for event in stream:
            if self._seconds_first is None and not isinstance(event, Started | Progress | Failed):
                self._seconds_first = self._seconds()
            for observer in self._edge.observers:
                observer.event(self._request, event)
            if self.watch.ended:
                continue  # a closed stream ends when it is asked again: a `Task` gives its model back there
            if isinstance(event, Failed):
                raise event.error.again()
            if isinstance(event, Done):
                self._done = event
                yield event
                return
            yield event
        why = self.watch.ended or Internal("The answer ended before it was complete.")
        raise why.again()  # what is kept must not hold the frames that hold it

    def answered(self) -> None:
        """The answer is complete. To be called before its last byte goes out."""
        assert self._done is not None
        self._held.close()
        self._end(Outcome(200, self._seconds(), usage=self._done.usage, report=self._done.report))

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _end(self, outcome: Outcome) -> None:
        self._ended = True
        for observer in self._edge.observers:
            observer.ended(self._request, replace(outcome, seconds_first=self._seconds_first))
