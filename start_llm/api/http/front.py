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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from start_llm.api.http.connection import HEAD_SECONDS, MOST_BYTES, Connection, Connections, RequestReader, send_now
from start_llm.api.http.listener import ListeningSocket, Waker, connections_allowed
from start_llm.api.http.routes import Request
from start_llm.api.http.wire import Head
from start_llm.core.errors import RequestTimeout, StartLLMError, Unavailable
from start_llm.core.limits import Allowance

log = logging.getLogger(__name__)

SEND_SECONDS = 300.0
STALL_SECONDS = 20.0
"""A client may take nothing of its answer so long."""
IDLE_SECONDS = 75.0
DRAIN_SECONDS = 3.0
SWEEP_SECONDS = 0.5
RECEIVE_BYTES = 65536


class RequestDispatcher(Protocol):
    """Whom the front asks, on its own thread: nothing here may block."""

    def admit(self, head: Head, peer: str) -> Request:
        """Raises StartLLMError: the request is refused, its body unread. `peer` is the client's address."""

    def dispatch(self, connection: Connection) -> None:
        """Takes a connection with its complete request. `Front.take_back` gets the connection back, or it is closed.

        Raises StartLLMError: it is not taken, and the request is refused.
        """

    def refusal(self, error: StartLLMError, head: Head | None, *, close: bool) -> bytes:
        """The whole answer to a request that is not run."""


