"""The listening socket: open, resting, or closed."""

from __future__ import annotations

import errno
import logging
import resource
import selectors
import socket
import time
from urllib.parse import urlsplit

from start_llm.core.hosts import is_loopback
from start_llm.core.settings import Settings, SettingsError

log = logging.getLogger(__name__)

MOST_WAITING = 1000
BACKLOG = 128
ACCEPT_AT_ONCE = 64
REST_SECONDS = 0.5
WARNING_SECONDS = 60.0
NOTHING_THERE = frozenset({errno.EAGAIN, errno.EINTR, errno.ECONNABORTED, errno.EPROTO})


class ListeningSocket:
    """Belongs to the front thread. `pauses`: how often accepting has failed, mostly for want of file descriptors."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        self.pauses = 0
        self._listener = listener
        self._selector = selector
        self._resume_at = 0.0
        self._next_warning = 0.0

    @property
    def is_resting(self) -> bool:
        return self._resume_at > 0

    def listen(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self)

    def accept(self) -> list[tuple[socket.socket, tuple[str, int]]]:
        """New connections, non-blocking, at most `ACCEPT_AT_ONCE`.

        After a failure it rests: the listener stays readable, so asking on would only burn time.
        """
        found: list[tuple[socket.socket, tuple[str, int]]] = []
        while len(found) < ACCEPT_AT_ONCE:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if error.errno not in NOTHING_THERE:
                    self._rest(error)
                break
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:  # the client has gone already
                connection.close()
                continue
            found.append((connection, address[:2]))
        return found

    def resume(self, now: float) -> None:
        """Ends a rest that has been long enough."""
        if self.is_resting and now >= self._resume_at:
            self._resume_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self)

    def close(self) -> bool:
        """False if it was closed before."""
        if self._listener.fileno() < 0:
            return False
        if not self.is_resting:
            self._selector.unregister(self._listener)
        self._resume_at = 0.0
        self._listener.close()
        return True

    def _rest(self, error: OSError) -> None:
        now = time.monotonic()
        self.pauses += 1
        if now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            log.warning("no connection can be accepted for now: %s", error)
        self._selector.unregister(self._listener)
        self._resume_at = now + REST_SECONDS


def connections_allowed() -> int:
    """`MOST_WAITING`, or half of the file descriptors that this process may have: the others are needed elsewhere."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_WAITING if soft == resource.RLIM_INFINITY else max(16, min(MOST_WAITING, soft // 2))


def raise_descriptor_limit(wanted: int = 8192) -> None:
    """Lets this process have more open files, as far as the system allows; macOS begins with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:
        log.info("the limit of open files stays at %d: %s", soft, error)


class Waker:
    """Wakes the front thread from its selector; `wake` may be called from any thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)
        selector.register(self._inside, selectors.EVENT_READ, self)

    def wake(self) -> None:
        try:
            self._outside.send(b"!")
        except OSError:
            log.debug("the front thread has ended, or is awake")

    def drain(self) -> None:
        self._inside.recv(4096)

    def close(self) -> None:
        self._inside.close()
        self._outside.close()


def check_bind(settings: Settings) -> None:
    """Raises SettingsError where everybody in the network could use the server and nobody said so."""
    places = {"MLX_HOST": settings.mlx_host, "KV_EVENTS": urlsplit(settings.kv_events or "tcp://localhost").hostname}
    for name, host in places.items():
        if not (host == "localhost" or is_loopback(host or "*") or settings.api_key or settings.allow_open_bind):
            raise SettingsError(
                f"{name}={host!r}: other machines could use this server, and it has no API_KEY. Set API_KEY, or "
                "ALLOW_OPEN_BIND=true if everybody there may."
            )


def listen(settings: Settings) -> list[socket.socket]:
    """A new socket; behind it the one of OLLAMA_PORT, if that is set.

    Raises SettingsError where there is none to be had.
    """
    check_bind(settings)
    host = settings.mlx_host
    found = [_bound(host, settings.mlx_port, "MLX_PORT")]
    try:
        if settings.ollama_port is not None:
            found.append(_bound(host, settings.ollama_port, "OLLAMA_PORT"))
    except SettingsError:
        found[0].close()
        raise
    return found


def _bound(host: str, port: int, name: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"{name}={port}: the port is in use on {host}. Stop the program that has it, "
                f"or set {name} to another port (0 picks a free one)."
            ) from None
        raise SettingsError(f"MLX_HOST={host!r}, {name}={port}: cannot be bound: {error}.") from None
