"""The HTTP server: a front thread, a bounded pool for work, a small lane for what must never wait."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

from start_llm.api.common.dialect import error_reply
from start_llm.api.handler import Edge, RequestHandler
from start_llm.api.http import access
from start_llm.api.http.answers import encode_reply
from start_llm.api.http.connection import Connection
from start_llm.api.http.front import Front
from start_llm.api.http.listener import listen
from start_llm.api.http.routes import Request
from start_llm.api.http.watcher import DisconnectWatcher
from start_llm.api.http.wire import Head
from start_llm.api.media.audio import AudioRoutes
from start_llm.api.media.embeddings import Encodings
from start_llm.api.openai.responses import StoredResponses
from start_llm.api.openai.responses_store import ResponsesStore
from start_llm.api.ops import page
from start_llm.api.ops.page import Page
from start_llm.api.ops.status import Status
from start_llm.api.table import Dialects, build_routes
from start_llm.audio.service import AudioService
from start_llm.core.errors import QueueFull, StartLLMError, Unavailable
from start_llm.core.hosts import check_host, check_key, check_origin
from start_llm.core.limits import MOST_BODY_BYTES
from start_llm.core.service import Service
from start_llm.core.settings import Settings
from start_llm.dashboard.board import Board
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.observer import Observer
from start_llm.dashboard.request_log import RequestLog
from start_llm.embeddings.service import EncoderService
from start_llm.host.ports import address

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"}) | page.OPEN_PATHS
QUICK_THREADS = 2
FEED_THREADS = 8
"""Pages that may be open at a time; each has a thread, which mostly sleeps."""
LAST_WORDS_SECONDS = 1.0  # in which a request that is cancelled at the end may still tell its client so


class WorkerPool:
    """`threads` with at most `most_waiting` tasks that wait. With no threads, tasks run on the caller's.

    The threads are daemons: one that never returns does not hold up the end of the process.
    """

    def __init__(self, name: str, threads: int, most_waiting: int) -> None:
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._most = threads + most_waiting

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> bool:
        """False if too many wait. Called by one thread."""
        if self._threads and self._queue.unfinished_tasks >= self._most:
            return False
        self._queue.put(task)
        if not self._threads:
            self._run_next()
        return True

    def wait_idle(self, seconds: float) -> bool:
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)

    def stop(self) -> None:
        """What runs goes on; the threads end behind what waits."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """False: it was the last one."""
        task = self._queue.get()
        try:
            if task is not None:
                task()
        except Exception:  # the thread's edge
            log.warning("an HTTP thread met an unexpected error", exc_info=True)
        finally:
            self._queue.task_done()
        return task is not None


class ApiServer:
    """A server that is bound but not started; port 0 picks a free one.

    `start` and `stop` belong to one thread, the app's. Its other methods are the front's `RequestDispatcher`.

    Args:
        metrics, request_log: where requests are counted and logged.
        observers: others who want to see requests, e.g. `dashboard.terminal`.

    Raises:
        SettingsError: the address cannot be bound, or should not be, since everybody could use the server.
    """

    def __init__(
        self,
        settings: Settings,
        service: Service,
        *,
        metrics: Metrics,
        request_log: RequestLog,
        observers: Sequence[Observer],
        encoders: EncoderService,
        audio: AudioService,
    ) -> None:
        listeners = listen(settings)
        self.metrics = metrics
        self.metrics.watch(service)
        board, owners = Board(request_log), access.RequestOwners()
        self._watcher = DisconnectWatcher()
        status = Status(service, self.metrics, request_log, owners, encoders, settings.max_concurrency)
        self.port: int = listeners[0].getsockname()[1]
        self._settings, self._host_names = settings, settings.host_names
        self.page = Page(settings, status, board, self._watcher.cancel, self.url)
        everybody = (self.metrics, request_log, board, self.page.history, *observers)
        self._edge = Edge(self._watcher, everybody, self.metrics, ping_gap=min(1.0, settings.sse_ping_seconds / 5))
        self._store = ResponsesStore(settings.cache_dir / "responses.sqlite3")
        dialects = Dialects(settings, service, self._store, owners)
        self.routes = build_routes(
            dialects,
            StoredResponses(self._store),
            self.page,
            status,
            Encodings(encoders, owners),
            AudioRoutes(audio, owners),
        )
        self._at_work: set[Connection] = set()
        self._lock = threading.Lock()
        self._stopping = False
        threads = settings.http_threads
        self._pools = {
            "work": WorkerPool("api-work", 0 if threads == 1 else threads, max(settings.max_queue, 8)),
            "quick": WorkerPool("api-quick", 0 if threads == 1 else QUICK_THREADS, 1000),
            "feed": WorkerPool("api-feed", FEED_THREADS, 0),
        }
        self._front = Front(listeners, self)
        self.metrics.watch_figures(self._front.figures)

    @property
    def url(self) -> str:
        """Base URL without a path, as a client on this machine would use it."""
        return address(self._settings.mlx_host, self.port)

    def start(self) -> None:
        self.page.begin()
        self._watcher.start()
        for pool in self._pools.values():
            pool.start()
        self._front.start()

    def stop(self, graceful_seconds: float = 5.0) -> bool:
        """Takes no new requests, lets running ones end for `graceful_seconds`, then cancels them.

        Returns within three seconds more, whatever workers and clients do: False if a worker is still at work.
        """
        self._front.stop_accepting()
        self.page.close()
        work = self._pools["work"]
        idle = work.wait_idle(graceful_seconds)
        self._stopping = True
        if not idle:
            self._watcher.close_all()
            idle = work.wait_idle(LAST_WORDS_SECONDS)
        for pool in self._pools.values():
            pool.stop()
        with self._lock:
            for connection in self._at_work:
                _shut(connection.socket)
        self._front.stop()
        self._watcher.stop()
        idle = idle or work.wait_idle(0.5)
        if idle:  # else somebody may be writing
            self._store.close()
        return idle

    # --- what the front asks (`front.RequestDispatcher`) ---

    def admit(self, head: Head, peer: str) -> Request:
        settings, options = self._settings, head.method == "OPTIONS"
        if "Host" in head.headers:  # HTTP/1.0 may go without it, and no browser speaks that
            check_host(head.headers["Host"], self._host_names)
        origin = head.headers.get("Origin")
        if origin is not None:
            check_origin(origin)
        if settings.api_key is not None and head.path not in OPEN_PATHS and not options:
            check_key(head.headers, settings.api_key)
        route, params = self.routes.find(head.path)
        handler = None if options else self.routes.handler(route, head.method, head.path)
        reads_body = head.method in ("POST", "DELETE") and head.length != 0
        if reads_body:
            access.check_content(head.headers, form=route.form)
        query = head.target.partition("?")[2].partition("#")[0]
        request = Request(
            head.method,
            head.path,
            head.headers,
            params=params,
            visitor=access.visitor_of(head.headers, peer, settings.api_key, query),
            handler=handler,
            methods=route.methods,
            origin=origin,
            lane="quick" if options else route.lane,
            most_bytes=MOST_BODY_BYTES if reads_body else None,
            query=query,
        )
        if route.private and not options:
            request.visitor.check_sees_all()
        return request

    def dispatch(self, connection: Connection) -> None:
        request = connection.reader.request
        assert request is not None
        with self._lock:
            self._at_work.add(connection)
        if not self._pools[request.lane].submit(partial(self._answer, connection, request)):
            with self._lock:
                self._at_work.discard(connection)
            if request.lane == "feed":
                raise Unavailable(f"{FEED_THREADS} pages are open or models fetched already; end one.")
            raise QueueFull("Every HTTP thread is busy and the queue is full. Try again later.", retry_after=2)

    def refusal(self, error: StartLLMError, head: Head | None, *, close: bool) -> bytes:
        log.info("%d %s: %s", error.status, "request" if head is None else f"{head.method} {head.path}", error.message)
        path, headers = ("/", {}) if head is None else (head.path, head.headers)
        head_only = head is not None and head.method == "HEAD"
        return encode_reply(error_reply(error, path), access.origin_of(headers), close=close, head_only=head_only)

    # --- on HTTP threads ---

    def _answer(self, connection: Connection, request: Request) -> None:
        handler = RequestHandler(connection, request, self._edge)
        try:
            handler.answer(Unavailable("The server is shutting down.") if self._stopping else None)
        except OSError as error:
            handler.keep = False
            log.info("connection of %s failed: %s", connection.address[0], error)
        finally:
            self._give_back(connection, handler.outgoing, keep=handler.keep)

    def _give_back(self, connection: Connection, outgoing: bytes, *, keep: bool) -> None:
        connection.reader.body.close()
        with self._lock:
            self._at_work.discard(connection)
        if not outgoing and not keep and not _shut(connection.socket, socket.SHUT_WR):
            connection.close()
        else:
            self._front.take_back(connection, outgoing, keep=keep)


def _shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> bool:
    """False if the other side had gone."""
    try:
        connection.shutdown(how)
    except OSError:
        return False
    return True
