"""One JSON line per request, in one file per session per day."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from start_llm import __version__
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Observer, Outcome
from start_llm.files.logs import DailyLogs

log = logging.getLogger(__name__)

RECENT = 500


class RequestLog(Observer):
    """Writes ``ROOT/2026-11-21/session-NAME.jsonl`` and remembers the last `RECENT` entries.

    Args:
        root: folder of the logs, or ``None`` to remember only.
        most_bytes: of all files; the oldest go first.
        counters: totals and sizes of the server by name; those that are not 0 stand in each line of a file.
    """

    def __init__(
        self,
        root: Path | None,
        most_bytes: int = 256 << 20,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        counters: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._files = DailyLogs(root, ".jsonl", most_bytes) if root is not None else None
        self._failing = False
        self._now, self._counters = now, counters
        self._lock = threading.Lock()
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def recent(self) -> list[dict[str, Any]]:
        """Newest first."""
        with self._lock:
            return list(reversed(self._recent))

    def begin(self, model: str) -> None:
        """A server is ready: a line in ``server.jsonl`` with what it begins with."""
        now = self._now()
        entry = {"time": _moment(now), "event": "ready", "version": __version__, "model": model}
        self._file(now, "server.jsonl", entry)

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        now = self._now()
        entry = log_entry(request, outcome, now)
        with self._lock:
            self._recent.append(entry)
        self._file(now, f"session-{session_name(entry['session'])}.jsonl", entry)

    def _file(self, now: datetime, name: str, entry: dict[str, Any]) -> None:
        if self._files is None:
            return
        counters = {name: value for name, value in self._counters().items() if value}
        line = json.dumps(entry | {"counters": counters}, ensure_ascii=False)
        try:
            self._files.append(now.strftime("%Y-%m-%d"), name, line)
        except OSError as error:
            if not self._failing:
                log.warning("requests cannot be logged now: %s", error)
            self._failing = True
        else:
            if self._failing:
                log.warning("requests are logged again")
            self._failing = False


def log_entry(request: ChatRequest, outcome: Outcome, now: datetime) -> dict[str, Any]:
    """Counts and times; no text of the conversation but what a miss quotes."""
    entry: dict[str, Any] = {
        "time": _moment(now),
        "id": request.id,
        "session": request.session,
        "dialect": request.dialect,
        "client": request.client,
        "model": request.model,
        "messages": len(request.messages),
        "tools": len(request.tools),
        "stream": request.stream,
        "status": outcome.status,
        "seconds": round(outcome.seconds, 4),
        "seconds_first": None if outcome.seconds_first is None else round(outcome.seconds_first, 4),
    }
    if outcome.report is not None:
        entry |= outcome.report.as_dict()
        entry["session"] = outcome.report.session or request.session
    if outcome.usage is not None:
        entry |= {"completion": outcome.usage.completion, "reasoning": outcome.usage.reasoning}
    if outcome.error is not None:
        entry["error"] = outcome.error
    return entry


def _moment(now: datetime) -> str:
    return now.isoformat(timespec="milliseconds")


def session_name(session: str | None) -> str:
    """A file name for a session id: readable, safe, and different for different ids."""
    if session is None:
        return "none"
    safe = re.sub(r"[^A-Za-z0-9-]+", "-", session).strip("-")[:40]
    return f"{safe}-{hashlib.sha256(session.encode('utf-8', 'replace')).hexdigest()[:8]}"
