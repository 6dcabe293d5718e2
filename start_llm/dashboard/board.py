"""What the page at `/` shows of requests: those that run, the last ones that have ended, what the last day reused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from start_llm.core.events import Event
from start_llm.core.request import ChatRequest
from start_llm.dashboard.audit import AuditEntry
from start_llm.dashboard.observer import Observer, Outcome
from start_llm.dashboard.request_log import RequestLog
from start_llm.dashboard.terminal import RequestLine, RequestLines

KEPT = 200
SLOT_SECONDS = 900
SLOTS = 96
MOST_CLIENTS = 16
OTHERS = "others"


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


class Daily(Observer):
    """What each client's requests reused over the last day, in quarters of an hour. Counts only. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: dict[str, dict[int, list[int]]] = {}

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        report = outcome.report
        if report is None or not report.prompt:
            return
        with self._lock:
            self._add(self._clock(), request.client, report.reused, report.computed, report.new)

    def begin_with(self, entries: Iterable[AuditEntry]) -> None:
        """Counts what was written down before this server was started."""
        with self._lock:
            for entry in entries:
                if entry.prompt:
                    self._add(entry.time, entry.client, entry.reused, entry.computed, entry.new)

    def _add(self, when: float, client: str, reused: int, computed: int, new: int) -> None:
        slot = int(when) // SLOT_SECONDS
        self._forget(int(self._clock()) // SLOT_SECONDS)
        name = client or "other"
        if name not in self._clients and len(self._clients) >= MOST_CLIENTS:
            name = OTHERS
        again = max(0, computed - new)
        counts = self._clients.setdefault(name, {}).setdefault(slot, [0, 0, 0, 0])
        for index, more in enumerate((1, reused, computed - again, again)):
            counts[index] += more

    def day(self) -> dict[str, Any]:
        """Per client ``[slot, requests, reused, new, again]``, slots from the first of the day on; busiest first."""
        slot = int(self._clock()) // SLOT_SECONDS
        first = slot - SLOTS + 1
        with self._lock:
            self._forget(slot)
            busiest = sorted(
                self._clients.items(), key=lambda item: -sum(sum(counts[1:]) for counts in item[1].values())
            )
            clients = [
                {"name": name, "slots": [[at - first, *counts] for at, counts in sorted(slots.items())]}
                for name, slots in busiest
            ]
        return {"slots": SLOTS, "slot_seconds": SLOT_SECONDS, "clients": clients}

    def _forget(self, slot: int) -> None:
        for name, slots in list(self._clients.items()):
            for at in [at for at in slots if at <= slot - SLOTS]:
                del slots[at]
            if not slots:
                del self._clients[name]
