"""What the dashboard is told about requests. Called on HTTP threads, many at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from start_llm.core.events import Event, Usage
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. Seconds from arrival to its end, and to the first piece of the answer if there was one.

    `status`: also of an error that ended a stream; 499 for a client that went away. `report`: final, or the first one
    where the request did not end well.
    """

    status: int
    seconds: float
    seconds_first: float | None = None
    usage: Usage | None = None
    report: CacheReport | None = None
    error: str | None = None


class Observer:
    """Sees every request: `started`, its events in order, `ended`. Must be quick and must not raise."""

    def started(self, request: ChatRequest) -> None: ...

    def event(self, request: ChatRequest, event: Event) -> None: ...

    def ended(self, request: ChatRequest, outcome: Outcome) -> None: ...


class Activity(Observer):
    """How long nobody has asked anything. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._last = clock()

    def idle_seconds(self) -> float:
        """Since the last request ended, or since the start; 0 while one is running."""
        with self._lock:
            return 0.0 if self._running else self._clock() - self._last

    def started(self, request: ChatRequest) -> None:
        with self._lock:
            self._running += 1

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        with self._lock:
            self._running -= 1
            self._last = self._clock()
