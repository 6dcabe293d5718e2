"""The log as the page shows it."""

from __future__ import annotations

import logging

from start_llm.dashboard.process_log import KEPT, LINE_CHARS, LogTail, Redactor


def test_only_the_last_lines_are_kept_and_they_are_numbered() -> None:
    tail = LogTail(Redactor().text)
    for number in range(KEPT + 3):
        tail.emit(logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "line %d", "args": (number,)}))
    lines, last = tail.after(0)
    assert len(lines) == KEPT and lines[0].endswith("line 3") and last == KEPT + 3
    assert tail.after(last - 1)[0] == lines[-1:]
    tail.emit(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    tail.emit(logging.makeLogRecord({"msg": "x" * 10_000}))
    lines, _ = tail.after(last)
    assert "%d" in lines[0] and len(lines[1]) == LINE_CHARS
