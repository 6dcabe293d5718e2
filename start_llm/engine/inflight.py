"""Requests that the model thread has been given and that have not ended. Any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from start_llm.core.errors import QueueFull, StartLLMError
from start_llm.core.events import EngineDone, EngineEvent, Failed
from start_llm.core.work import Submit


class _TrackedSink:
    """Lets exactly one final event through, whichever thread sends it."""

    def __init__(self, work: Submit, end: Callable[[str], bool]) -> None:
        self._id, self._sink, self._end = work.id, work.sink, end

    def put(self, event: EngineEvent, /) -> None:
        if isinstance(event, EngineDone | Failed) and not self._end(self._id):
            return
        self._sink.put(event)


class InflightRequests:
    """What was submitted and has not had its final event yet. Thread-safe: any thread may give that event."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: dict[str, Submit] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: Submit) -> Submit:
        """The work with a sink that keeps count. Raises QueueFull."""
        with self._lock:
            open_now = len(self._works)
            if open_now >= self._most:
                raise QueueFull(f"{open_now} requests are running or waiting already.", retry_after=max(1.0, open_now))
            self._works[work.id] = work
        return replace(work, sink=_TrackedSink(work, self._end))

    def fail(self, error: StartLLMError) -> list[str]:
        """Fails all of them; returns their ids. Clients must not hang on a dead model thread."""
        with self._lock:
            left = list(self._works.values())
            self._works.clear()
        for work in left:
            work.sink.put(Failed(error))
        return [work.id for work in left]

    def _end(self, work_id: str) -> bool:
        """Marks the work as ended; False if somebody else had ended it before."""
        with self._lock:
            return self._works.pop(work_id, None) is not None
