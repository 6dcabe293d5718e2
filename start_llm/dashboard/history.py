"""What all requests together did, by minute for the last hour and by quarter of an hour for the last day; and of that
day what each client's requests reused.

Counts and seconds only: nothing of a conversation or a model. Bounded, whatever is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Any

from start_llm.core.request import ChatRequest
from start_llm.dashboard.audit import AuditEntry, entry
from start_llm.dashboard.observer import Observer, Outcome

HOUR = (60, 60)  # seconds of a point, points
DAY = (900, 96)
MOST_CLIENTS = 16
OTHERS = "others"


@dataclass(slots=True)
class Point:
    """Sums over the requests that ended in one span of time; `memory`: bytes at the last one's end."""

    requests: int = 0
    reused: int = 0  # prompt tokens
    computed: int = 0
    answered: int = 0  # tokens of answers
    seconds_answered: float = 0.0  # from the first piece of an answer to its end
    firsts: int = 0  # requests that had a first piece, and after how many seconds together
    seconds_first: float = 0.0
    memory: float = 0.0
    again: int = 0  # of the computed ones, those that were not new

    def add(self, more: Point) -> None:
        for name in self.__slots__:
            if name != "memory":
                setattr(self, name, getattr(self, name) + getattr(more, name))
        self.memory = more.memory or self.memory


def _point(row: AuditEntry) -> Point:
    """Of one request."""
    point = Point(1, row.reused, row.computed, again=max(0, row.computed - row.new))
    if row.seconds_first is not None:
        point.firsts, point.seconds_first = 1, row.seconds_first
    return point


class Series:
    """The last `count` points of `seconds` each. Not thread-safe."""

    def __init__(self, seconds: int, count: int) -> None:
        self.seconds, self.count = seconds, count
        self._points: dict[int, Point] = {}

    def add(self, when: float, more: Point, now: float) -> None:
        self.places(now)
        slot = int(when) // self.seconds
        if slot > int(now) // self.seconds - self.count:
            self._points.setdefault(slot, Point()).add(more)

    def since(self, begin: float) -> list[Point]:
        return [point for slot, point in self._points.items() if slot * self.seconds >= begin]

    def places(self, now: float) -> list[tuple[int, Point]]:
        """Each point with its place in the series, oldest first; older ones are forgotten."""
        first = int(now) // self.seconds - self.count + 1
        self._points = {slot: point for slot, point in sorted(self._points.items()) if slot >= first}
        return [(slot - first, point) for slot, point in self._points.items()]

    def as_dict(self, now: float) -> dict[str, Any]:
        """``points``: a list each, its place in the series first, then `Point`'s fields, oldest first."""
        points = [[place, *(round(value, 3) for value in astuple(point))] for place, point in self.places(now)]
        begin = (int(now) // self.seconds - self.count + 1) * self.seconds
        return {"seconds": self.seconds, "count": self.count, "begin": begin, "points": points}


class History(Observer):
    """Thread-safe.

    Args:
        memory: bytes that weights and KV take now.
    """

    def __init__(self, memory: Callable[[], float], clock: Callable[[], float] = time.time) -> None:
        self._memory, self._clock = memory, clock
        self._lock = threading.Lock()
        self._hour, self._day = Series(*HOUR), Series(*DAY)
        self._clients: dict[str, Series] = {}
        self._prefilled = 0
        self._seconds_prefill = 0.0

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        row, report = entry(request, outcome, self._clock()), outcome.report
        point = _point(row)
        point.memory = self._memory()
        if outcome.usage is not None and row.seconds_first is not None and request.stream:
            point.answered, point.seconds_answered = row.answer, row.seconds - row.seconds_first
        with self._lock:
            self._add(row, point)
            if report is not None and report.seconds_prefill > 0:
                self._prefilled += report.computed
                self._seconds_prefill += report.seconds_prefill

    def begin_with(self, entries: Iterable[AuditEntry]) -> None:
        """Counts what was written down before this server was started."""
        with self._lock:
            for row in entries:
                self._add(row, _point(row))

    def _add(self, row: AuditEntry, point: Point) -> None:
        """A client's requests count where they had a prompt."""
        now, when = self._clock(), row.time
        self._hour.add(when, point, now)
        self._day.add(when, point, now)
        if row.prompt:
            name = row.client or "other"
            if name not in self._clients and len(self._clients) >= MOST_CLIENTS:
                self._clients = {each: series for each, series in self._clients.items() if series.places(now)}
                name = name if len(self._clients) < MOST_CLIENTS else OTHERS
            self._clients.setdefault(name, Series(*DAY)).add(when, point, now)

    def day(self) -> dict[str, Any]:
        """Per client ``[slot, requests, reused, new, again]``, slots from the first of the day on; busiest first."""
        with self._lock:
            found = {name: series.places(self._clock()) for name, series in self._clients.items()}
            self._clients = {name: self._clients[name] for name, points in found.items() if points}
        clients = [
            {"name": name, "slots": [[at, p.requests, p.reused, p.computed - p.again, p.again] for at, p in points]}
            for name, points in sorted(found.items(), key=lambda item: -sum(p.reused + p.computed for _, p in item[1]))
            if points
        ]
        return {"slots": DAY[1], "slot_seconds": DAY[0], "clients": clients}

    def as_dict(self) -> dict[str, Any]:
        """Both series, and what reuse has spared since midnight.

        ``spared_seconds`` is ``None`` until a prefill was measured: tokens spared, divided by tokens a second of the
        prefills that this server has computed.
        """
        now = self._clock()
        date = time.localtime(now)
        midnight = time.mktime((date.tm_year, date.tm_mon, date.tm_mday, 0, 0, 0, 0, 0, -1))
        with self._lock:
            spared = sum(point.reused for point in self._day.since(midnight))
            rate = self._prefilled / self._seconds_prefill if self._seconds_prefill else 0.0
            series = {"hour": self._hour.as_dict(now), "day": self._day.as_dict(now)}
        seconds = round(spared / rate, 1) if rate else None
        return series | {"spared": spared, "spared_seconds": seconds, "prefill_rate": round(rate, 1)}
