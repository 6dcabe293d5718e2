"""What the model thread does all day: takes commands, has the loaded models step by turns, says how it is.

Model thread only, but where it says otherwise. Steps are shared out by the time that they take: of two models that have
work, the one that has had less of the thread is next. A model that comes back to work after a pause has no claim on
what it left to others meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx

from start_llm.core.errors import Internal, StartLLMError, Unavailable
from start_llm.core.events import Failed
from start_llm.core.work import EngineStatus, Submit
from start_llm.engine.runtime import TextRuntime
from start_llm.engine.schedule.guarded import KV_FIGURES
from start_llm.engine.schedule.scheduler import Scheduler
from start_llm.host.pressure import Pressure

log = logging.getLogger(__name__)

FIGURES_SECONDS = 1.0
STUCK_SECONDS = 0.05
"""How often it looks again while all requests wait for memory: what makes room does not always tell it."""
SHUTTING_DOWN = "The server is shutting down."
Command = Callable[[], None] | None
"""What another thread has the model thread do, in the order in which it was sent; ``None``: stop."""
TIDY_SECONDS = 5.0  # how often a model without work is tidied up while others work
_GAUGES = {f"kv_{name}" for name in KV_FIGURES} - {"kv_evicted"} | {"kv_disk_files", "kv_disk_bytes"}


@dataclass(slots=True)
class EngineModel:
    """A model, and its part of the thread.

    One that is blocked looks again after another one's step, after a command or chore, and now and then.
    """

    runtime: TextRuntime
    scheduler: Scheduler
    tidied_at: float  # on the clock
    seconds: float = 0.0  # of the thread, as far as they count against others
    was_busy: bool = False
    blocked: bool = False  # its requests wait for memory that others hold


class LoadedModels:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._models: dict[str, EngineModel] = {}  # replaced as a whole: other threads read it
        self._least_seconds = 0.0
        self.pressure = Pressure.NORMAL
        self._unloaded_figures = Counter[str]()

    def __iter__(self) -> Iterator[EngineModel]:
        """Any thread."""
        return iter(self._models.values())

    def get(self, name: str) -> Scheduler | None:
        """Any thread."""
        found = self._models.get(name)
        return None if found is None else found.scheduler

    @property
    def running(self) -> int:
        """Requests that are computed now. Any thread."""
        return sum(model.scheduler.running for model in self)

    @property
    def busy(self) -> bool:
        return any(model.scheduler.busy for model in self)

    @property
    def stuck(self) -> bool:
        """There is work, and none of it can go on by itself."""
        busy = [model for model in self if model.scheduler.busy]
        return bool(busy) and all(model.blocked for model in busy)

    def look_again(self) -> None:
        """Something has happened that may have made room."""
        for model in self:
            model.blocked = False

    @property
    def with_idle_prefill(self) -> EngineModel | None:
        """One with work for an idle gap; none while the machine is short of memory."""
        if self.pressure is not Pressure.NORMAL:
            return None
        return next((model for model in self if model.scheduler.idle_prefill.waiting), None)

    def press(self, level: Pressure) -> None:
        """How short of memory the machine is. What MLX keeps of freed buffers goes, too."""
        self.pressure = level
        for model in list(self)[:1]:  # the memory is shared by all
            model.runtime.memory.shared.press(level)
        if level is not Pressure.NORMAL:
            mx.clear_cache()

    def add(self, name: str, runtime: TextRuntime) -> None:
        self._models = {**self._models, name: EngineModel(runtime, runtime.scheduler, self._clock())}

    def remove(self, name: str) -> TextRuntime | None:
        """It gets no more steps; what it counted is kept."""
        gone = self._models.get(name)
        if gone is None:
            return None
        self._models = {other: model for other, model in self._models.items() if other != name}
        self._unloaded_figures.update({k: v for k, v in gone.scheduler.figures().items() if k not in _GAUGES})
        return gone.runtime

    def next(self, *, others: bool = False) -> EngineModel | None:
        """The one that does the next step; `others`: something else waits for the thread, too."""
        busy = [model for model in self if model.scheduler.busy]
        for model in busy:
            if not model.was_busy:
                model.seconds = max(model.seconds, self._least_seconds)
            model.scheduler.crowded = others or len(busy) > 1
        for model in self:
            model.was_busy = model.scheduler.busy
        if not busy:
            return None
        chosen = min([model for model in busy if not model.blocked] or busy, key=lambda model: model.seconds)
        self._least_seconds = chosen.seconds
        return chosen

    def step(self, model: EngineModel) -> None:
        """What the scheduler raises is logged, and what was running starts again."""
        for other in self:
            if other is not model and other.scheduler.idle_prefill.began:
                other.scheduler.pause_idle()
        began, scheduler = self._clock(), model.scheduler
        running, there = scheduler.running, len(scheduler.requests)
        try:
            scheduler.step()
            moved = running or scheduler.running or len(scheduler.requests) != there
        except Exception as error:
            log.warning("a scheduler step failed", exc_info=True)
            scheduler.recover(error)
            moved = True
        model.seconds += self._clock() - began
        if moved:
            self.look_again()
        else:
            model.blocked = scheduler.busy

    def tidy(self, seconds: float = 0.0) -> None:
        """Tidies up those that have no work, and were not tidied up in the last `seconds`."""
        now = self._clock()
        for model in self:
            if not model.scheduler.busy and now - model.tidied_at >= seconds:
                model.tidied_at = now
                model.scheduler.tidy()

    def figures(self) -> Mapping[str, float]:
        """Totals over all models, those that are gone included; sizes over those that are loaded."""
        total = self._unloaded_figures.copy()
        for model in self:
            total.update(model.scheduler.figures())
        total["memory_pressure"] = self.pressure
        return total

    def close(self) -> None:
        models, self._models = list(self), {}
        for model in models:
            model.runtime.close()


@dataclass(slots=True)
class _Chore:
    steps: Generator[float, None, Any]
    done: Callable[[Any], None]
    due: float = 0.0


class Chores:
    """Work in steps that is done between the steps of models: loading and unloading, embeddings. They take turns."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[_Chore] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, steps: Generator[float, None, Any], done: Callable[[Any], None]) -> None:
        """`steps` yields seconds that it wants to wait; `done` gets what it returns, or what it raised."""
        self._waiting.append(_Chore(steps, done))

    @property
    def wait(self) -> float:
        """Seconds until the first chore is due. There must be a chore."""
        return max(0.0, min(chore.due for chore in self._waiting) - self._clock())

    def step(self) -> bool:
        """Runs one step of the first chore whose pause is over. False: there is none. `done` of a chore gets what it
        returned, or the exception that ended it."""
        now = self._clock()
        chore = next((chore for chore in self._waiting if chore.due <= now), None)
        if chore is None:
            return False
        self._waiting.remove(chore)
        try:
            pause = next(chore.steps)
        except StopIteration as end:
            chore.done(end.value)
        except BaseException as error:  # noqa: BLE001 - a model's own code may do anything; told to who asked
            chore.done(error)
        else:
            chore.due = self._clock() + pause
            self._waiting.append(chore)
        return True

    def fail(self, error: Exception) -> None:
        """Gives all of them up."""
        waiting, self._waiting = self._waiting, []
        for chore in waiting:
            chore.steps.close()
            chore.done(error)


