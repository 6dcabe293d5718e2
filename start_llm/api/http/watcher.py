"""Notices clients that go away while their request is being computed, since a thread that waits for events cannot.

The system is asked whether the other side has ended, since reading cannot tell: behind bytes that came too late (an
empty line, the next request) the end of the connection is not to be read.
"""

from __future__ import annotations

import fcntl
import logging
import select
import socket
import sys
import termios
import threading
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from start_llm.core.errors import Cancelled, ClientGone, StartLLMError, Unavailable
from start_llm.core.service import EventStream

log = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two looks."""
MOST_UNREAD = 32 << 10
"""Bytes behind a request that is computed. The smallest receive buffers in use hold 64 KiB; an end behind a full one is
not sent."""


@dataclass(eq=False, slots=True)
class Watch:
    """One connection under watch. `ended`: why its stream is closed early, told before that; ``None``: it is not."""

    connection: socket.socket
    stream: EventStream
    request_id: str = ""
    ended: StartLLMError | None = None


class DisconnectWatcher:
    """Closes the event streams of clients that have gone. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()
        self._over = False  # the server stops: a request that is only now under watch ends, too
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="api-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    @contextmanager
    def watch(self, connection: socket.socket, stream: EventStream, request_id: str = "") -> Iterator[Watch]:
        """While inside, a closed connection closes `stream`, and so does `cancel(request_id)`."""
        watch = Watch(connection, stream, request_id)
        with self._changed:
            self._watches.add(watch)
            self._changed.notify_all()
        if self._over:
            self._end(watch, Unavailable("The server is shutting down."))
        try:
            yield watch
        finally:
            with self._changed:
                self._watches.discard(watch)

    def cancel(self, request_id: str) -> bool:
        """Ends the request of that id; its client is told. False: it is not running."""
        with self._changed:
            watches = [watch for watch in self._watches if watch.request_id == request_id]
        for watch in watches:
            self._end(watch, Cancelled("This request was cancelled on the server's page."))
        return bool(watches)

    def close_all(self) -> None:
        """Ends every request under watch, because the server stops, and those that come under watch later."""
        with self._changed:
            self._over, watches = True, list(self._watches)
        for watch in watches:
            self._end(watch, Unavailable("The server is shutting down."))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watches and not self._stopping.is_set():
                    self._changed.wait()
                if self._stopping.is_set():
                    return
                gone = self._look()
            for watch in gone:
                self._end(watch, ClientGone("The client went away while its answer was being made."))
            self._stopping.wait(TICK)

    def _look(self) -> list[Watch]:
        """Called with the lock held, so that no socket is closed meanwhile."""
        by_fd = {watch.connection.fileno(): watch for watch in self._watches if not watch.ended}
        fds = [fd for fd in by_fd if fd >= 0]
        return [by_fd[fd] for fd in {*ended(fds), *filter(_is_full, fds)}]

    def _end(self, watch: Watch, why: StartLLMError) -> None:
        watch.ended = watch.ended or why
        try:
            watch.stream.close()
        except Exception:  # this thread serves every client
            log.warning("closing the event stream of a gone client failed", exc_info=True)


def _is_full(fd: int) -> bool:
    """Whether so much is unread that an end behind it might never arrive. No client sends as much in advance."""
    unread = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
    return int.from_bytes(unread, sys.byteorder) > MOST_UNREAD


_select: Any = select  # what it holds depends on the system


def _ended_by_poll(fds: Collection[int]) -> list[int]:
    """Linux: the other side has ended, or the connection has failed."""
    poller = _select.poll()
    for fd in fds:
        poller.register(fd, _select.POLLRDHUP)
    return [fd for fd, _ in poller.poll(0)]


def _ended_by_kqueue(fds: Collection[int]) -> list[int]:
    """macOS and the BSDs, whose `poll` does not tell an end behind unread bytes."""
    wanted = [_select.kevent(fd, _select.KQ_FILTER_READ, _select.KQ_EV_ADD) for fd in fds]
    if not wanted:
        return []
    with closing(_select.kqueue()) as queue:
        return [event.ident for event in queue.control(wanted, len(wanted), 0) if event.flags & _select.KQ_EV_EOF]


ended = _ended_by_kqueue if hasattr(select, "kqueue") else _ended_by_poll
"""Those of these sockets (file descriptors) whose other side has ended. Never blocks, reads nothing."""


def is_gone(connection: socket.socket) -> bool:
    """Has the other side closed? Never blocks."""
    return connection.fileno() < 0 or bool(ended([connection.fileno()]))
