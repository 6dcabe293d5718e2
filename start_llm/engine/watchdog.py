"""Clients must not hang on a model thread that has stopped to move: which requests are open, and who notices."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from start_llm.core.errors import QueueFull, StartLLMError
from start_llm.core.events import EngineDone, EngineEvent, Failed
from start_llm.core.work import Submit

log = logging.getLogger(__name__)

TICK = 0.25  # seconds between two looks, at most


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
        return replace(work, sink=partial(self._pass_on, work))

    def fail(self, error: StartLLMError) -> list[str]:
        """Fails all of them; returns their ids. Clients must not hang on a dead model thread."""
        with self._lock:
            left = list(self._works.values())
            self._works.clear()
        for work in left:
            work.sink(Failed(error))
        return [work.id for work in left]

    def _pass_on(self, work: Submit, event: EngineEvent) -> None:
        """Lets exactly one final event through, whichever thread sends it."""
        if isinstance(event, EngineDone | Failed):
            with self._lock:
                if self._works.pop(work.id, None) is None:
                    return
        work.sink(event)


class Watchdog:
    """
    Args:
        limit: seconds without a move after which the thread counts as wedged. Time in which this process was stopped
            or the machine asleep does not count.
        beat: a number that changes whenever the thread moves; called from the watchdog's thread.
        thread_id: whose stack is logged, 0 if none is known.
        wedged: called at every look while the thread has not moved for the limit.
        hopeless: called once, after twice the limit.
    """

    def __init__(
        self,
        limit: float,
        beat: Callable[[], float],
        thread_id: Callable[[], int],
        *,
        wedged: Callable[[], None],
        hopeless: Callable[[], None],
    ) -> None:
        self._limit, self._beat_now, self._thread_id = limit, beat, thread_id
        self._wedged, self._hopeless = wedged, hopeless
        self._tick = min(TICK, limit / 8)
        self._beat = self._silent = 0.0
        self._given_up = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.since: float | None = None
        """Unix time since when the thread has not moved; ``None`` while it is not wedged."""
        self.watched = 0.0
        """Seconds: a clock that stands while this process is stopped or the machine asleep."""

    def start(self) -> None:
        """Starts the thread. A second call, by the same thread, does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        """The thread, until `stop`. A time much longer than a tick counts as four: this process was stopped."""
        self._beat, looked = self._beat_now(), time.monotonic()
        while not self._over.wait(self._tick):
            now = time.monotonic()
            passed, looked = min(now - looked, 4 * self._tick), now  # longer, and this thread was stopped as well
            self.watched += passed
            try:
                self._look(passed)
            except Exception:  # the thread's edge: it must go on watching
                log.warning("the watchdog met an error", exc_info=True)

    def _look(self, passed: float) -> None:
        """`passed`: seconds since the last look. Calls `wedged` at each look beyond the limit, `hopeless` once."""
        beat = self._beat_now()
        if beat != self._beat:
            if self.since is not None:
                log.warning("the model thread goes on, after %.0f s", self._silent)
            self._beat, self._silent, self.since, self._given_up = beat, 0.0, None, False
            return
        self._silent += passed
        if self._silent < self._limit:
            return
        if self.since is None:
            self.since = time.time() - self._silent
            self._complain()
        self._wedged()
        if self._silent >= 2 * self._limit and not self._given_up:
            self._given_up = True
            self._hopeless()

    def _complain(self) -> None:
        frame = sys._current_frames().get(self._thread_id())
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "its stack is not known"
        log.error("the model thread has not moved for %.0f s; it is at\n%s", self._silent, stack)
