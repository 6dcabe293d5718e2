"""The model thread: the only one that touches MLX arrays. Commands go in by queue, events come out by sinks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from start_llm.core.errors import Internal, QueueFull, StartLLMError, TimedOut, Unavailable
from start_llm.core.events import EngineDone, EngineEvent, EngineFailed
from start_llm.core.exitcodes import ExitCode
from start_llm.core.prompt import Prompt
from start_llm.core.report import CacheReport
from start_llm.core.request import Sampling
from start_llm.core.stored import StoredTree
from start_llm.core.work import EngineStatus, Submit
from start_llm.engine.scheduler import Scheduler
from start_llm.engine.watchdog import Watchdog, Watched

log = logging.getLogger(__name__)

FIGURES_SECONDS = 1.0
UNWATCHED_SECONDS = 600.0
"""Without a watchdog: when the status calls the model wedged."""
WEDGED_RETRY_SECONDS = 30.0
CLOSE_SECONDS = 40.0
"""What writing the last KV to disk may take at the end."""
SHUTTING_DOWN = "The server is shutting down."


@dataclass(frozen=True, slots=True)
class _Cancel:
    work_id: str


@dataclass(frozen=True, slots=True)
class _Anchor:
    work: Submit


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(frozen=True, slots=True)
class _Call:
    """Runs `function(scheduler)` on the model thread."""

    function: Callable[[Scheduler], Any]
    answer: SimpleQueue[Any]


Command = Submit | _Cancel | _Anchor | _Stop | _Call


class Runtime(Protocol):
    """What the loader makes on the model thread."""

    scheduler: Scheduler

    def close(self) -> None:
        """Frees everything; the last call on the model thread."""
        ...


class _Nowhere:
    """A sink for work without a client."""

    def put(self, event: object, /) -> None:
        pass


class _TrackedSink:
    """Lets exactly one final event through, whichever thread sends it."""

    def __init__(self, work: Submit, closed: Callable[[str], bool]) -> None:
        self._id, self._sink, self._closed = work.id, work.sink, closed

    def put(self, event: EngineEvent, /) -> None:
        if isinstance(event, EngineDone | EngineFailed) and not self._closed(self._id):
            return
        self._sink.put(event)


class _OpenRequests:
    """What was submitted and has not had its final event yet. Thread-safe: any thread may give that event."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: dict[str, Submit] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._works)

    def opened(self, work: Submit) -> Submit:
        """The work with a sink that keeps count. Raises QueueFull."""
        with self._lock:
            open_now = len(self._works)
            if open_now >= self._most:
                raise QueueFull(f"{open_now} requests are running or waiting already.", retry_after=max(1.0, open_now))
            self._works[work.id] = work
        return replace(work, sink=_TrackedSink(work, self._closed))

    def fail(self, error: StartLLMError) -> list[str]:
        """Fails all of them; returns their ids. Clients must not hang on a dead model thread."""
        with self._lock:
            left = list(self._works.values())
            self._works.clear()
        for work in left:
            work.sink.put(EngineFailed(error))
        return [work.id for work in left]

    def _closed(self, work_id: str) -> bool:
        """Marks the work as ended; False if somebody else had ended it before."""
        with self._lock:
            return self._works.pop(work_id, None) is not None


def _ignore(code: ExitCode, why: str) -> None:
    """Nobody minds that the engine is lost."""


