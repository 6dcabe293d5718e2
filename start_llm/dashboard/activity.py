"""How long nobody has asked anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from start_llm.core.events import Event
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Outcome


class Activity:
    """An `Observer`. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open = 0
        self._last = clock()

    def idle_seconds(self) -> float:
        """Since the last request ended, or since the start; 0 while one is open."""
        with self._lock:
            return 0.0 if self._open else self._clock() - self._last

    def started(self, request: ChatRequest) -> None:
        with self._lock:
            self._open += 1

    def event(self, request: ChatRequest, event: Event) -> None:
        """Only beginning and end count."""

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        with self._lock:
            self._open -= 1
            self._last = self._clock()
