"""The process's own log: as JSON lines (``LOG_JSON``, crashes included), its last lines, and how keys are taken out."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from start_llm.core.settings import SECRETS, Settings

KEPT = 300
LINE_CHARS = 2000
HIDDEN = "[redacted]"
_SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_SHORTEST = 6  # a key of fewer characters would hide ordinary words

_TOKENS = re.compile(
    r"\b(?:(?:sk|rk|pk|hf|ghp|gho|ghs|glpat|npm|pypi|xox[abprs])[-_][\w\-.]{15,}\w|ya29\.[\w-]{16,}"
    r"|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,400}\.[\w-]{8,4000}\.[\w-]{8,})"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9_\-.=+/]{8,}")
_NAMED = re.compile(
    r"(?i)((?:api[_-]?key|secret|passwd|password|access[_-]?token|auth[_-]?token|private[_-]?key)[\w.-]{0,40}"
    r"[\"']?\s{0,3}[=:]\s{0,3}[\"']?)([^\s\"',;(){}\[\]<>]{6,})"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


class Redactor:
    """Args: `known`: keys that are known to be secret, whatever they look like."""

    def __init__(self, known: Iterable[str | None] = ()) -> None:
        words = sorted({word for word in known if word and len(word) >= _SHORTEST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, words))) if words else None

    def text(self, text: str) -> str:
        """`text` with `HIDDEN` in place of what is a key, or looks like one."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        text = _PEM.sub(HIDDEN, text)
        text = _TOKENS.sub(HIDDEN, text)
        return _NAMED.sub(rf"\1{HIDDEN}", _BEARER.sub(rf"\1\2{HIDDEN}", text))

    def all(self, value: Any) -> Any:
        """JSON data with every text in it redacted, names of fields too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(name)): self.all(each) for name, each in value.items()}
        return [self.all(each) for each in value] if isinstance(value, list | tuple) else value


def redactor(settings: Settings) -> Redactor:
    """Hides the keys of this server, and whatever the environment calls a key."""
    environment = [value for name, value in os.environ.items() if any(word in name.upper() for word in _SECRET_NAMES)]
    return Redactor([*(getattr(settings, name) for name in SECRETS), *environment])


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
    log_to_stderr(JsonFormatter(), level)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda raised: _uncaught(raised.exc_type, raised.exc_value, raised.exc_traceback)


class _StderrOfNow(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at that time: moving rows put something else there, which keeps them whole."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(formatter: logging.Formatter, level: str) -> None:
    """The process's log goes there alone: our own records from `level` on, those of libraries if they warn."""
    handler = _StderrOfNow()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("start_llm").setLevel(level.upper())


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    shown = error or kind()
    logging.getLogger("start_llm").critical("uncaught %s: %s", kind.__name__, shown, exc_info=(kind, shown, trace))


class LogTail(logging.Handler):
    """Keeps the last lines of what is logged while it is attached. Thread-safe."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__()
        self._redact = redact
        self._lines: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._last = 0
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._redact(self.format(record))[:LINE_CHARS]
        except (TypeError, ValueError):  # a log call whose values do not fit its text
            line = self._redact(f"{record.levelname} {record.name}: {record.msg}")[:LINE_CHARS]
        self._last += 1  # under the handler's lock
        self._lines.append((self._last, line))

    def after(self, number: int) -> tuple[list[str], int]:
        """(the lines behind this number, the last one's number)"""
        lines = list(self._lines)  # one step of the interpreter: no other thread adds meanwhile
        return [line for at, line in lines if at > number], lines[-1][0] if lines else number
