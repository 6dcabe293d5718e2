"""Progress of long steps (a download, a conversion, a model load) as lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LINE_SECONDS = 5.0


class ProgressLines:
    """Called with a step's name and the part of it that is done, 0 to 1, from any thread. `say` gets a line now and
    then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._told = 0.0

    def __call__(self, step: str, part: float) -> None:
        with self._lock:
            begins, ends = step not in self._running, part >= 1.0
            if ends:
                self._running.discard(step)
                self._say(f"{step}: done")
            elif begins:
                self._running.add(step)
                self._say(f"{step} ...")
                self._told = time.monotonic()
            elif time.monotonic() - self._told >= LINE_SECONDS:
                self._say(f"{step}: {part:.0%}")
                self._told = time.monotonic()
