"""The models that are loaded, and which of them does the next step. Model thread only, but where it says otherwise.

Steps are shared out by the time that they take: of two models that have work, the one that has had less of the thread
is next. A model that comes back to work after a pause has no claim on what it left to others meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from start_llm.engine.runtime import TextRuntime
from start_llm.engine.schedule.scheduler import Scheduler

TIDY_SECONDS = 5.0  # how often a model without work is tidied up while others work
_GAUGES = frozenset({"kv_segments", "kv_leaves", "kv_bytes", "kv_budget_bytes", "kv_checkpoints"}) | frozenset(
    {"kv_checkpoint_bytes", "kv_sessions", "kv_disk_files", "kv_disk_bytes"}
)


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
        self._unloaded_figures: dict[str, float] = {}

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
        """One with work for an idle gap."""
        return next((model for model in self if model.scheduler.idle_prefill.waiting), None)

    def add(self, name: str, runtime: TextRuntime) -> None:
        self._models = {**self._models, name: EngineModel(runtime, runtime.scheduler, self._clock())}

    def remove(self, name: str) -> TextRuntime | None:
        """It gets no more steps; what it counted is kept."""
        gone = self._models.get(name)
        if gone is None:
            return None
        self._models = {other: model for other, model in self._models.items() if other != name}
        for figure, value in gone.scheduler.figures().items():
            if figure not in _GAUGES:
                self._unloaded_figures[figure] = self._unloaded_figures.get(figure, 0) + value
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
        """Raises what the scheduler raises."""
        began, scheduler = self._clock(), model.scheduler
        running, there = scheduler.running, len(scheduler.requests)
        try:
            scheduler.step()
        finally:
            model.seconds += self._clock() - began
            if running or scheduler.running or len(scheduler.requests) != there:
                self.look_again()
            else:
                model.blocked = scheduler.busy

    def tidy(self, seconds: float = 0.0) -> None:
        """Tidies up those that have no work, and were not tidied up in the last `seconds`."""
        now = self._clock()
        for model in self:
            if not model.scheduler.busy and now - model.tidied_at >= seconds:
                model.tidied_at = now
                model.scheduler.rest()

    def figures(self) -> Mapping[str, float]:
        """Totals over all models, those that are gone included; sizes over those that are loaded."""
        total = dict(self._unloaded_figures)
        for model in self:
            for name, value in model.scheduler.figures().items():
                total[name] = total.get(name, 0) + value
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
        """One step of the first that does not wait. False: there is none."""
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
