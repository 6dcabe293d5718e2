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
from start_llm.core.events import EngineFailed
from start_llm.core.work import EngineStatus, Submit
from start_llm.engine.commands import CallFunction, Cancel, Chore, Command, PrefillIdle, Stop
from start_llm.engine.schedule.scheduler import Scheduler
from start_llm.engine.units import REST_SECONDS, Chores, EngineModel, LoadedModels, Runtime

log = logging.getLogger(__name__)

FIGURES_SECONDS = 1.0
STUCK_SECONDS = 0.05
"""How often it looks again while all requests wait for memory: what makes room does not always tell it."""
SHUTTING_DOWN = "The server is shutting down."


class Loop:
    """
    Args:
        commands: what other threads send.
        idle_seconds: how often it shows a sign of life with nothing to do.

    Attributes:
        status: swapped whole; any thread may read it. It knows nothing of requests, nor of being wedged. It is
            ``loading`` until the first model is loaded, and ``failed`` if that one cannot be.
    """

    def __init__(self, commands: SimpleQueue[Command], idle_seconds: float) -> None:
        self._commands, self._idle_seconds = commands, idle_seconds
        self._units, self._chores = LoadedModels(), Chores()
        self._began = False  # a model has been loaded
        self.status = EngineStatus("loading", beat=time.monotonic())
        self._figures: Mapping[str, float] = {}
        self._figures_at = 0.0

    # --- any thread -----------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that are computed now."""
        return self._units.running

    def scheduler(self, model: str) -> Scheduler:
        """Raises Unavailable if the model is not loaded."""
        found = self._units.get(model)
        if found is None:
            raise Unavailable(self.status.detail or _not_loaded(model))
        return found

    # --- model thread ---------------------------------------------------------

    def adding[R: Runtime](self, model: str, steps: Generator[float, None, R]) -> Generator[float, None, R]:
        """A chore: adds what `steps` return. What an unload that failed has left of the model goes first."""
        yield from self.removing(model)
        try:
            runtime = yield from steps
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a model's own code may do anything
            if not self._began:
                self.set("failed", detail=str(error) or type(error).__name__)
            raise
        self._units.add(model, runtime)
        self._began = True
        self.set("ready")
        return runtime

    def removing(self, model: str) -> Generator[float]:
        """A chore: ends the model's requests, brings its KV to disk and frees it."""
        runtime = self._units.remove(model)
        if runtime is not None:
            try:
                runtime.scheduler.requests.fail_all(Unavailable(_not_loaded(model)))
            finally:
                yield from runtime.unloading()

    def run(self) -> None:
        """Until it is told to stop; then it ends the requests of all models."""
        while self._drain():
            unit = self._units.next(others=len(self._chores) > 0)
            self.set("ready" if unit is None else "busy")
            if unit is not None:
                self._step(unit)
                self._units.rest(REST_SECONDS)
            elif (idle := self._units.anchoring) is not None:
                idle.scheduler.anchoring.step()
            if self._chores.step():
                self._units.look_again()
        for unit in self._units:
            unit.scheduler.requests.fail_all(Unavailable(SHUTTING_DOWN))
        self.set("stopped", detail=SHUTTING_DOWN)

    def close(self) -> None:
        """Gives all chores up and frees all models."""
        self._chores.fail(Unavailable(SHUTTING_DOWN))
        self._units.close()

    def set(self, state: str, detail: str = "") -> None:
        now = time.monotonic()
        if state not in {"ready", "busy"}:
            self.status = EngineStatus(state, beat=now, detail=detail)
            return
        if not self._began:
            self.status = replace(self.status, beat=now)
            return
        if now - self._figures_at >= FIGURES_SECONDS:
            self._figures, self._figures_at = self._units.figures(), now
        self.status = EngineStatus(state, beat=now, detail=detail, figures=self._figures)

    def _step(self, unit: EngineModel) -> None:
        try:
            self._units.step(unit)
        except Exception as error:
            log.warning("a scheduler step failed", exc_info=True)
            unit.scheduler.recover(error)

    def _drain(self) -> bool:
        """Takes all pending commands; waits for one if there is nothing to do. False: stop."""
        while True:
            wait, busy = self._idle_for(), self._units.busy
            if wait and not busy and self.status.state == "busy":
                self.set("ready")
            try:
                command = self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
            except Empty:
                if wait and busy:
                    self._units.look_again()
                elif wait:
                    self.set("ready")
                    self._units.rest(REST_SECONDS if self._chores else 0.0)
                if not wait or busy or self._chores:
                    return True
                continue
            if isinstance(command, Stop):
                return False
            self._do(command)
            self._units.look_again()

    def _idle_for(self) -> float:
        """Seconds for which there is nothing to do but to wait for a command."""
        if self._units.stuck:
            most = STUCK_SECONDS
        elif self._units.busy or self._units.anchoring is not None:
            return 0.0
        else:
            most = self._idle_seconds
        return min(most, self._chores.wait) if self._chores else most

    def _do(self, command: Command) -> None:
        if isinstance(command, Submit):
            error = _guard(lambda: self.scheduler(command.model).add(command))
            if error is not None:
                command.sink.put(EngineFailed(_refused(error)))
        elif isinstance(command, Cancel):
            for unit in self._units:
                unit.scheduler.cancel(command.work_id)
        elif isinstance(command, PrefillIdle):
            scheduler = self._units.get(command.work.model)
            if scheduler is not None:
                _guard(lambda: scheduler.anchoring.begin(command.work))
        elif isinstance(command, CallFunction):
            command.answer.put(_guard(lambda: command.function(self.scheduler(command.model))))
        elif isinstance(command, Chore):
            self._chores.add(command.steps, command.answer.put)


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
