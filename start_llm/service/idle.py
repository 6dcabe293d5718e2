"""Ends a server that nobody uses any more (IDLE_SHUTDOWN_MINUTES)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from start_llm.service.place import Place

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class IdleWatch:
    """A thread that calls `end` once nothing was asked for `seconds`, and nobody is there who may ask.

    Args:
        idle_seconds: how long nothing was asked.
        place: knows the agents that are connected, and whether the server is to stay.
        end: called once, on this thread.
    """

    def __init__(
        self,
        idle_seconds: Callable[[], float],
        place: Place,
        seconds: float,
        end: Callable[[], None],
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._idle_seconds, self._place, self._seconds, self._end = idle_seconds, place, seconds, end
        self._look_seconds = min(look_seconds, max(seconds / 4, 0.02))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="idle-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        unused_since = time.monotonic()
        while not self._over.wait(self._look_seconds):
            if self._place.is_kept or self._place.users():
                unused_since = time.monotonic()
                continue
            if min(self._idle_seconds(), time.monotonic() - unused_since) >= self._seconds:
                log.warning("nobody has used the server for %.0f s: it ends", self._seconds)
                self._end()
                return
