"""The last lines of the process's own log, without secrets, for the page."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

KEPT = 300
LINE_CHARS = 2000
TAIL_BYTES = 32 << 10

Redact = Callable[[str], str]


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