class Front:
    """The accept loop. `start`, `take_back`, `stop_accepting` and `stop` may be called from any thread."""

    def __init__(self, listeners: Sequence[socket.socket], dispatcher: RequestDispatcher) -> None:
        self._dispatcher = dispatcher
        self._bodies = Allowance(MOST_BYTES)
        self._selector = selectors.DefaultSelector()
        self._listeners = [ListeningSocket(listener, self._selector) for listener in listeners]
        self._connections = Connections(self._selector, connections_allowed())
        self._returned: deque[Connection] = deque()
        self._waker = Waker(self._selector)
        self._accepting = True
        self._running = True
        self._next_sweep = 0.0
        self._errors = 0
        self._thread = threading.Thread(target=self._run, name="api-front", daemon=True)

    def figures(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "http_waiting": len(self._connections),
            "http_dropped": self._connections.dropped,
            "http_accept_pauses": sum(listener.pauses for listener in self._listeners),
            "http_front_errors": self._errors,
        }

    def start(self) -> None:
        for listener in self._listeners:
            listener.listen()
        self._thread.start()

    def take_back(self, connection: Connection, outgoing: bytes, *, keep: bool) -> None:
        """Takes back a connection whose request was answered. `outgoing`: the end of the answer, still to be sent."""
        if not self._thread.is_alive():
            connection.close()
            return
        self._expect_next(connection, outgoing, keep=keep)
        self._returned.append(connection)
        self._waker.wake()

    def stop_accepting(self) -> None:
        """No new connections and no new requests: those that are not complete get 503."""
        self._accepting = False
        self._waker.wake()

    def stop(self) -> None:
        """Ends the thread and closes every connection that waits here."""
        self._running = False
        self._waker.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=1)

    def _reader(self, peer: str, following: bytes = b"") -> RequestReader:
        return RequestReader(self._bodies, partial(self._dispatcher.admit, peer=peer), following)

    def _expect_next(self, connection: Connection, outgoing: bytes, *, keep: bool) -> None:
        following = bytes(connection.reader.following) if keep else b""
        connection.reader = self._reader(connection.address[0], following)
        connection.outgoing, connection.keep = outgoing, keep

    # --- the loop ---

    def _run(self) -> None:
        try:
            while self._running:
                resting = any(listener.is_resting for listener in self._listeners)
                in_time = SWEEP_SECONDS if self._connections or resting else None
                for key, _ in self._selector.select(0 if self._returned else in_time):
                    if isinstance(key.data, ListeningSocket):
                        self._accept_new(key.data)
                    elif key.data is self._waker:
                        self._waker.drain()
                    elif key.data in self._connections:
                        self._guarded(self._send if key.data.outgoing else self._receive, key.data)
                for _ in range(len(self._returned)):  # one that comes back at once has its turn after the others
                    self._guarded(self._add_returned, self._returned.popleft())
                self._on_time(time.monotonic())
                if not self._accepting:
                    closed = [listener.close() for listener in self._listeners]
                    if any(closed):
                        self._end_waiting()
        finally:
            self._close_all()

    def _guarded(self, action: Callable[..., None], connection: Connection, *more: Any) -> None:
        """What goes wrong with one connection ends that connection."""
        try:
            action(connection, *more)
        except Exception:  # the thread's edge
            self._errors += 1
            log.warning("the front thread met an unexpected error; a connection is closed", exc_info=True)
            self._connections.drop(connection)

    def _on_time(self, now: float) -> None:
        if self._accepting:
            for listener in self._listeners:
                listener.resume(now)
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_SECONDS
        for connection in [item for item in self._connections if item.deadline < now]:
            if connection.is_arriving:
                self._guarded(self._refuse, connection, RequestTimeout("The request took too long to arrive."))
            else:
                self._connections.drop(connection)

    # --- connections come and go ---

    def _accept_new(self, listener: ListeningSocket) -> None:
        for connected, address in listener.accept():
            reader = self._reader(address[0])
            self._connections.add(Connection(connected, address, reader, time.monotonic() + HEAD_SECONDS))
        if listener.is_resting:  # mostly there is no free file descriptor
            self._connections.drop_oldest()

    def _add_returned(self, connection: Connection) -> None:
        """One whose request has been answered, but for `outgoing`. Its next request may have come with the last one."""
        now = time.monotonic()
        connection.latest, connection.deadline = now + SEND_SECONDS, now + IDLE_SECONDS
        connection.socket.setblocking(False)
        self._connections.add(connection)
        if connection.outgoing or not connection.keep or not self._accepting:
            self._send(connection)
        elif connection.reader.following:
            self._advance(connection, b"")

    # --- requests ---

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._connections.drop(connection)
        elif not connection.draining:
            self._advance(connection, data)

    def _advance(self, connection: Connection, data: bytes) -> None:
        reader = connection.reader
        try:
            answer = reader.take(data, time.monotonic())
            if answer:
                connection.socket.send(answer)
        except StartLLMError as error:
            self._refuse(connection, error)
            return
        except OSError:
            self._connections.drop(connection)
            return
        connection.deadline = reader.deadline
        if reader.complete:
            self._connections.remove(connection)
            try:
                self._dispatcher.dispatch(connection)
            except StartLLMError as error:
                self._connections.add(connection)
                self._refuse(connection, error)

    # --- answers ---

    def _refuse(self, connection: Connection, error: StartLLMError) -> None:
        """A request that has no body leaves the connection as good as it was."""
        connection.reader.body.close()
        keep = self._accepting and connection.reader.keeps_alive
        outgoing = self._dispatcher.refusal(error, connection.reader.head, close=not keep)
        self._expect_next(connection, outgoing, keep=keep)
        connection.latest = time.monotonic() + SEND_SECONDS
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        now = time.monotonic()
        if connection.outgoing:
            try:
                connection.outgoing = send_now(connection.socket, connection.outgoing)
            except OSError:
                self._connections.drop(connection)
                return
        if connection.outgoing:
            connection.deadline = min(connection.latest, now + STALL_SECONDS)
            self._connections.look_for(connection, selectors.EVENT_WRITE)
        elif connection.keep and self._accepting:
            self._connections.remove(connection)  # not read from before its turn: what it sends meanwhile stays with it
            self._returned.append(connection)
        else:
            connection.draining, connection.deadline = True, now + DRAIN_SECONDS
            self._connections.look_for(connection, selectors.EVENT_READ)
            try:
                connection.socket.shutdown(socket.SHUT_WR)
            except OSError:
                self._connections.drop(connection)

    # --- the end ---

    def _end_waiting(self) -> None:
        """What is idle closes, what is not complete gets 503."""
        for connection in list(self._connections):
            if connection.is_arriving:
                self._guarded(self._refuse, connection, Unavailable("The server is shutting down."))
            elif not connection.outgoing and not connection.draining:
                self._connections.drop(connection)

    def _close_all(self) -> None:
        for connection in [*self._connections, *self._returned]:
            self._connections.drop(connection)
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._waker.close()
