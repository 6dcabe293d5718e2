"""What other threads tell the model thread. They go through one queue, in the order in which they were sent."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from start_llm.core.work import Submit
from start_llm.engine.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Cancel:
    work_id: str


@dataclass(frozen=True, slots=True)
class PrefillIdle:
    work: Submit


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class CallFunction:
    """Runs `function(scheduler)`. `answer` gets what it returns, or what it raises."""

    function: Callable[[Scheduler], Any]
    model: str
    answer: SimpleQueue[Any]


@dataclass(frozen=True, slots=True)
class Chore:
    """Runs these steps between those of the models. `answer` gets what they return, or what they raise."""

    steps: Generator[float, None, Any]
    answer: SimpleQueue[Any]


Command = Submit | Cancel | PrefillIdle | Stop | CallFunction | Chore
