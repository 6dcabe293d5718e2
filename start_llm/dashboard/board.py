"""What the page at `/` shows of requests: those that run, and the last ones that have ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from start_llm.dashboard.request_log import RequestLog, names_of
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
    """What is news wakes whoever waits for it. Thread-safe."""

    def __init__(self, request_log: RequestLog, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._log = request_log

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


def _running(row: RequestLine, now: float) -> dict[str, Any]:
    left = row.seconds_left(now)
    return names_of(row.request) | {
        "state": row.state,
        "seconds": round(now - row.began, 1),
        "done": row.done,
        "total": row.total,
        "reused": row.reused,
        "pieces": row.pieces,
        "rate": round(row.rate(now), 1),
        "left": None if left is None else round(left, 1),
    }
