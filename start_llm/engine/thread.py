"""The model thread: the only one that touches MLX arrays. Commands go in by queue, events come out by sinks.

It serves all models that are loaded, see `units`. The first is loaded when it starts; `load` and `unload` come and go
in steps, between the steps of those that work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any

from start_llm.core.errors import Internal, StartLLMError, TimedOut, Unavailable
from start_llm.core.events import EngineFailed
from start_llm.core.exitcodes import ExitCode
from start_llm.core.prompt import Prompt
from start_llm.core.report import CacheReport
from start_llm.core.request import Sampling
from start_llm.core.stored import StoredTree
from start_llm.core.work import EngineStatus, Submit
from start_llm.engine.opened import OpenRequests
from start_llm.engine.scheduler import Scheduler
from start_llm.engine.units import REST_SECONDS, Chores, Runtime, Unit, Units
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
    model: str
    answer: SimpleQueue[Any]


@dataclass(frozen=True, slots=True)
class _Chore:
    """Runs these steps between those of the models."""

    steps: Generator[float, None, Any]
    answer: SimpleQueue[Any]


Command = Submit | _Cancel | _Anchor | _Stop | _Call | _Chore


class _Nowhere:
    """A sink for work without a client."""

    def put(self, event: object, /) -> None:
        pass


def _ignore(code: ExitCode, why: str) -> None:
    """Nobody minds that the engine is lost."""


def _nothing() -> None:
    """Nothing has to be done at the end."""


class EngineThread:
    """Implements `core.work.Engine`.

    `load` runs on the model thread; what it raises becomes the state ``failed``, and so does what ends the thread
    later. Nothing that a request does may hang for ever: where the model does not move for `watchdog` seconds,
    every request that is open fails, and new ones are refused, until it moves again.

    Args:
        load: makes the first model, whose name here is ``""``.
        at_end: the last call on the model thread, when all models are closed.
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
        at_end: Callable[[], None] = _nothing,
    ) -> None:
        self._load, self._at_end = load, at_end
        self._limit = watchdog
        self._on_lost = on_lost
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._status = EngineStatus("loading", beat=time.monotonic())
        self._requests = OpenRequests(max_queue + max_concurrency)
        self._units, self._chores = Units(), Chores()
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

    def plan(self, prompt: Prompt, model: str = "") -> CacheReport:
        """Looks at what is stored now, without the model thread. Raises Unavailable if the model is not loaded."""
        return self._scheduler(model).plan(prompt.tokens)

    def stored(self, model: str = "") -> StoredTree:
        """All that is stored, without the model thread. Raises Unavailable if it is not loaded, TimeoutError."""
        return self._scheduler(model).stored()

    def _scheduler(self, model: str) -> Scheduler:
        found = self._units.get(model)
        if found is None:
            raise Unavailable(self._status.detail or _not_loaded(model))
        return found

    def call(self, function: Callable[[Scheduler], Any], timeout: float = 10.0, model: str = "") -> Any:
        """Runs `function` on the model thread and returns what it returns; for probes and benchmarks."""
        answer: SimpleQueue[Any] = SimpleQueue()
        self._commands.put(_Call(function, model, answer))
        try:
            result = answer.get(timeout=timeout)
        except Empty:
            raise Unavailable("The model thread is busy; try again.") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def load(self, model: str, steps: Generator[float, None, Runtime]) -> None:
        """Runs `steps` on the model thread, between the steps of the models that work, and adds what they return.

        Returns when that is done. Raises what the steps raise, Unavailable if the thread ends before.
        """

        def adding() -> Generator[float]:
            self._units.add(model, (yield from steps))

        self._chore(adding())

    def unload(self, model: str) -> None:
        """Ends the model's requests, brings its KV to disk and frees it, between the steps of others; as `load`."""

        def removing() -> Generator[float]:
            runtime = self._units.remove(model)
            if runtime is not None:
                runtime.scheduler.requests.fail_all(Unavailable(_not_loaded(model)))
                yield from runtime.unloading()

        self._chore(removing())

    def chore(self, steps: Generator[float, None, Any]) -> Any:
        """Runs `steps` on the model thread, between the steps of the models that work.

        Returns what they return, when that is done. Raises what they raise, Unavailable if the thread ends before,
        TimedOut if it has not moved for the watchdog's time.
        """
        return self._chore(steps, limit=self._limit)

    def _chore(self, steps: Generator[float, None, Any], limit: float = 0.0) -> Any:
        """`limit`: not 0: a thread that hangs is not waited for."""
        if self._status.state in {"failed", "stopped"}:
            raise Unavailable(self._status.detail or SHUTTING_DOWN)
        answer: SimpleQueue[Any] = SimpleQueue()
        self._commands.put(_Chore(steps, answer))
        while True:
            try:
                result = answer.get(timeout=1.0)
                break
            except Empty:
                if not self._thread.is_alive():
                    raise Unavailable(self._status.detail or SHUTTING_DOWN) from None
                if limit and self.status().state == "wedged":
                    raise TimedOut(_hangs(limit)) from None
        if isinstance(result, BaseException):
            raise result
        return result

    def anchor(self, prompt: Prompt, session: str | None, model: str = "") -> None:
        self._anchors += 1
        work = Submit(
            id=f"anchor-{self._anchors}",
            prompt=prompt,
            sampling=Sampling(),
            max_tokens=1,
            sink=_Nowhere(),
            session=session,
            model=model,
        )
        self._commands.put(_Anchor(work))

    def status(self) -> EngineStatus:
        status, since = self._status, self._watchdog.since
        if status.state in {"ready", "busy"}:  # now, not before the step that the model is in
            running = self._units.running
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
            for work_id in self._requests.fail(TimedOut(_hangs(self._limit))):
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
            self._units.add("", runtime)
            self._set("ready")
            self._loaded.set()
            self._watchdog.start()
            del runtime  # it may be unloaded
            self._loop()
            for unit in self._units:
                unit.scheduler.requests.fail_all(Unavailable(SHUTTING_DOWN))
            self._set("stopped", detail=SHUTTING_DOWN)
        except BaseException as error:
            log.critical("the model thread died", exc_info=True)
            why = f"The model thread died ({type(error).__name__}: {error})."
            self._set("failed", detail=why)
            self._requests.fail(Internal(why))
            self._on_lost(ExitCode.ENGINE_DIED, why)
        finally:
            self._loaded.set()
            self._chores.fail(Unavailable(SHUTTING_DOWN))
            self._units.close()
            self._at_end()

    def _loop(self) -> None:
        while self._drain():
            unit = self._units.next(others=len(self._chores) > 0)
            self._set("ready" if unit is None else "busy")
            if unit is not None:
                self._step(unit)
                self._units.rest(REST_SECONDS)
            elif (idle := self._units.anchoring) is not None:
                idle.scheduler.anchoring.step()
            self._chores.step()

    def _step(self, unit: Unit) -> None:
        try:
            self._units.step(unit)
        except Exception as error:
            log.warning("a scheduler step failed", exc_info=True)
            unit.scheduler.recover(error)

    def _drain(self) -> bool:
        """Takes all pending commands; waits for one if there is nothing to do. False: stop."""
        while True:
            wait = self._idle_for()
            if wait and self._status.state == "busy":
                self._set("ready")
            try:
                command = self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
            except Empty:
                if wait:
                    self._set("ready")
                    self._units.rest(REST_SECONDS if self._chores else 0.0)
                if not wait or self._chores:
                    return True
                continue
            if isinstance(command, _Stop):
                return False
            self._do(command)

    def _idle_for(self) -> float:
        """Seconds for which there is nothing to do but to wait for a command."""
        if self._units.busy or self._units.anchoring is not None:
            return 0.0
        return min(self._idle_seconds, self._chores.wait) if self._chores else self._idle_seconds

    def _do(self, command: Command) -> None:
        if isinstance(command, Submit):
            error = _guard(lambda: self._scheduler(command.model).add(command))
            if error is not None:
                command.sink.put(EngineFailed(_refused(error)))
        elif isinstance(command, _Cancel):
            for unit in self._units:
                unit.scheduler.cancel(command.work_id)
        elif isinstance(command, _Anchor):
            scheduler = self._units.get(command.work.model)
            if scheduler is not None:
                _guard(lambda: scheduler.anchoring.begin(command.work))
        elif isinstance(command, _Call):
            command.answer.put(_guard(lambda: command.function(self._scheduler(command.model))))
        elif isinstance(command, _Chore):
            self._chores.add(command.steps, command.answer.put)

    def _set(self, state: str, detail: str = "") -> None:
        now = time.monotonic()
        if state not in {"ready", "busy"}:
            self._status = EngineStatus(state, beat=now, detail=detail)
            return
        if now - self._figures_at >= FIGURES_SECONDS:
            self._figures, self._figures_at = self._units.figures(), now
        self._status = EngineStatus(state, beat=now, detail=detail, figures=self._figures)


def _guard(function: Callable[[], Any]) -> Any:
    """What the function returns, or what it raises."""
    try:
        return function()
    except Exception as error:
        log.warning("a call on the model thread failed", exc_info=True)
        return error


def _refused(error: Exception) -> StartLLMError:
    if isinstance(error, StartLLMError):
        return error
    return Internal(f"The request cannot be run: {type(error).__name__}: {error}")


def _not_loaded(model: str) -> str:
    return f"The model {model!r} is not loaded." if model else "The model is not loaded."


def _hangs(limit: float) -> str:
    return f"The model has not moved for {limit:g} s (GENERATION_WATCHDOG_SECONDS); the request was given up."


def _not_moving(since: float) -> str:
    when = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"The model thread has not moved for {time.time() - since:.0f} s (since {when})."
