"""Accepts connections and reads request heads, all in one thread, none of it blocking.

A connection leaves with its first complete head, to whoever `dispatch` finds for it, and may
come back for its next request. So neither slow clients nor idle ones hold a worker, and
the lane of a request is chosen when its first line is known.
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

log = logging.getLogger(__name__)

HEAD_LIMIT = 65536
HEAD_SECONDS = 20.0
IDLE_SECONDS = 75.0
DRAIN_SECONDS = 3.0
MOST_WAITING = 1000
SWEEP_SECONDS = 0.5


@dataclass(eq=False, slots=True)
class Arriving:
    """A connection without a complete head, or one that is drained. `deadline` is on the monotonic clock."""

    connection: socket.socket
    address: tuple[str, int]
    deadline: float
    received: bytes = b""
    draining: bool = False


Dispatch = Callable[[socket.socket, tuple[str, int], bytes], None]


class Front:
    """The accept loop. `start`, `give_back`, `stop_accepting` and `stop` may be called from any thread."""

    def __init__(self, listener: socket.socket, dispatch: Dispatch) -> None:
        self._listener = listener
        self._dispatch = dispatch
        self._selector = selectors.DefaultSelector()
        self._waiting: set[Arriving] = set()
        self._returned: deque[Arriving] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._accepting = True
        self._running = True
        self._thread = threading.Thread(target=self._run, name="api-front", daemon=True)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, "accept")
        self._selector.register(self._wake_out, selectors.EVENT_READ, "wake")
        self._thread.start()

    def give_back(self, connection: socket.socket, address: tuple[str, int], rest: bytes) -> None:
        """A connection that has been answered and stays open; `rest` is the begin of its next request."""
        self._returned.append(Arriving(connection, address, time.monotonic() + IDLE_SECONDS, rest))
        self._wake()

    def drain(self, connection: socket.socket, address: tuple[str, int]) -> None:
        """A connection that has been answered with part of its request unread: closed when that has come.

        Closing at once would send a reset, which can overtake the answer.
        """
        self._returned.append(Arriving(connection, address, time.monotonic() + DRAIN_SECONDS, draining=True))
        self._wake()

    def stop_accepting(self) -> None:
        self._accepting = False
        self._wake()

    def stop(self) -> None:
        """Ends the thread and closes every connection that waits here."""
        self._running = False
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"!")
        except OSError:
            log.debug("the front thread has ended")

    def _run(self) -> None:
        try:
            while self._running:
                for key, _ in self._selector.select(SWEEP_SECONDS if self._waiting else None):
                    if key.data == "accept":
                        self._accept()
                    elif key.data == "wake":
                        self._wake_out.recv(4096)
                    else:
                        self._receive(key.data)
                self._take_returned()
                self._sweep(time.monotonic())
                if not self._accepting:
                    self._close_listener()
        finally:
            self._close_all()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            log.warning("a connection could not be accepted: %s", error)
            return
        connection.setblocking(False)
        if len(self._waiting) >= MOST_WAITING:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait_for(Arriving(connection, address[:2], time.monotonic() + HEAD_SECONDS))

    def _wait_for(self, arriving: Arriving) -> None:
        self._waiting.add(arriving)
        self._selector.register(arriving.connection, selectors.EVENT_READ, arriving)

    def _forget(self, arriving: Arriving) -> None:
        self._waiting.discard(arriving)
        self._selector.unregister(arriving.connection)

    def _take_returned(self) -> None:
        while self._returned:
            arriving = self._returned.popleft()
            if not self._accepting and not arriving.draining:
                arriving.connection.close()
                continue
            arriving.connection.setblocking(False)
            self._wait_for(arriving)
            if arriving.received:
                self._look(arriving)

    def _receive(self, arriving: Arriving) -> None:
        try:
            data = arriving.connection.recv(1 << 20 if arriving.draining else 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(arriving)
            arriving.connection.close()
            return
        if arriving.draining:
            return
        if not arriving.received:
            arriving.deadline = time.monotonic() + HEAD_SECONDS
        arriving.received += data
        self._look(arriving)

    def _look(self, arriving: Arriving) -> None:
        """Sends the connection on if its head is complete."""
        arriving.received = arriving.received.lstrip(b"\r\n")
        if b"\r\n\r\n" in arriving.received or b"\n\n" in arriving.received:
            self._forget(arriving)
            self._dispatch(arriving.connection, arriving.address, arriving.received)
        elif len(arriving.received) > HEAD_LIMIT:
            self._refuse(arriving, b"431 Request Header Fields Too Large")

    def _sweep(self, now: float) -> None:
        for arriving in [item for item in self._waiting if item.deadline < now]:
            self._refuse(arriving, b"408 Request Timeout" if arriving.received else b"")

    def _refuse(self, arriving: Arriving, status: bytes) -> None:
        self._forget(arriving)
        if status:
            try:
                arriving.connection.send(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            except OSError:
                log.debug("a slow client had gone")
        arriving.connection.close()

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
        for arriving in list(self._waiting):
            if not arriving.received and not arriving.draining:
                self._forget(arriving)
                arriving.connection.close()

    def _close_all(self) -> None:
        for arriving in [*self._waiting, *self._returned]:
            arriving.connection.close()
        self._waiting.clear()
        self._selector.close()
        self._listener.close()
        self._wake_in.close()
        self._wake_out.close()