class EngineThread:
    """Implements `core.work.Engine`.

    `load` runs on the model thread; what it raises becomes the state ``failed``, and so does what ends the thread
    later. Nothing that a request does may hang for ever: where the model does not move for `watchdog` seconds,
    every request that is open fails, and new ones are refused, until it moves again.

    Args:
        watchdog: seconds; 0: requests wait however long it takes, and only the status says that the model is wedged.
        on_lost: called once, from any thread, when the engine will not come back: the thread has died, or has not
            moved for twice the watchdog's time.
    """

    def __init__(
        self,
        load: Callable[[], Runtime],
        *,
        max_queue: int,
        max_concurrency: int,
        watchdog: float = 600.0,
        on_lost: Callable[[ExitCode, str], None] = _ignore,
    ) -> None:
        self._load = load
        self._limit = watchdog
        self._on_lost = on_lost
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._status = EngineStatus("loading", beat=time.monotonic())
        self._requests = _OpenRequests(max_queue + max_concurrency)
        self._scheduler: Scheduler | None = None
        self._loaded = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)
        watched = Watched(
            beat=lambda: self._status.beat,
            wedged=self._wedged,
            hopeless=self._hopeless,
            thread_id=lambda: self._thread.ident or 0,
        )
        self._watchdog = Watchdog(watched, watchdog or UNWATCHED_SECONDS)
        self._idle_seconds = min(1.0, (watchdog or UNWATCHED_SECONDS) / 4)
        self._anchors = 0
        self._figures: Mapping[str, float] = {}
        self._figures_at = 0.0

    # --- any thread -----------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def wait_loaded(self, timeout: float | None = None) -> bool:
        """True once loading ended, well or not; see `status`."""
        return self._loaded.wait(timeout)

    def submit(self, work: Submit) -> None:
        status = self.status()
        if self._stopping:
            raise Unavailable(SHUTTING_DOWN)
        if status.state in {"loading", "failed", "stopped"}:
            raise Unavailable(status.detail or f"The model is {status.state}.")
        if status.state == "wedged" and self._limit:
            raise Unavailable(status.detail, retry_after=min(self._limit, WEDGED_RETRY_SECONDS))
        self._commands.put(self._requests.opened(work))

    def cancel(self, work_id: str) -> None:
        self._commands.put(_Cancel(work_id))

    def plan(self, prompt: Prompt) -> CacheReport:
        """Looks at what is stored now, without the model thread. Raises Unavailable if nothing is loaded."""
        scheduler = self._scheduler
        if scheduler is None:
            raise Unavailable(self._status.detail or f"The model is {self._status.state}.")
        return scheduler.plan(prompt.tokens)

    def stored(self) -> StoredTree:
        """All that is stored, without the model thread. Raises Unavailable if nothing is loaded, TimeoutError."""
        scheduler = self._scheduler
        if scheduler is None:
            raise Unavailable(self._status.detail or f"The model is {self._status.state}.")
        return scheduler.stored()

    def call(self, function: Callable[[Scheduler], Any], timeout: float = 10.0) -> Any:
        """Runs `function` on the model thread and returns what it returns; for probes and benchmarks."""
        answer: SimpleQueue[Any] = SimpleQueue()
        self._commands.put(_Call(function, answer))
        try:
            result = answer.get(timeout=timeout)
        except Empty:
            raise Unavailable("The model thread is busy; try again.") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def anchor(self, prompt: Prompt, session: str | None) -> None:
        self._anchors += 1
        work = Submit(
            id=f"anchor-{self._anchors}",
            prompt=prompt,
            sampling=Sampling(),
            max_tokens=1,
            sink=_Nowhere(),
            session=session,
        )
        self._commands.put(_Anchor(work))

    def status(self) -> EngineStatus:
        status, since, scheduler = self._status, self._watchdog.since, self._scheduler
        if scheduler is not None and status.state in {"ready", "busy"}:  # now, not before the step that the model is in
            running = scheduler.running
            status = replace(status, running=running, queued=max(0, len(self._requests) - running))
        if since is None or status.state not in {"ready", "busy"}:
            return status
        return replace(status, state="wedged", detail=_not_moving(since), since=since)

    def stop(self, patience: float = 10.0) -> bool:
        """Ends running work with 503 and waits for the thread's end. False: it has not come to one.

        A thread that is wedged or still loading is not waited for, one that is in a step as long as it has moved
        in the last `patience` seconds.
        """
        self._stopping = True
        self._commands.put(_Stop())
        gone = self._gone(patience)
        self._watchdog.stop()
        self._requests.fail(Unavailable(SHUTTING_DOWN))
        return gone

    def _gone(self, patience: float) -> bool:
        closing = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive():
            status, now = self.status(), time.monotonic()
            limit = {"loading": 0.0, "wedged": 0.0, "stopped": closing}.get(status.state, status.beat + patience)
            if now >= limit:
                return False
            self._thread.join(min(0.1, limit - now))
        return True

    # --- watchdog's thread --------------------------------------------------------

    def _wedged(self) -> None:
        if self._limit and self._status.state in {"ready", "busy"}:
            error = TimedOut(
                f"The model has not moved for {self._limit:g} s (GENERATION_WATCHDOG_SECONDS); "
                "the request was given up."
            )
            for work_id in self._requests.fail(error):
                self.cancel(work_id)

    def _hopeless(self) -> None:
        if self._limit and self._status.state in {"ready", "busy"} and not self._stopping:
            self._on_lost(ExitCode.WEDGED, _not_moving(self._watchdog.since or time.time()))

    # --- model thread -----------------------------------------------------------

    def _main(self) -> None:
        try:
            runtime = self._load()
        except BaseException as error:  # a model's own code may do anything; somebody waits for the end of loading
            if not isinstance(error, StartLLMError):  # whoever starts the server says what an expected error says
                log.error("loading failed: %s", error, exc_info=True)
            self._set("failed", detail=str(error) or type(error).__name__)
            self._loaded.set()
            return
        try:
            self._scheduler = runtime.scheduler
            self._set("ready", runtime.scheduler)
            self._loaded.set()
            self._watchdog.start()
            self._loop(runtime.scheduler)
            runtime.scheduler.requests.fail_all(Unavailable(SHUTTING_DOWN))
            self._set("stopped", detail=SHUTTING_DOWN)
        except BaseException as error:
            log.critical("the model thread died", exc_info=True)
            why = f"The model thread died ({type(error).__name__}: {error})."
            self._set("failed", detail=why)
            self._requests.fail(Internal(why))
            self._on_lost(ExitCode.ENGINE_DIED, why)
        finally:
            self._loaded.set()
            runtime.close()

    def _loop(self, scheduler: Scheduler) -> None:
        while self._drain(scheduler):
            self._set("busy" if scheduler.busy else "ready", scheduler)
            try:
                if scheduler.busy:
                    scheduler.step()
                else:
                    scheduler.anchoring.step()
            except Exception as error:
                log.warning("a scheduler step failed", exc_info=True)
                scheduler.recover(error)

    def _drain(self, scheduler: Scheduler) -> bool:
        """Takes all pending commands; waits for one if there is nothing to do. False: stop."""
        while True:
            idle = not scheduler.busy and not scheduler.anchoring.waiting
            if idle and self._status.state == "busy":
                self._set("ready", scheduler)
            try:
                command = self._commands.get(timeout=self._idle_seconds) if idle else self._commands.get_nowait()
            except Empty:
                if idle:
                    self._set("ready", scheduler)
                    scheduler.rest()
                    continue
                return True
            if isinstance(command, _Stop):
                return False
            self._do(scheduler, command)

    def _do(self, scheduler: Scheduler, command: Command) -> None:
        if isinstance(command, Submit):
            error = _guard(lambda: scheduler.add(command))
            if error is not None:
                command.sink.put(EngineFailed(Internal(f"The request cannot be run: {type(error).__name__}: {error}")))
        elif isinstance(command, _Cancel):
            scheduler.cancel(command.work_id)
        elif isinstance(command, _Anchor):
            _guard(lambda: scheduler.anchoring.begin(command.work))
        elif isinstance(command, _Call):
            command.answer.put(_guard(lambda: command.function(scheduler)))

    def _set(self, state: str, scheduler: Scheduler | None = None, detail: str = "") -> None:
        now = time.monotonic()
        if scheduler is None:
            self._status = EngineStatus(state, beat=now, detail=detail)
            return
        if now - self._figures_at >= FIGURES_SECONDS:
            self._figures, self._figures_at = scheduler.figures(), now
        self._status = EngineStatus(state, beat=now, detail=detail, figures=self._figures)


def _guard(function: Callable[[], Any]) -> Any:
    """What the function returns, or what it raises."""
    try:
        return function()
    except Exception as error:
        log.warning("a call on the model thread failed", exc_info=True)
        return error


def _not_moving(since: float) -> str:
    when = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"The model thread has not moved for {time.time() - since:.0f} s (since {when})."
