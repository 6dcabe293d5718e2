"""The process's own log: as JSON lines (``LOG_JSON``, crashes included), and its last lines without secrets."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

KEPT = 300
LINE_CHARS = 2000
TAIL_BYTES = 32 << 10

Redact = Callable[[str], str]


def json_line(message: str, *, level: str = "info", logger: str = "start_llm", **more: Any) -> str:
    """A line that is not about a request; those have an ``id`` and no ``message``."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "logger": logger, "message": message} | more, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """A log record as one line; a traceback is the field ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        more = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json_line(record.getMessage(), level=record.levelname.lower(), logger=record.name, **more)


def log_as_json(level: str = "warning") -> None:
    """Sends the process's log, Python's warnings and uncaught exceptions through `JsonFormatter` to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    set_level(handler, level)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def set_level(handler: logging.Handler, level: str) -> None:
    """The process's log goes to `handler` alone: our own records from `level` on, those of libraries if they warn."""
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("start_llm").setLevel(level.upper())


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("start_llm").critical("uncaught %s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value or arguments.exc_type()
    _uncaught(arguments.exc_type, error, arguments.exc_traceback)


class LogTail(logging.Handler):
    """Keeps the last lines of what is logged while it is attached. Thread-safe."""

    def __init__(self, redact: Redact) -> None:
        super().__init__()
        self._redact = redact
        self._lines: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._last = 0
        self._guard = threading.Lock()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._redact(self.format(record))[:LINE_CHARS]
        except (TypeError, ValueError):  # a log call whose values do not fit its text
            line = self._redact(f"{record.levelname} {record.name}: {record.msg}")[:LINE_CHARS]
        with self._guard:
            self._last += 1
            self._lines.append((self._last, line))

    def after(self, number: int) -> tuple[list[str], int]:
        """(the lines behind this number, the last one's number)"""
        with self._guard:
            return [line for at, line in self._lines if at > number], self._last

    def attach(self) -> None:
        logging.getLogger().addHandler(self)

    def detach(self) -> None:
        logging.getLogger().removeHandler(self)


def tail_of(path: Path, redact: Redact, lines: int = 100) -> list[str]:
    """The last lines of a file; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    found = text.splitlines()[1 if size > TAIL_BYTES else 0 :]
    return [redact(line)[:LINE_CHARS] for line in found[-lines:]]
