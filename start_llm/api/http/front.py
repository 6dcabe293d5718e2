"""Accepts connections, reads whole requests and finishes answers, all in one thread, none of it blocking.

A connection leaves with its first complete request, to the worker that `RequestDispatcher.dispatch` chooses. It may
come back for its next request, or with the part of an answer that its client has not taken yet. So neither slow clients
nor idle ones hold a worker, and an error in a head is reported before the body is read.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from start_llm.api.admission import AuthorisedRequest
from start_llm.api.http.body import Bodies, ReceivedBody
from start_llm.api.http.listener import ListeningSocket, Waker, connections_allowed
from start_llm.api.http.reader import HEAD_SECONDS, RequestReader
from start_llm.api.http.waiting import Connections, Waiting
from start_llm.api.http.wire import Head, send_now
from start_llm.core.errors import RequestTimeout, StartLLMError, Unavailable

log = logging.getLogger(__name__)

SEND_SECONDS = 300.0
STALL_SECONDS = 20.0
"""A client may take nothing of its answer so long."""
IDLE_SECONDS = 75.0
DRAIN_SECONDS = 3.0
SWEEP_SECONDS = 0.5
RECEIVE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Request:
    """A complete request, with the connection that waits for its answer.

    Attributes:
        connection: non-blocking.
        address: the client's, host and port.
        rest: what came behind the request: the begin of the next one.
        unread: a body may still be on its way; nobody reads it.
        received: ``time.monotonic()`` when it was complete, in seconds.
    """

    connection: socket.socket
    address: tuple[str, int]
    head: Head
    admitted: AuthorisedRequest
    body: ReceivedBody
    rest: bytes
    unread: bool
    received: float


class RequestDispatcher(Protocol):
    """Whom the front asks, on its own thread: nothing here may block."""

    def admit(self, head: Head, peer: str) -> AuthorisedRequest:
        """Raises StartLLMError: the request is refused, its body unread. `peer` is the client's address."""
        ...

    def dispatch(self, request: Request) -> None:
        """Takes the request; it comes back by `Front.finish`, or is closed."""
        ...

    def refusal(self, error: StartLLMError, head: Head | None, *, close: bool) -> bytes:
        """The whole answer to a request that is not run."""
        ...


