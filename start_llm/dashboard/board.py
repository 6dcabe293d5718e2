"""What the page at `/` shows of requests: those that run, and the last ones that have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from start_llm.core.events import Event
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Outcome
from start_llm.dashboard.request_log import RequestLog
from start_llm.dashboard.terminal import RequestLine, RequestLines

KEPT = 200


@dataclass(frozen=True, slots=True)
class BoardView:
    """What is to be seen at one moment, as plain JSON types, oldest first. `version` grows with all that happens.

    `ended`: entries of the request log behind the number that was asked for. `last`: the newest one's number.
    """

    version: int
    now: list[dict[str, Any]]
    ended: list[dict[str, Any]]
    last: int


class Board(RequestLines):
    """Thread-safe; one condition wakes whoever waits for news."""

    def __init__(self, request_log: RequestLog, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._log = request_log
        self._changed = threading.Condition()
        self._version = 0

    def started(self, request: ChatRequest) -> None:
        with self._changed:
            super().started(request)
            self._news()

    def event(self, request: ChatRequest, event: Event) -> None:
        with self._changed:
            super().event(request, event)
            self._news()

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        with self._changed:
            super().ended(request, outcome)
            self._news()

    def nudge(self) -> None:
        """Wakes who waits: there is news of another kind."""
        with self._changed:
            self._news()

    def wait(self, version: int, seconds: float) -> None:
        """Returns when more has happened than by `version`, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)

    def sight(self, after: int, may_see: Callable[[str], bool]) -> BoardView:
        """What ended behind the number `after`, and what runs, of requests that may be told to whoever looks."""
        with self._changed:
            rows, version, now = list(self._rows.values()), self._version, self._clock()
        ended, last = self._log.after(after)
        shown = [_running(row, now) for row in rows if may_see(row.request.id)]
        return BoardView(version, shown, [entry for entry in ended[-KEPT:] if may_see(entry["id"])], last)

    def _news(self) -> None:
        self._version += 1
        self._changed.notify_all()


def _running(row: RequestLine, now: float) -> dict[str, Any]:
    request, left = row.request, row.seconds_left(now)
    return {
        "id": request.id,
        "dialect": request.dialect,
        "model": request.model,
        "client": request.client,
        "session": request.session,
        "messages": len(request.messages),
        "state": row.state,
        "seconds": round(now - row.began, 1),
        "done": row.done,
        "total": row.total,
        "reused": row.reused,
        "pieces": row.pieces,
        "rate": round(row.rate(now), 1),
        "left": None if left is None else round(left, 1),
    }
