"""Runs one exchange or task on its HTTP thread: submits it, watches the client, writes the answer."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from start_llm.api.common.collect import collect, submit_all
from start_llm.api.common.dialect import Exchange, Task
from start_llm.api.http import sse
from start_llm.api.http.answers import CACHE_HEADER, ID_HEADER
from start_llm.api.http.routes import Reply
from start_llm.api.http.watcher import DisconnectWatcher, Watch
from start_llm.core.errors import ClientGone, Internal, StartLLMError, Unavailable
from start_llm.core.events import Done, Event, Failed, Progress, Started
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.service import EventStream, Service
from start_llm.dashboard.observer import Observer, Outcome

ANTHROPIC_ID_HEADER = "request-id"
HEADER_WAIT = 1.0
"""Seconds that the headers of a stream wait for the cache report."""


class Out(Protocol):
    """The connection, as far as an answer needs it. Every method raises ClientGone if nobody listens."""

    def connection_socket(self) -> socket.socket: ...

    def reply(self, reply: Reply) -> None: ...

    def open_stream(self, headers: Mapping[str, str]) -> None: ...

    def write(self, data: bytes) -> None: ...


class StreamFailed(StartLLMError):
    """The client has been told already, inside the stream. `cause` is what it was told."""

    def __init__(self, cause: StartLLMError) -> None:
        super().__init__(cause.message, param=cause.param, code=cause.code)
        self.status, self.type, self.cause = cause.status, cause.type, cause


class ExchangeRunner:
    """Shared by all HTTP threads; holds no state of a request."""

    def __init__(
        self,
        service: Service,
        watcher: DisconnectWatcher,
        observers: Sequence[Observer],
        ping_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._watcher = watcher
        self._observers = observers
        self._ping_gap = min(1.0, ping_seconds / 5)
        self._clock = clock

    def run_exchange(self, exchange: Exchange, out: Out, *, header_wait: float = HEADER_WAIT) -> None:
        """Answers; raises StartLLMError where nothing has been sent yet.

        Args:
            header_wait: seconds that a stream's headers wait for the cache report.
        """
        request = exchange.request
        with _Observation(request, self._observers, self._clock) as observation:
            stream = submit_all(self._service, exchange.requests)
            with closing(stream), self._watcher.watch(out.connection_socket(), stream) as watch:
                events = observation.events(stream)
                if request.stream:
                    answer = _StreamedAnswer(exchange, out, self._clock, self._ping_gap, header_wait)
                    answer.write_all(events, watch)
                    return
                result = collect(events, request.n * len(exchange.requests))
                if result is None:
                    raise _why_it_ended(watch)
                headers = _id_headers(request) | {CACHE_HEADER: result.report.header()}
                out.reply(Reply(sse.dumps(exchange.body(result)), headers=headers))

    def run_task(self, task: Task, out: Out) -> None:
        """Answers; raises StartLLMError where nothing has been sent yet."""
        with _Observation(task.request, self._observers, self._clock) as observation:
            stream = _TaskStream(task)
            with self._watcher.watch(out.connection_socket(), stream) as watch:
                for event in observation.events(stream):
                    if isinstance(event, Done):
                        reply = task.reply()
                        out.reply(replace(reply, headers={**reply.headers, **_id_headers(task.request)}))
                        return
                raise _why_it_ended(watch)


def _why_it_ended(watch: Watch) -> StartLLMError:
    """The error of a request whose events ended without a final one."""
    if watch.gone:
        return ClientGone("The client went away while its answer was being made.")
    if watch.stopped:
        return Unavailable("The server is shutting down.")
    return Internal("The answer ended before it was complete.")


def _id_headers(request: ChatRequest) -> dict[str, str]:
    """The request's id, for ``/v1/cache/requests/{id}``, under the names that the vendors' clients read."""
    return {ID_HEADER: request.id, ANTHROPIC_ID_HEADER: request.id}


class _TaskStream:
    """A task's steps as an `EventStream`: closed, it ends behind the step that is being computed."""

    def __init__(self, task: Task) -> None:
        self._steps, self._closed = task.steps(), False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._closed:
            self._steps.close()
            raise StopIteration
        return next(self._steps)

    def close(self) -> None:
        self._closed = True

    def last_report(self) -> CacheReport | None:
        return None


class _StreamedAnswer:
    """The answer of one exchange as server-sent events.

    Its head waits for the cache report, at most `header_wait` seconds and one event. Before the head is out an error
    has a status; after that it is written into the stream.
    """

    def __init__(
        self, exchange: Exchange, out: Out, clock: Callable[[], float], ping_gap: float, header_wait: float
    ) -> None:
        self._writer = exchange.writer()
        self._request = exchange.request
        self._out = out
        self._clock = clock
        self._began = clock()
        self._ping_gap = ping_gap
        self._header_wait = header_wait
        self._last_ping = -math.inf
        self._head_sent = False

    def write_all(self, events: Iterator[Event], watch: Watch) -> None:
        """Raises ClientGone; StreamFailed where the client was told of an error; others before the head was sent."""
        try:
            for event in events:
                if watch.gone or watch.stopped:
                    break
                if isinstance(event, Failed):
                    raise event.error
                self._write(event)
                if isinstance(event, Done):
                    return
            raise _why_it_ended(watch)
        except ClientGone:
            raise
        except StartLLMError as error:
            if self._head_sent:
                self._out.write(self._writer.fail(error))
                raise StreamFailed(error) from error
            raise
        except Exception:  # the handler logs it; a client that listens is told
            if self._head_sent:
                self._out.write(self._writer.fail(Internal("The answer ended before it was complete.")))
            raise

    def _write(self, event: Event) -> None:
        now, data = self._clock(), b""
        if not self._head_sent:
            if isinstance(event, Progress) and now - self._began < self._header_wait:
                return
            headers = _id_headers(self._request)
            if isinstance(event, Started):
                headers[CACHE_HEADER] = event.report.header()
            self._out.open_stream(headers)
            self._head_sent = True
            data = self._writer.open()
        if isinstance(event, Progress):
            if now - self._last_ping < self._ping_gap:
                return
            self._last_ping = now
        data += self._writer.write(event)
        if data:
            self._out.write(data)


class _Observation:
    """Tells the observers that a request begins, what happens, and how it ends.

    They know its end before the client does: who has an answer finds it in the logs.
    """

    def __init__(self, request: ChatRequest, observers: Sequence[Observer], clock: Callable[[], float]) -> None:
        self._request = request
        self._observers = observers
        self._clock = clock
        self._began = request.received or clock()
        self._seconds_first: float | None = None
        self._stream: EventStream | None = None
        self._ended = False

    def __enter__(self) -> _Observation:
        for observer in self._observers:
            observer.started(self._request)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._ended:
            known = error if isinstance(error, StartLLMError) else Internal("An unexpected error happened.")
            report = None if self._stream is None else self._stream.last_report()
            self._end(Outcome(known.status, self._clock() - self._began, report=report, error=known.message))

    def events(self, stream: EventStream) -> Iterator[Event]:
        self._stream = stream
        for event in stream:
            if self._seconds_first is None and not isinstance(event, Started | Progress | Failed):
                self._seconds_first = self._clock() - self._began
            for observer in self._observers:
                observer.event(self._request, event)
            if isinstance(event, Done):
                self._end(Outcome(200, self._clock() - self._began, usage=event.usage, report=event.report))
            yield event

    def _end(self, outcome: Outcome) -> None:
        self._ended = True
        for observer in self._observers:
            observer.ended(self._request, replace(outcome, seconds_first=self._seconds_first))
