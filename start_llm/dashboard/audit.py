"""Who asked what, what it cost and how it ended: one row a request, for days, without a word of any conversation."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Observer, Outcome
from start_llm.files.batches import BatchWriter
from start_llm.files.database import CacheDatabase

AUDIT_FILE = "audit.sqlite3"
"""In START_LLM_CACHE_DIR."""
DAY_SECONDS = 86_400
MOST_ROWS = 1_000_000
OUTCOMES = ("answered", "cut", "refused", "gone", "failed")
"""``cut``: the watchdog ended the answer, or it repeated itself. ``refused``: the request was wrong. ``gone``: its
client went away."""
GROUPS = {
    "client": "client",
    "model": "model",
    "session": "session",
    "outcome": "outcome",
    "miss": "substr(miss, 1, instr(miss || ' ', ' ') - 1)",
    "day": "date(time, 'unixepoch', 'localtime')",
}
"""What `sums` may add up by, and the SQL for it."""

_SCHEMA = """
CREATE TABLE requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, id TEXT NOT NULL, client TEXT NOT NULL,
    session TEXT NOT NULL, dialect TEXT NOT NULL, model TEXT NOT NULL, outcome TEXT NOT NULL, status INTEGER NOT NULL,
    prompt INTEGER NOT NULL, reused INTEGER NOT NULL, computed INTEGER NOT NULL, new INTEGER NOT NULL,
    answer INTEGER NOT NULL, seconds REAL NOT NULL, seconds_first REAL, miss TEXT NOT NULL);
CREATE INDEX requests_time ON requests (time)
"""
_VERSION = 1
_VISIBLE_SECONDS = 0.25
"""An answer's last byte waits at most so long for its row: a slow disk delays nobody further."""
_TRIM_EVERY = 200  # rows


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens, see `CacheReport`. Seconds from arrival to the end, and to the first piece of the answer."""

    prompt: int
    reused: int
    computed: int
    new: int
    answer: int
    seconds: float
    seconds_first: float | None


@dataclass(frozen=True, slots=True)
class AuditEntry(Counts):
    """A request that has ended."""

    time: float  # of its end, unix seconds
    id: str
    client: str
    session: str
    dialect: str
    model: str
    outcome: str  # one of `OUTCOMES`
    status: int
    miss: str  # why more was computed than was new, see `Miss.summary`; empty where it was not


_COLUMNS = ", ".join(field.name for field in fields(AuditEntry))
_MARKS = ", ".join("?" for _ in fields(AuditEntry))


@dataclass(frozen=True, slots=True)
class Sum(Counts):
    """Several requests together; `seconds` and `seconds_first` are means."""

    name: str
    requests: int
    answered: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which entries are meant: those from `since` (unix seconds) on that have these values, in any case of letters."""

    since: float = 0.0
    client: str | None = None
    model: str | None = None
    outcome: str | None = None

    def where(self) -> tuple[str, list[object]]:
        texts = {"client": self.client, "model": self.model, "outcome": self.outcome}
        wanted = {name: value for name, value in texts.items() if value is not None}
        conditions = ["time >= ?", *(f"{name} = ? COLLATE NOCASE" for name in wanted)]
        return " AND ".join(conditions), [self.since, *wanted.values()]


class Audit(Observer):
    """Writes, on a thread of its own, at most `MOST_ROWS`, for so many days. Servers may share the file (0600)."""

    def __init__(self, path: Path, days: float, clock: Callable[[], float] = time.time) -> None:
        self._seconds, self._clock = days * DAY_SECONDS, clock
        self._until_trim = 0
        self._writer = BatchWriter("audit", _database(path), self._write, gather_seconds=0.0)

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        self._writer.put(entry(request, outcome, self._clock()))
        self._writer.flush(_VISIBLE_SECONDS)

    def close(self) -> None:
        """Writes what is waiting and ends the thread. May be called twice."""
        self._writer.close()

    def _write(self, connection: sqlite3.Connection, rows: list[AuditEntry]) -> None:
        """The writer thread."""
        connection.executemany(f"INSERT INTO requests ({_COLUMNS}) VALUES ({_MARKS})", [astuple(row) for row in rows])
        if self._until_trim <= 0:
            connection.execute("DELETE FROM requests WHERE time < ?", (self._clock() - self._seconds,))
            connection.execute(
                "DELETE FROM requests WHERE number <= (SELECT MAX(number) FROM requests) - ?", (MOST_ROWS,)
            )
        self._until_trim = _TRIM_EVERY if self._until_trim <= 0 else self._until_trim - len(rows)


def entry(request: ChatRequest, outcome: Outcome, now: float) -> AuditEntry:
    """A request that has ended, as a row."""
    report = outcome.report or CacheReport()
    return AuditEntry(
        time=now,
        id=request.id,
        client=request.client,
        session=(outcome.report.session if outcome.report is not None else "") or request.session or "",
        dialect=request.dialect,
        model=request.model,
        outcome=_outcome(outcome.status, report),
        status=outcome.status,
        prompt=report.prompt,
        reused=report.reused,
        computed=report.computed,
        new=report.new,
        answer=outcome.usage.completion if outcome.usage is not None else report.generated,
        seconds=round(outcome.seconds, 3),
        seconds_first=None if outcome.seconds_first is None else round(outcome.seconds_first, 3),
        miss=report.miss.summary if report.miss is not None else "",
    )


def _outcome(status: int, report: CacheReport) -> str:
    if status < 400:
        return "cut" if report.cut else "answered"
    if status == 499:
        return "gone"
    return "refused" if status < 500 else "failed"


# --- asking -----------------------------------------------------------------


def entries(path: Path, wanted: Wanted, most: int) -> list[AuditEntry]:
    """The newest `most` of those that are wanted, oldest first; none where there is no file. Raises FileUnavailable."""
    where, values = wanted.where()
    query = f"SELECT {_COLUMNS} FROM requests WHERE {where} ORDER BY number DESC LIMIT ?"
    return [AuditEntry(*row) for row in _ask(path, query, [*values, most])][::-1]


def sums(path: Path, wanted: Wanted, by: str) -> list[Sum]:
    """What is wanted, added up by one of `GROUPS`; most prompt tokens first, days in order. Raises FileUnavailable."""
    where, values = wanted.where()
    query = (
        "SELECT SUM(prompt), SUM(reused), SUM(computed), SUM(new), SUM(answer), AVG(seconds), AVG(seconds_first), "
        f"{GROUPS[by]} AS name, COUNT(*), SUM(outcome = 'answered') FROM requests WHERE {where} "
        f"GROUP BY name ORDER BY {'name' if by == 'day' else '1 DESC'}"
    )
    return [Sum(*row) for row in _ask(path, query, values)]


def _ask(path: Path, query: str, values: list[object]) -> list[tuple[Any, ...]]:
    if not path.exists():
        return []
    database = _database(path)
    try:
        return database.run(lambda connection: connection.execute(query, values).fetchall())
    finally:
        database.close()


def _database(path: Path) -> CacheDatabase:
    return CacheDatabase(path, _SCHEMA, _VERSION, what="audit of requests", check=False)
