"""The models that are loaded, and which of them does the next step. Model thread only, but where it says otherwise.

Steps are shared out by the time that they take: of two models that have work, the one that has had less of the thread
is next. A model that comes back to work after a pause has no claim on what it left to others meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Protocol

from start_llm.engine.schedule.scheduler import Scheduler

REST_SECONDS = 5.0
"""How often a model without work is tidied up while others work."""
_GAUGES = frozenset({"kv_segments", "kv_leaves", "kv_bytes", "kv_budget_bytes", "kv_checkpoints"}) | frozenset(
    {"kv_checkpoint_bytes", "kv_sessions", "kv_disk_files", "kv_disk_bytes"}
)


class Runtime(Protocol):
    """A loaded model, as the loader makes it on the model thread."""

    scheduler: Scheduler

    def unloading(self) -> Generator[float]:
        """Brings what is stored to disk, a step at a time, then frees everything. Yields seconds to wait.

        Everything is freed where it is given up on the way, too.
        """
        ...

    def close(self) -> None:
        """Frees everything at once; the model's last call on the model thread."""
        ...


class EngineModel:
    """
    Attributes:
        spent: seconds of the thread, as far as they count against others.
        rested: when it was tidied up last, on `clock`.
        blocked: its requests wait for memory that others hold. It looks again after another one's step, after a
            command or chore, and now and then.
    """

    def __init__(self, model: str, runtime: Runtime, now: float) -> None:
        self.model, self.runtime, self.scheduler = model, runtime, runtime.scheduler
        self.spent, self.rested = 0.0, now
        self.was_busy = False
        self.blocked = False


class LoadedModels:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._units: dict[str, EngineModel] = {}  # replaced as a whole: other threads read it
        self._level = 0.0
        self._gone: dict[str, float] = {}

    def __iter__(self) -> Iterator[EngineModel]:
        """Any thread."""
        return iter(self._units.values())

    def get(self, model: str) -> Scheduler | None:
        """Any thread."""
        unit = self._units.get(model)
        return None if unit is None else unit.scheduler

    @property
    def running(self) -> int:
        """Requests that are computed now. Any thread."""
        return sum(unit.scheduler.running for unit in self)

    @property
    def busy(self) -> bool:
        return any(unit.scheduler.busy for unit in self)

    @property
    def stuck(self) -> bool:
        """There is work, and none of it can go on by itself."""
        busy = [unit for unit in self if unit.scheduler.busy]
        return bool(busy) and all(unit.blocked for unit in busy)

    def look_again(self) -> None:
        """Something has happened that may have made room."""
        for unit in self:
            unit.blocked = False

    @property
    def anchoring(self) -> EngineModel | None:
        """One with work for an idle gap."""
        return next((unit for unit in self if unit.scheduler.anchoring.waiting), None)

    def add(self, model: str, runtime: Runtime) -> None:
        self._units = {**self._units, model: EngineModel(model, runtime, self._clock())}

    def remove(self, model: str) -> Runtime | None:
        """It gets no more steps; what it counted is kept."""
        unit = self._units.get(model)
        if unit is None:
            return None
        self._units = {name: other for name, other in self._units.items() if name != model}
        for name, value in unit.scheduler.figures().items():
            if name not in _GAUGES:
                self._gone[name] = self._gone.get(name, 0) + value
        return unit.runtime

    def next(self, *, others: bool = False) -> EngineModel | None:
        """The one that does the next step; `others`: something else waits for the thread, too."""
        busy = [unit for unit in self if unit.scheduler.busy]
        for unit in busy:
            if not unit.was_busy:
                unit.spent = max(unit.spent, self._level)
            unit.scheduler.crowded = others or len(busy) > 1
        for unit in self:
            unit.was_busy = unit.scheduler.busy
        if not busy:
            return None
        chosen = min([unit for unit in busy if not unit.blocked] or busy, key=lambda unit: unit.spent)
        self._level = chosen.spent
        return chosen

    def step(self, unit: EngineModel) -> None:
        """Raises what the scheduler raises."""
        began, scheduler = self._clock(), unit.scheduler
        running, there = scheduler.running, len(scheduler.requests)
        try:
            scheduler.step()
        finally:
            unit.spent += self._clock() - began
            if running or scheduler.running or len(scheduler.requests) != there:
                self.look_again()
            else:
                unit.blocked = scheduler.busy

    def rest(self, seconds: float = 0.0) -> None:
        """Tidies up those that have no work, and were not tidied up in the last `seconds`."""
        now = self._clock()
        for unit in self:
            if not unit.scheduler.busy and now - unit.rested >= seconds:
                unit.rested = now
                unit.scheduler.rest()

    def figures(self) -> Mapping[str, float]:
        """Totals over all models, those that are gone included; sizes over those that are loaded."""
        total = dict(self._gone)
        for unit in self:
            for name, value in unit.scheduler.figures().items():
                total[name] = total.get(name, 0) + value
        return total

    def close(self) -> None:
        units, self._units = list(self), {}
        for unit in units:
            unit.runtime.close()


class _Chore:
    def __init__(self, steps: Generator[float, None, Any], done: Callable[[Any], None]) -> None:
        self.steps, self.done, self.due = steps, done, 0.0


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
        """Seconds until there is something to do; only if there is a chore."""
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
