"""What is written down of each request: a line in the file of its session, and with ``DUMP_REQUESTS`` all of it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from start_llm import __version__
from start_llm.core.events import Event, ReasoningDelta, TextDelta, ToolCallFinished
from start_llm.core.messages import Message
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Observer, Outcome
from start_llm.dashboard.process_log import Redactor
from start_llm.files.logs import DailyLogs

log = logging.getLogger(__name__)

RECENT = 500
FOLDER = "dumps"
LONGEST = 1_000_000
"""Characters of one text; of a longer one its two ends are kept."""
_MOST_BYTES = 256 << 20  # of all files of a kind; the oldest go first


class RequestLog(Observer):
    """Writes ``ROOT/2026-11-21/session-NAME.jsonl`` and remembers the last `RECENT` entries.

    Args:
        root: folder of the logs, or ``None`` to remember only.
        counters: totals and sizes of the server by name; those that are not 0 stand in each line of a file.
    """

    def __init__(
        self,
        root: Path | None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        counters: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._files = DailyLogs(root, ".jsonl", _MOST_BYTES) if root is not None else None
        self._failing = False
        self._now, self._counters = now, counters
        self._lock = threading.Lock()
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=RECENT)
        self._count = 0

    def recent(self) -> list[dict[str, Any]]:
        """Newest first."""
        return self.after(0)[0][::-1]

    def after(self, number: int) -> tuple[list[dict[str, Any]], int]:
        """The entries behind this number, oldest first, and the last one's number."""
        with self._lock:
            return [entry for at, entry in self._recent if at > number], self._count

    def begin(self, model: str) -> None:
        """A server is ready: a line in ``server.jsonl`` with what it begins with."""
        now = self._now()
        entry = {"time": _moment(now), "event": "ready", "version": __version__, "model": model}
        self._file(now, "server.jsonl", entry)

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        now = self._now()
        entry = log_entry(request, outcome, now)
        with self._lock:
            self._count += 1
            self._recent.append((self._count, entry))
        self._file(now, f"session-{session_name(entry['session'], request.owner)}.jsonl", entry)

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


def names_of(request: ChatRequest) -> dict[str, Any]:
    """What a request is called, and how many messages it has."""
    names = ("id", "session", "dialect", "client", "model")
    return {name: getattr(request, name) for name in names} | {"messages": len(request.messages)}


def log_entry(request: ChatRequest, outcome: Outcome, now: datetime) -> dict[str, Any]:
    """Places, counts and times; no text of the conversation."""
    entry: dict[str, Any] = {
        "time": _moment(now),
        **names_of(request),
        "tools": len(request.tools),
        "stream": request.stream,
        "status": outcome.status,
        "seconds": round(outcome.seconds, 4),
        "seconds_first": None if outcome.seconds_first is None else round(outcome.seconds_first, 4),
    }
    if outcome.report is not None:
        entry |= outcome.report.as_dict(words=False)
        entry["session"] = outcome.report.session or request.session
    if outcome.usage is not None:
        entry |= {"completion": outcome.usage.completion, "reasoning": outcome.usage.reasoning}
    if outcome.error is not None:
        entry["error"] = outcome.error
    return entry


def _moment(now: datetime) -> str:
    return now.isoformat(timespec="milliseconds")


def session_name(session: str | None, owner: str | None = None) -> str:
    """A file name for an owner's session id: readable, safe, and different for different ids and owners."""
    if session is None:
        return "none"
    safe = re.sub(r"[^A-Za-z0-9-]+", "-", session).strip("-")[:40]
    return f"{safe}-{hashlib.sha256(f'{owner or ""}{session}'.encode('utf-8', 'replace')).hexdigest()[:8]}"


# --- prompt and answer of each request as a file of its own, to look into what went wrong ---


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)
    size: int = 0


@dataclass(slots=True)
class _RunningRequest:
    prompts: list[str] = field(default_factory=list)
    answers: defaultdict[int, _Answer] = field(default_factory=lambda: defaultdict(_Answer))


class Dumps(Observer):
    """Writes ``ROOT/dumps/2026-11-21/ID.json`` (0600) when a request has ended; the oldest go first. Thread-safe."""

    def __init__(self, root: Path, redactor: Redactor, most_bytes: int = _MOST_BYTES) -> None:
        self._files = DailyLogs(root / FOLDER, ".json", most_bytes)
        self._longest = min(LONGEST, most_bytes // 32)
        self._redactor = redactor
        self._lock = threading.Lock()
        self._running: dict[str, _RunningRequest] = {}

    def prompt(self, request_id: str, text: str) -> None:
        """What the model is going to read."""
        with self._lock:
            found = self._running.get(request_id)
            if found is not None:
                found.prompts.append(self._cut(text))

    def started(self, request: ChatRequest) -> None:
        with self._lock:
            self._running[request.id] = _RunningRequest()

    def event(self, request: ChatRequest, event: Event) -> None:
        if not isinstance(event, TextDelta | ReasoningDelta | ToolCallFinished):
            return
        with self._lock:
            found = self._running.get(request.id)
            if found is None:
                return
            answer = found.answers[event.choice]
            if isinstance(event, ToolCallFinished):
                answer.calls.append({"name": event.name, "arguments": self._cut(event.arguments)})
            elif answer.size < self._longest:
                answer.size += len(event.text)
                (answer.text if isinstance(event, TextDelta) else answer.reasoning).append(event.text)

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        with self._lock:
            found = self._running.pop(request.id, _RunningRequest())
        now = datetime.now(UTC)
        entry = {
            **log_entry(request, outcome, now),
            "sent": [self._message(message) for message in request.messages],
            "tools": [tool.as_function()["function"] for tool in request.tools],
            "prompt": found.prompts,
            "answer": [
                {"reasoning": "".join(each.reasoning), "text": "".join(each.text), "calls": each.calls}
                for _, each in sorted(found.answers.items())
            ],
        }
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", request.id)[:100] + ".json"
        text = json.dumps(self._redactor.all(entry), ensure_ascii=False, indent=1)
        try:
            self._files.append(now.strftime("%Y-%m-%d"), name, text)
        except OSError as error:
            log.warning("the dump of %s could not be written: %s", request.id, error)

    def _message(self, message: Message) -> dict[str, Any]:
        entry: dict[str, Any] = {"role": message.role, "content": self._cut(message.content)}
        if message.reasoning is not None:
            entry["reasoning"] = self._cut(message.reasoning)
        if message.tool_calls:
            entry["calls"] = [{"name": c.name, "arguments": self._cut(c.arguments)} for c in message.tool_calls]
        return entry

    def _cut(self, text: str) -> str:
        most = self._longest
        if len(text) <= most:
            return text
        half = most // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