class Loop:
    """`idle_seconds`: how often it shows a sign of life with nothing to do.

    `status`: swapped whole; any thread may read it. It knows nothing of requests, nor of being wedged. It is
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

    def press(self, level: Pressure) -> None:
        """Tells the models. It comes so often that the thread is never without a command: this is its idle time."""
        _caught(lambda: self.models.press(level))
        self.models.tidy(TIDY_SECONDS)
        if self.status.state in {"ready", "busy"}:
            self.set(self.status.state)

    def submit(self, work: Submit) -> None:
        """Has the work's model take it. What goes wrong is sent to the work's sink as `Failed`, not raised."""
        error = _caught(lambda: self.scheduler(work.model).add(work))
        if error is not None:
            why = Internal(f"The request cannot be run: {type(error).__name__}: {error}")
            work.sink(Failed(error if isinstance(error, StartLLMError) else why))

    def cancel(self, work_id: str) -> None:
        for model in self.models:
            model.scheduler.cancel(work_id)

    def prefill_idle(self, work: Submit) -> None:
        """Nobody waits for it: dropped if the model is not loaded; an error is only logged."""
        scheduler = self.models.get(work.model)
        if scheduler is not None:
            _caught(lambda: scheduler.add_idle(work))

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
                runtime.scheduler.fail_all(Unavailable(_not_loaded(model)))
            finally:
                yield from runtime.unloading()

    # --- model thread -----------------------------------------------------------

    def run(self) -> None:
        """The rounds of the model thread, until the command ``None``; then it ends the requests of all models."""
        while self._run_commands():
            model = self.models.next(others=len(self.chores) > 0)
            self.set("ready" if model is None else "busy")
            if model is not None:
                self.models.step(model)
                self.models.tidy(TIDY_SECONDS)
            elif (idle := self.models.with_idle_prefill) is not None:
                idle.scheduler.step_idle()
            if self.chores.step():
                self.models.look_again()
        for model in self.models:
            model.scheduler.fail_all(Unavailable(SHUTTING_DOWN))
        self.set("stopped", detail=SHUTTING_DOWN)

    def close(self) -> None:
        """Gives all chores up and frees all models."""
        self.chores.fail(Unavailable(SHUTTING_DOWN))
        self.models.close()

    def set(self, state: str, detail: str = "") -> None:
        """Swaps `status`; ``ready`` and ``busy`` only its beat, before a model is loaded. Figures: once a second."""
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
        """No command came in `_seconds_without_work`: tidies up, if nobody waits for memory. True: some may go on."""
        if self.models.busy:  # all requests waited for memory
            self.models.look_again()
            return True
        self.set("ready")
        self.models.tidy(TIDY_SECONDS if self.chores else 0.0)
        return len(self.chores) > 0

    def _seconds_without_work(self) -> float:
        """How long to wait for a command; 0: somebody can go on now."""
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


def _not_loaded(model: str) -> str:
    return f"The model {model!r} is not loaded." if model else "The model is not loaded."
