"""The log as the page shows it."""

from __future__ import annotations

import logging
from pathlib import Path

from start_llm.dashboard.process_log import KEPT, LINE_CHARS, LogTail, tail_of
from start_llm.dashboard.redact import HIDDEN, Redactor


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


def test_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail_of(path, Redactor().text) == []
    path.write_text("".join(f"line {number}\n" for number in range(20_000)) + "Bearer abcdefgh1\n")
    lines = tail_of(path, Redactor().text, lines=3)
    assert lines == ["line 19998", "line 19999", f"Bearer {HIDDEN}"]
