"""The model thread: the only one that touches MLX arrays. Commands go in by queue, events come out by sinks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from start_llm.core.errors import Internal, QueueFull, StartLLMError, Unavailable
from start_llm.core.events import EngineDone, EngineEvent, EngineFailed
from start_llm.core.prompt import Prompt
from start_llm.core.report import CacheReport
from start_llm.core.request import Sampling
from start_llm.core.work import EngineStatus, Submit
from start_llm.engine.scheduler import Scheduler

log = logging.getLogger(__name__)

FIGURES_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Cancel:
    work_id: str


@dataclass(frozen=True, slots=True)
class _Plan:
    prompt: Prompt
    answer: SimpleQueue[CacheReport | StartLLMError]


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


Command = Submit | _Cancel | _Plan | _Anchor | _Stop | _Call


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


class EngineThread:
    """Implements `core.work.Engine`.

    `load` runs on the model thread; what it raises becomes the state ``failed``.
    The thread beats before every step; `status` calls it wedged if the beat is
    older than `wedged_after` seconds while there is work.
    """

    def __init__(
        self, load: Callable[[], Runtime], *, max_queue: int, max_concurrency: int, wedged_after: float = 120.0
    ) -> None:
        self._load = load
        self._max_waiting = max_queue + max_concurrency
        self._wedged_after = wedged_after
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._status = EngineStatus("loading", beat=time.monotonic())
        self._open: dict[str, Submit] = {}
        self._open_lock = threading.Lock()
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)
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
        status = self._status
        if status.state in {"loading", "failed", "stopped"}:
            raise Unavailable(status.detail or f"The model is {status.state}.")
        with self._open_lock:
            if len(self._open) >= self._max_waiting:
                raise QueueFull(
                    f"{len(self._open)} requests are running or waiting already.", retry_after=max(1.0, len(self._open))
                )
            self._open[work.id] = work
        self._commands.put(replace(work, sink=_TrackedSink(work, self._closed)))

    def cancel(self, work_id: str) -> None:
        self._commands.put(_Cancel(work_id))

    def plan(self, prompt: Prompt) -> CacheReport:
        """Raises Unavailable if the model thread does not answer within 10 s."""
        answer: SimpleQueue[CacheReport | StartLLMError] = SimpleQueue()
        self._commands.put(_Plan(prompt, answer))
        return self._wait(answer)  # type: ignore[no-any-return]

    def call(self, function: Callable[[Scheduler], Any], timeout: float = 10.0) -> Any:
        """Runs `function` on the model thread and returns what it returns; for probes and benchmarks."""
        answer: SimpleQueue[Any] = SimpleQueue()
        self._commands.put(_Call(function, answer))
        return self._wait(answer, timeout)

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
        status = self._status
        late = time.monotonic() - status.beat > self._wedged_after
        alive = self._thread.is_alive() or status.state in {"failed", "stopped", "loading"}
        if status.state == "loading" or (alive and not (late and self._open)):
            return status
        return EngineStatus("wedged", status.running, status.queued, status.beat, "The model thread does not answer.")

    def stop(self, timeout: float = 10.0) -> None:
        """Ends running work with 503 and joins the thread."""
        self._commands.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(timeout)
        self.fail_open(Unavailable("The server is shutting down."))

    def fail_open(self, error: StartLLMError) -> None:
        """Fails every request that is still open, from any thread: clients must not hang on a dead model thread."""
        with self._open_lock:
            left = list(self._open.values())
            self._open.clear()
        for work in left:
            work.sink.put(EngineFailed(error))

    def _closed(self, work_id: str) -> bool:
        """Marks the work as ended; False if somebody else had ended it before."""
        with self._open_lock:
            return self._open.pop(work_id, None) is not None

    def _wait(self, answer: SimpleQueue[Any], timeout: float = 10.0) -> Any:
        try:
            result = answer.get(timeout=timeout)
        except Empty:
            raise Unavailable("The model thread is busy; try again.") from None
        if isinstance(result, BaseException):
            raise result
        return result

    # --- model thread -----------------------------------------------------------

    def _main(self) -> None:
        try:
            runtime = self._load()
        except (Exception, SystemExit) as error:  # a model's own code may do anything; somebody waits for the end
            if not isinstance(error, StartLLMError):  # whoever starts the server says what an expected error says
                log.error("loading failed: %s", error, exc_info=True)
            self._set("failed", detail=str(error))
            self._loaded.set()
            return
        self._set("ready", runtime.scheduler)
        self._loaded.set()
        try:
            self._loop(runtime.scheduler)
        finally:
            runtime.scheduler.requests.fail_all(Unavailable("The server is shutting down."))
            self._set("stopped", detail="The server is shutting down.")
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
                command = self._commands.get(timeout=1.0) if idle else self._commands.get_nowait()
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
            try:
                scheduler.add(command)
            except Exception as error:
                log.warning("request %s was not taken", command.id, exc_info=True)
                command.sink.put(EngineFailed(Internal(f"The request cannot be run: {type(error).__name__}: {error}")))
        elif isinstance(command, _Cancel):
            scheduler.cancel(command.work_id)
        elif isinstance(command, _Anchor):
            scheduler.anchoring.begin(command.work)
        elif isinstance(command, _Plan):
            command.answer.put(_guard(lambda: scheduler.plan(command.prompt.tokens)))
        elif isinstance(command, _Call):
            command.answer.put(_guard(lambda: command.function(scheduler)))

    def _set(self, state: str, scheduler: Scheduler | None = None, detail: str = "") -> None:
        now = time.monotonic()
        if scheduler is None:
            self._status = EngineStatus(state, beat=now, detail=detail)
            return
        if now - self._figures_at >= FIGURES_SECONDS:
            self._figures, self._figures_at = scheduler.figures(), now
        self._status = EngineStatus(state, scheduler.running, scheduler.queued, now, detail, self._figures)


def _guard(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        log.warning("a call on the model thread failed", exc_info=True)
        return error