class Front:
    """The accept loop. `start`, `finish`, `stop_accepting` and `stop` may be called from any thread."""

    def __init__(self, listener: socket.socket, desk: RequestDispatcher, bodies: Bodies) -> None:
        self._desk = desk
        self._bodies = bodies
        self._selector = selectors.DefaultSelector()
        self._door = ListeningSocket(listener, self._selector)
        self._crowd = Connections(self._selector, connections_allowed())
        self._returned: deque[Waiting] = deque()
        self._bell = Waker(self._selector)
        self._accepting = True
        self._running = True
        self._next_sweep = 0.0
        self._errors = 0
        self._thread = threading.Thread(target=self._run, name="api-front", daemon=True)

    def figures(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "http_waiting": len(self._crowd),
            "http_dropped": self._crowd.dropped,
            "http_accept_pauses": self._door.rests,
            "http_front_errors": self._errors,
        }

    def start(self) -> None:
        self._door.open()
        self._bell.hang()
        self._thread.start()

    def finish(self, request: Request, outgoing: bytes, *, keep: bool) -> None:
        """A connection whose request has been answered, up to what is `outgoing`.

        Args:
            keep: it stays open for a next request.
        """
        if not self._thread.is_alive():
            request.connection.close()
            return
        arrival = self._arrival(request.address[0], request.rest if keep else b"")
        self._returned.append(Waiting(request.connection, request.address, arrival, 0.0, outgoing=outgoing, keep=keep))
        self._bell.ring()

    def stop_accepting(self) -> None:
        """No new connections and no new requests: those that are not complete get 503."""
        self._accepting = False
        self._bell.ring()

    def stop(self) -> None:
        """Ends the thread and closes every connection that waits here."""
        self._running = False
        self._bell.ring()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=1)

    def _arrival(self, peer: str, rest: bytes) -> RequestReader:
        return RequestReader(self._bodies, partial(self._desk.admit, peer=peer), rest)

    # --- the loop ---

    def _run(self) -> None:
        try:
            while self._running:
                in_time = SWEEP_SECONDS if self._crowd or self._door.is_resting else None
                for key, _ in self._selector.select(0 if self._returned else in_time):
                    if key.data is self._door:
                        self._let_in()
                    elif key.data is self._bell:
                        self._bell.quiet()
                    elif key.data in self._crowd:
                        self._guarded(self._send if key.data.outgoing else self._receive, key.data)
                for _ in range(len(self._returned)):  # one that comes back at once has its turn after the others
                    self._guarded(self._take_back, self._returned.popleft())
                self._on_time(time.monotonic())
                if not self._accepting and self._door.close():
                    self._end_waiting()
        finally:
            self._close_all()

    def _guarded(self, action: Callable[..., None], waiting: Waiting, *more: Any) -> None:
        """What goes wrong with one connection ends that connection."""
        try:
            action(waiting, *more)
        except Exception:  # the thread's edge
            self._errors += 1
            log.warning("the front thread met an unexpected error; a connection is closed", exc_info=True)
            self._crowd.drop(waiting)

    def _on_time(self, now: float) -> None:
        if self._accepting:
            self._door.go_on(now)
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_SECONDS
        for waiting in (item for item in self._crowd if item.deadline < now):
            if waiting.is_arriving:
                self._guarded(self._refuse, waiting, RequestTimeout("The request took too long to arrive."))
            else:
                self._crowd.drop(waiting)

    # --- connections come and go ---

    def _let_in(self) -> None:
        for connection, address in self._door.accept():
            arrival = self._arrival(address[0], b"")
            self._crowd.add(Waiting(connection, address, arrival, time.monotonic() + HEAD_SECONDS))
        if self._door.is_resting:  # mostly there is no free file descriptor
            self._crowd.drop_oldest()

    def _take_back(self, waiting: Waiting) -> None:
        """One whose request has been answered, but for `outgoing`. Its next request may have come with the last one."""
        now = time.monotonic()
        waiting.latest, waiting.deadline = now + SEND_SECONDS, now + IDLE_SECONDS
        waiting.connection.setblocking(False)
        self._crowd.add(waiting)
        if waiting.outgoing or not waiting.keep or not self._accepting:
            self._send(waiting)
        elif waiting.arrival.rest:
            self._advance(waiting, b"")

    # --- requests ---

    def _receive(self, waiting: Waiting) -> None:
        try:
            data = waiting.connection.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._crowd.drop(waiting)
        elif not waiting.draining:
            self._advance(waiting, data)

    def _advance(self, waiting: Waiting, data: bytes) -> None:
        arrival, now = waiting.arrival, time.monotonic()
        try:
            answer = arrival.take(data, now)
            if answer:
                waiting.connection.send(answer)
        except StartLLMError as error:
            self._refuse(waiting, error)
            return
        except OSError:
            self._crowd.drop(waiting)
            return
        waiting.deadline = arrival.deadline
        if arrival.complete:
            assert arrival.head is not None and arrival.admitted is not None
            self._crowd.remove(waiting)
            self._desk.dispatch(
                Request(
                    waiting.connection,
                    waiting.address,
                    arrival.head,
                    arrival.admitted,
                    arrival.body,
                    rest=bytes(arrival.rest),
                    unread=arrival.unread,
                    received=now,
                )
            )

    # --- answers ---

    def _refuse(self, waiting: Waiting, error: StartLLMError) -> None:
        """A request that has no body leaves the connection as good as it was."""
        arrival, head = waiting.arrival, waiting.arrival.head
        arrival.body.close()
        waiting.keep = self._accepting and head is not None and head.keep_alive and not arrival.unread
        waiting.outgoing = self._desk.refusal(error, head, close=not waiting.keep)
        waiting.arrival = self._arrival(waiting.address[0], bytes(arrival.rest) if waiting.keep else b"")
        waiting.latest = time.monotonic() + SEND_SECONDS
        self._send(waiting)

    def _send(self, waiting: Waiting) -> None:
        now = time.monotonic()
        if waiting.outgoing:
            try:
                waiting.outgoing = send_now(waiting.connection, waiting.outgoing)
            except OSError:
                self._crowd.drop(waiting)
                return
        if waiting.outgoing:
            waiting.deadline = min(waiting.latest, now + STALL_SECONDS)
            self._crowd.look_for(waiting, selectors.EVENT_WRITE)
        elif waiting.keep and self._accepting:
            self._crowd.remove(waiting)  # not read from before its turn: what it sends meanwhile stays with it
            self._returned.append(waiting)
        else:
            self._drain(waiting, now)

    def _drain(self, waiting: Waiting, now: float) -> None:
        waiting.draining = True
        waiting.deadline = now + DRAIN_SECONDS
        self._crowd.look_for(waiting, selectors.EVENT_READ)
        try:
            waiting.connection.shutdown(socket.SHUT_WR)
        except OSError:
            self._crowd.drop(waiting)

    # --- the end ---

    def _end_waiting(self) -> None:
        """What is idle closes, what is not complete gets 503."""
        for waiting in self._crowd:
            if waiting.is_arriving:
                self._guarded(self._refuse, waiting, Unavailable("The server is shutting down."))
            elif waiting.is_idle:
                self._crowd.drop(waiting)

    def _close_all(self) -> None:
        for waiting in [*self._crowd, *self._returned]:
            self._crowd.drop(waiting)
        self._door.close()
        self._selector.close()
        self._bell.close()
