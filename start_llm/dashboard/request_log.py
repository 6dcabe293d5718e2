"""One JSON line per request, in one file per session per day."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from start_llm.core.events import Event
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Outcome
from start_llm.files.logs import DailyLogs

log = logging.getLogger(__name__)

RECENT = 500


class RequestLog:
    """An `Observer`. Writes ``ROOT/2026-11-21/session-NAME.jsonl`` and remembers the last `RECENT` entries.

    A file that cannot be written is said once, until it can be again.

    Args:
        root: folder of the logs, or ``None`` to remember only.
        most_bytes: of all files; the oldest go first.
    """

    def __init__(
        self,
        root: Path | None,
        most_bytes: int = 256 << 20,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._files = DailyLogs(root, ".jsonl", most_bytes) if root is not None else None
        self._failing = False
        self._now = now
        self._lock = threading.Lock()
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def recent(self) -> list[dict[str, Any]]:
        """Newest first."""
        with self._lock:
            return list(reversed(self._recent))

    def started(self, request: ChatRequest) -> None:
        """A request is logged when it has ended."""

    def event(self, request: ChatRequest, event: Event) -> None:
        """A request is logged when it has ended."""

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        now = self._now()
        entry = log_entry(request, outcome, now)
        line = json.dumps(entry, ensure_ascii=False)
        with self._lock:
            self._recent.append(entry)
        if self._files is not None:
            self._write(self._files, now.strftime("%Y-%m-%d"), f"session-{session_name(entry['session'])}.jsonl", line)

    def _write(self, files: DailyLogs, day: str, name: str, line: str) -> None:
        try:
            files.append(day, name, line)
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
        "time": now.isoformat(timespec="milliseconds"),
        "id": request.id,
        "session": request.session,
        "dialect": request.dialect,
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


def session_name(session: str | None) -> str:
    """A file name for a session id: readable, safe, and different for different ids."""
    if session is None:
        return "none"
    safe = re.sub(r"[^A-Za-z0-9-]+", "-", session).strip("-")[:40]
    return f"{safe}-{hashlib.sha256(session.encode('utf-8', 'replace')).hexdigest()[:8]}"
