"""What the page at `/` shows of requests: those that run, and the last ones that have ended."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from start_llm.core.events import Event
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Observer, Outcome
from start_llm.dashboard.request_log import log_entry
from start_llm.dashboard.terminal import RequestLine, row_name

KEPT = 200


@dataclass(frozen=True, slots=True)
class BoardView:
    """What is to be seen at one moment, as plain JSON types.

    Attributes:
        version: grows with everything that happens.
        now: the requests that run, oldest first.
        ended: entries of the request log behind the number that was asked for, oldest first.
        last: the number of the newest of all ended requests.
    """

    version: int
    now: list[dict[str, Any]]
    ended: list[dict[str, Any]]
    last: int


class Board(Observer):
    """Thread-safe; one condition wakes whoever waits for news."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, today: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._clock, self._today = clock, today
        self._changed = threading.Condition()
        self._version = 0
        self._rows: dict[str, tuple[ChatRequest, RequestLine]] = {}
        self._ended: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT)
        self._last = 0

    def started(self, request: ChatRequest) -> None:
        with self._changed:
            self._rows[request.id] = (request, RequestLine(row_name(request), self._clock()))
            self._news()

    def event(self, request: ChatRequest, event: Event) -> None:
        with self._changed:
            found = self._rows.get(request.id)
            if found is not None:
                found[1].see(event, self._clock())
                self._news()

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        entry = log_entry(request, outcome, self._today())
        with self._changed:
            self._rows.pop(request.id, None)
            self._last += 1
            self._ended.append((self._last, entry))
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
        """
        Args:
            after: the number of the newest ended request that is known already; 0: none is.
            may_see: whether a request of this id may be told to whoever looks.
        """
        with self._changed:
            rows, ended = list(self._rows.values()), list(self._ended)
            version, last, now = self._version, self._last, self._clock()
        return BoardView(
            version,
            [_running(request, row, now) for request, row in rows if may_see(request.id)],
            [entry for number, entry in ended if number > after and may_see(entry["id"])],
            last,
        )

    def _news(self) -> None:
        self._version += 1
        self._changed.notify_all()


def _running(request: ChatRequest, row: RequestLine, now: float) -> dict[str, Any]:
    """Seconds, tokens, and tokens per second; `pieces` are the parts of the answer so far, about a token each."""
    began = {"queued": row.began, "prefill": row.prefill_began}.get(row.state, row.answer_began)
    seconds = max(now - began, 1e-6)
    work = row.pieces if row.state == "answer" else row.done - row.prefill_from
    rate = work / seconds if row.state != "queued" else 0.0
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
        "rate": round(rate, 1),
        "left": round((row.total - row.done) / rate, 1) if row.state == "prefill" and rate > 0 else None,
    }
