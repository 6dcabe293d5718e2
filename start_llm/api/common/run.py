"""Runs one exchange on its HTTP thread: submits it, watches the client, writes the answer."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol

from start_llm.api.common.collect import Collected, collect
from start_llm.api.common.dialect import Exchange, Reply, StreamWriter, Task
from start_llm.api.http import sse
from start_llm.api.http.together import submit_all
from start_llm.api.http.watcher import DisconnectWatcher, Watch
from start_llm.core.errors import ClientGone, Internal, StartLLMError, Unavailable
from start_llm.core.events import Done, Event, Failed, Progress, Started
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.service import EventStream, Service
from start_llm.dashboard.observer import Observer, Outcome

CACHE_HEADER = "x-start-llm-cache"
ID_HEADER = "x-request-id"
ANTHROPIC_ID_HEADER = "request-id"
HEADER_WAIT = 1.0
"""Seconds that the headers of a stream wait for the cache report."""


class Out(Protocol):
    """The connection, as far as an answer needs it. Every method raises ClientGone if nobody listens."""

    def connection_socket(self) -> socket.socket: ...

    def reply(self, reply: Reply) -> None: ...

    def open_stream(self, headers: Mapping[str, str]) -> None: ...

    def write(self, data: bytes) -> None: ...


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

    def run(self, exchange: Exchange, out: Out, *, header_wait: float = HEADER_WAIT) -> None:
        """Answers; raises StartLLMError where nothing has been sent yet.

        Args:
            header_wait: seconds that a stream's headers wait for the cache report.
        """
        request = exchange.request
        choices = request.n * len(exchange.requests)
        tap = _Tap(request, self._observers, self._clock)
        try:
            stream = submit_all(self._service, exchange.requests)
            with closing(stream), self._watcher.watch(out.connection_socket(), stream) as watch:
                if request.stream:
                    opened = _Opened(exchange, out, self._clock, self._ping_gap, header_wait)
                    self._stream(opened, tap.events(stream), watch, out)
                else:
                    result = self._collect(tap.events(stream), choices, watch)
                    headers = id_headers(request) | {CACHE_HEADER: result.report.header()}
                    out.reply(Reply(sse.dumps(exchange.body(result)), headers=headers))
        except StartLLMError as error:
            tap.end(error)
            raise
        finally:
            tap.end(Internal("An unexpected error happened."))

    def run_task(self, task: Task, out: Out) -> None:
        """Answers; raises StartLLMError where nothing has been sent yet."""
        tap, stream = _Tap(task.request, self._observers, self._clock), _TaskStream(task)
        try:
            with self._watcher.watch(out.connection_socket(), stream) as watch:
                for event in tap.events(stream):
                    if isinstance(event, Done):
                        reply = task.reply()
                        out.reply(replace(reply, headers={**reply.headers, **id_headers(task.request)}))
                        return
                raise _why_it_ended(watch)
        except StartLLMError as error:
            tap.end(error)
            raise
        finally:
            tap.end(Internal("An unexpected error happened."))

    def _collect(self, events: Iterator[Event], choices: int, watch: Watch) -> Collected:
        result = collect(events, choices)
        if result is not None:
            return result
        raise _why_it_ended(watch)

    def _stream(self, opened: _Opened, events: Iterator[Event], watch: Watch, out: Out) -> None:
        error: StartLLMError = Internal("The answer ended before it was complete.")
        try:
            for event in events:
                if watch.gone or watch.stopped:
                    break
                if isinstance(event, Failed):
                    raise event.error
                opened.write(event)
                if isinstance(event, Done):
                    return
            error = _why_it_ended(watch)
            raise error
        except StartLLMError as known:
            error = known
            if opened.is_open and not isinstance(error, ClientGone):
                raise StreamFailed(error) from error
            raise
        finally:
            # Whatever happened, a client that listens is told.
            if opened.is_open and not opened.is_over and not isinstance(error, ClientGone):
                out.write(opened.writer.fail(error))


def _why_it_ended(watch: Watch) -> StartLLMError:
    """The error of a request whose events ended without a final one."""
    if watch.gone:
        return ClientGone("The client went away while its answer was being made.")
    if watch.stopped:
        return Unavailable("The server is shutting down.")
    return Internal("The answer ended before it was complete.")


def id_headers(request: ChatRequest) -> dict[str, str]:
    """The request's id, for ``/v1/cache/requests/{id}``, under the names that the vendors' clients read."""
    return {ID_HEADER: request.id, ANTHROPIC_ID_HEADER: request.id}


class StreamFailed(StartLLMError):
    """The client has been told already, inside the stream. `cause` is what it was told."""

    def __init__(self, cause: StartLLMError) -> None:
        super().__init__(cause.message, param=cause.param, code=cause.code)
        self.status, self.type, self.cause = cause.status, cause.type, cause


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


class _Opened:
    """A stream's head is held back for the cache report, at most `header_wait` seconds and one event."""

    def __init__(
        self, exchange: Exchange, out: Out, clock: Callable[[], float], ping_gap: float, header_wait: float
    ) -> None:
        self.writer: StreamWriter = exchange.writer()
        self.is_open = False
        self.is_over = False
        self._request = exchange.request
        self._out = out
        self._clock = clock
        self._began = clock()
        self._ping_gap = ping_gap
        self._header_wait = header_wait
        self._last_ping = -math.inf

    def write(self, event: Event) -> None:
        data = b""
        if not self.is_open:
            if isinstance(event, Progress) and self._clock() - self._began < self._header_wait:
                return
            headers = id_headers(self._request)
            if isinstance(event, Started):
                headers[CACHE_HEADER] = event.report.header()
            self._out.open_stream(headers)
            self.is_open = True
            data = self.writer.open()
        if isinstance(event, Progress):
            now = self._clock()
            if now - self._last_ping < self._ping_gap:
                return
            self._last_ping = now
        data += self.writer.write(event)
        if data:
            self._out.write(data)
        self.is_over = isinstance(event, Done)


class _Tap:
    """Lets the observers see a request's events as they pass.

    They know its end before the client does: who has an answer finds it in the logs.
    """

    def __init__(self, request: ChatRequest, observers: Sequence[Observer], clock: Callable[[], float]) -> None:
        self._request = request
        self._observers = observers
        self._clock = clock
        self._began = request.received or clock()
        self._first: float | None = None
        self._done: Done | None = None
        self._ended = False
        self._report: CacheReport | None = None
        for observer in observers:
            observer.started(request)

    def events(self, stream: EventStream) -> Iterator[Event]:
        for event in stream:
            if isinstance(event, Done):
                self._done = event
            elif isinstance(event, Started):
                self._report = event.report
            elif self._first is None and not isinstance(event, Progress | Failed):
                self._first = self._clock() - self._began
            for observer in self._observers:
                observer.event(self._request, event)
            if self._done is not None:
                self.end(None)
            yield event

    def end(self, error: StartLLMError | None) -> None:
        """Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        outcome = Outcome(
            status=200 if error is None else error.status,
            seconds=self._clock() - self._began,
            seconds_first=self._first,
            usage=self._done.usage if self._done else None,
            report=self._done.report if self._done else self._report,
            error=None if error is None else error.message,
        )
        for observer in self._observers:
            observer.ended(self._request, outcome)
