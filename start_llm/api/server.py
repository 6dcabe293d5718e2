"""The HTTP server: a front thread, a bounded pool for work, a small lane for what must never wait."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from start_llm.api import sse
from start_llm.api.errors import error_body, error_headers, style_of
from start_llm.api.front import Front
from start_llm.api.handler import ApiHandler
from start_llm.api.responses_store import ResponsesStore
from start_llm.api.routes import Routes
from start_llm.api.run import Runner
from start_llm.api.table import build_routes
from start_llm.api.watcher import DisconnectWatcher
from start_llm.core.errors import QueueFull
from start_llm.core.service import Service
from start_llm.core.settings import Settings, SettingsError
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.observer import Observer
from start_llm.dashboard.request_log import RequestLog

log = logging.getLogger(__name__)

BACKLOG = 128
QUICK_THREADS = 2


@dataclass(frozen=True, slots=True)
class Edge:
    """What every handler needs; shared by all threads, never changed."""

    settings: Settings
    routes: Routes
    runner: Runner
    metrics: Metrics


class Lane:
    """A pool of `threads` with at most `most_waiting` tasks that wait. With no threads, tasks run on the caller's."""

    def __init__(self, name: str, threads: int, most_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name) if threads else None
        self._room = threads + most_waiting
        self._lock = threading.Lock()
        self._tasks = 0
        self._idle = threading.Condition(self._lock)

    def submit(self, task: Callable[..., None], *args: Any) -> bool:
        """False if there is no room."""
        with self._lock:
            if self._pool is not None and self._tasks >= self._room:
                return False
            self._tasks += 1
        if self._pool is None:
            self._run(task, *args)
        else:
            self._pool.submit(self._run, task, *args)
        return True

    def wait_idle(self, seconds: float) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self._tasks == 0, seconds)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, task: Callable[..., None], *args: Any) -> None:
        try:
            task(*args)
        except Exception:  # the thread's edge
            log.warning("an HTTP thread met an unexpected error", exc_info=True)
        finally:
            with self._idle:
                self._tasks -= 1
                self._idle.notify_all()


class ApiServer:
    """`start` and `stop` belong to one thread, the app's."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        edge: Edge,
        watcher: DisconnectWatcher,
        store: ResponsesStore,
    ) -> None:
        self._edge = edge
        self._host = settings.mlx_host
        self._watcher = watcher
        self._store = store
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.port: int = listener.getsockname()[1]
        single = settings.http_threads == 1
        self._work = Lane("api-work", 0 if single else settings.http_threads, max(settings.max_queue, 8))
        self._quick = Lane("api-quick", 0 if single else QUICK_THREADS, 1000)
        self._front = Front(listener, self._dispatch)

    @property
    def url(self) -> str:
        """Base URL without a path, as a client on this machine would use it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self._host, self._host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def metrics(self) -> Metrics:
        return self._edge.metrics

    def start(self) -> None:
        self._watcher.start()
        self._front.start()

    def stop(self, graceful_seconds: float = 5.0) -> None:
        """Takes no new requests, lets running ones end for `graceful_seconds`, then cancels them."""
        self._front.stop_accepting()
        if not self._work.wait_idle(graceful_seconds):
            self._watcher.close_all()
            self._work.wait_idle(1.0)
        self._work.stop()
        self._quick.wait_idle(1.0)
        self._quick.stop()
        with self._lock:
            left = list(self._connections)
        for connection in left:
            _shut(connection)
        self._front.stop()
        self._watcher.stop()
        self._store.close()

    def _dispatch(self, connection: socket.socket, address: tuple[str, int], received: bytes) -> None:
        """On the front thread: picks the lane by the request's first line."""
        words = received.split(b"\n", 1)[0].decode("latin-1").split()
        method, path = (words[0], words[1].partition("?")[0].rstrip("/")) if len(words) > 1 else ("", "")
        with self._lock:
            self._connections.add(connection)
        lane = self._quick if self._edge.routes.is_quick(method, path) else self._work
        if not lane.submit(self._handle, connection, address, received):
            self._refuse(connection, address, path)

    def _handle(self, connection: socket.socket, address: tuple[str, int], received: bytes) -> None:
        keep = unread = False
        try:
            handler = ApiHandler(connection, address, received, self._edge)
            keep, unread = not handler.close_connection, handler.body_unread
        except OSError as error:
            log.info("connection of %s failed: %s", address[0], error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            if keep:
                self._front.give_back(connection, address, handler.rfile.rest)
            elif unread and _shut(connection, socket.SHUT_WR):
                self._front.drain(connection, address)
            else:
                _shut(connection)
                connection.close()

    def _refuse(self, connection: socket.socket, address: tuple[str, int], path: str) -> None:
        error = QueueFull("Every HTTP thread is busy and the queue is full. Try again later.", retry_after=2)
        body, kind = error_body(error, style_of(path))
        headers = {"Content-Type": kind, "Connection": "close"} | error_headers(error)
        raw = sse.dumps(body)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 429 Too Many Requests\r\n{lines}Content-Length: {len(raw)}\r\n\r\n".encode()
        try:
            connection.send(head + raw)
        except OSError:
            log.debug("a refused client had gone")
        with self._lock:
            self._connections.discard(connection)
        if _shut(connection, socket.SHUT_WR):
            self._front.drain(connection, address)
        else:
            connection.close()


def make_server(
    settings: Settings,
    service: Service,
    *,
    metrics: Metrics | None = None,
    request_log: RequestLog | None = None,
    observers: Sequence[Observer] = (),
) -> ApiServer:
    """A server that is bound but not started; port 0 picks a free one.

    Args:
        metrics: where requests are counted; a new one by default.
        request_log: by default one in ``LOG_ROOT`` if ``ENABLE_REQUEST_LOGGING``.
        observers: others who want to see requests, e.g. `dashboard.live`.

    Raises:
        SettingsError: the address cannot be bound, e.g. because the port is in use.
    """
    metrics = metrics or Metrics()
    metrics.watch(service)
    request_log = request_log or RequestLog(settings.log_root if settings.enable_request_logging else None)
    watcher = DisconnectWatcher()
    runner = Runner(service, watcher, [metrics, request_log, *observers], settings.sse_ping_seconds)
    store = ResponsesStore(
        settings.cache_dir / "responses.sqlite3", settings.responses_store_max, settings.responses_store_ttl_seconds
    )
    routes = build_routes(settings, service, metrics, request_log, store)
    listener = _listen(settings.mlx_host, settings.mlx_port)
    return ApiServer(settings, listener, Edge(settings, routes, runner, metrics), watcher, store)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"MLX_PORT={port}: the port is in use on {host}. Stop the program that has it, "
                "or set MLX_PORT to another port (0 picks a free one)."
            ) from None
        raise SettingsError(f"MLX_HOST={host!r}, MLX_PORT={port}: cannot be bound: {error}.") from None
    except OverflowError as error:
        raise SettingsError(f"MLX_PORT={port}: {error}.") from None


def _shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> bool:
    """False if the other side had gone."""
    try:
        connection.shutdown(how)
    except OSError:
        return False
    return True
