"""What the model thread does all day: takes commands, has the models step by turns, says how it is.

Model thread only, but where it says otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from start_llm.core.errors import Internal, StartLLMError, Unavailable
from start_llm.core.events import Failed
from start_llm.core.work import EngineStatus, Submit
from start_llm.engine.loaded import TIDY_SECONDS, Chores, EngineModel, LoadedModels
from start_llm.engine.runtime import TextRuntime
from start_llm.engine.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

FIGURES_SECONDS = 1.0
STUCK_SECONDS = 0.05
"""How often it looks again while all requests wait for memory: what makes room does not always tell it."""
SHUTTING_DOWN = "The server is shutting down."

Command = Callable[[], None] | None
"""What another thread has the model thread do, in the order in which it was sent; ``None``: stop."""


class Loop:
    """
    Args:
        commands: what other threads send.
        idle_seconds: how often it shows a sign of life with nothing to do.

    Attributes:
        models, chores: what takes turns.
        status: swapped whole; any thread may read it. It knows nothing of requests, nor of being wedged. It is
            ``loading`` until the first model is loaded, and ``failed`` if that one cannot be.
    """

    def __init__(self, commands: SimpleQueue[Command], idle_seconds: float) -> None:
        self._commands, self._idle_seconds = commands, idle_seconds
        self.models, self.chores = LoadedModels(), Chores()
        self._began = False  # a model has been loaded
        self.status = EngineStatus("loading", beat=time.monotonic())
        self._figures: Mapping[str, float] = {}
        self._figures_at = 0.0

    # --- any thread -----------------------------------------------------------

    def scheduler(self, model: str) -> Scheduler:
        """Raises Unavailable if the model is not loaded."""
        found = self.models.get(model)
        if found is None:
            raise Unavailable(self.status.detail or _not_loaded(model))
        return found

    # --- commands: what other threads send; model thread ------------------------

    def submit(self, work: Submit) -> None:
        error = _caught(lambda: self.scheduler(work.model).add(work))
        if error is not None:
            work.sink.put(Failed(_refused(error)))

    def cancel(self, work_id: str) -> None:
        for model in self.models:
            model.scheduler.cancel(work_id)

    def prefill_idle(self, work: Submit) -> None:
        scheduler = self.models.get(work.model)
        if scheduler is not None:
            _caught(lambda: scheduler.idle_prefill.begin(work))

    def call(self, function: Callable[[Scheduler], Any], model: str, answer: Callable[[Any], None]) -> None:
        """`answer` gets what the function returns, or what it raises."""
        answer(_caught(lambda: function(self.scheduler(model))))

    def adding(self, model: str, steps: Generator[float, None, TextRuntime]) -> Generator[float, None, TextRuntime]:
        """A chore: adds what `steps` return. What an unload that failed has left of the model goes first."""
        yield from self.removing(model)
        try:
            runtime = yield from steps
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a model's own code may do anything
            if not self._began:
                self.set("failed", detail=str(error) or type(error).__name__)
            raise
        self.models.add(model, runtime)
        self._began = True
        self.set("ready")
        return runtime

    def removing(self, model: str) -> Generator[float]:
        """A chore: ends the model's requests, brings its KV to disk and frees it."""
        runtime = self.models.remove(model)
        if runtime is not None:
            try:
                runtime.scheduler.requests.fail_all(Unavailable(_not_loaded(model)))
            finally:
                yield from runtime.unloading()

    # --- model thread -----------------------------------------------------------

    def run(self) -> None:
        """Until it is told to stop; then it ends the requests of all models."""
        while self._run_commands():
            model = self.models.next(others=len(self.chores) > 0)
            self.set("ready" if model is None else "busy")
            if model is not None:
                self._step(model)
                self.models.tidy(TIDY_SECONDS)
            elif (idle := self.models.with_idle_prefill) is not None:
                idle.scheduler.idle_prefill.step()
            if self.chores.step():
                self.models.look_again()
        for model in self.models:
            model.scheduler.requests.fail_all(Unavailable(SHUTTING_DOWN))
        self.set("stopped", detail=SHUTTING_DOWN)

    def close(self) -> None:
        """Gives all chores up and frees all models."""
        self.chores.fail(Unavailable(SHUTTING_DOWN))
        self.models.close()

    def set(self, state: str, detail: str = "") -> None:
        now = time.monotonic()
        if state not in {"ready", "busy"}:
            self.status = EngineStatus(state, beat=now, detail=detail)
            return
        if not self._began:
            self.status = replace(self.status, beat=now)
            return
        if now - self._figures_at >= FIGURES_SECONDS:
            self._figures, self._figures_at = self.models.figures(), now
        self.status = EngineStatus(state, beat=now, detail=detail, figures=self._figures)

    def _step(self, model: EngineModel) -> None:
        try:
            self.models.step(model)
        except Exception as error:
            log.warning("a scheduler step failed", exc_info=True)
            model.scheduler.recover(error)

    def _run_commands(self) -> bool:
        """Runs what other threads have sent. Returns once a model, a chore or idle work can go on. False: stop."""
        while True:
            wait = self._seconds_without_work()
            if wait and not self.models.busy and self.status.state == "busy":
                self.set("ready")
            try:
                command = self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
            except Empty:
                if not wait or self._waited():
                    return True
                continue
            if command is None:
                return False
            command()
            self.models.look_again()

    def _waited(self) -> bool:
        """No command came while there was nothing to do. True: now there is."""
        if self.models.busy:  # all requests waited for memory
            self.models.look_again()
            return True
        self.set("ready")
        self.models.tidy(TIDY_SECONDS if self.chores else 0.0)
        return len(self.chores) > 0

    def _seconds_without_work(self) -> float:
        """0: somebody can go on now."""
        if self.models.stuck:
            most = STUCK_SECONDS
        elif self.models.busy or self.models.with_idle_prefill is not None:
            return 0.0
        else:
            most = self._idle_seconds
        return min(most, self.chores.wait) if self.chores else most


def _caught(function: Callable[[], Any]) -> Any:
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
