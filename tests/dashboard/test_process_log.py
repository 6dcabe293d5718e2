"""The log as JSON lines, and as the page shows it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from start_llm.dashboard.process_log import KEPT, LINE_CHARS, JsonFormatter, LogTail, Redactor, json_line

CRASHES = """
import logging, threading, warnings
from start_llm.dashboard.process_log import log_as_json
log_as_json("info")
for name in ("start_llm.x", "library"):
    logging.getLogger(name).info("said"), logging.getLogger(name).debug("no")
logging.getLogger("a").warning("two\\nlines")
warnings.warn("look out")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise KeyError("gone")
"""


def test_a_line_is_one_object() -> None:
    entry = json.loads(json_line('a\n"b" \x1b é', level="error", extra=1))
    assert entry["message"] == 'a\n"b" \x1b é' and (entry["level"], entry["extra"]) == ("error", 1)
    assert "\n" not in json_line("a\nb") and entry["time"].endswith("+00:00")


def test_a_record_with_its_traceback() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("x.y", logging.WARNING, "f", 1, "it %s", ("failed",), sys.exc_info())
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["level"], entry["logger"], entry["message"]) == ("warning", "x.y", "it failed")
    assert entry["traceback"].endswith("ValueError: bad")


@pytest.mark.live
def test_warnings_and_crashes_are_lines_too() -> None:
    """The level is that of our own records."""
    run = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and run.stdout == ""
    first, *said = [json.loads(line) for line in run.stderr.splitlines()]
    assert (first["logger"], first["level"], first["message"]) == ("start_llm.x", "info", "said")
    assert [entry["level"] for entry in said] == ["warning", "warning", "critical", "critical"]
    assert "look out" in said[1]["message"] and "ZeroDivisionError" in said[2]["message"]
    assert said[3]["traceback"].endswith("KeyError: 'gone'")


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
