"""``LOG_JSON``: everything that the process says is one JSON object a line, log records and crashes included."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any


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
