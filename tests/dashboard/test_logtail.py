"""The log as the page shows it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from start_llm.dashboard.logtail import KEPT, LINE_CHARS, LogTail, Redactor, tail_of


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("the key is hunter2hunter2.", "the key is [hidden]."),
        ("Authorization: Bearer abc.d-e", "Authorization: Bearer [hidden]"),
        ("{'x-api-key': 'abc', 'a': 1}", "{'x-api-key': '[hidden]', 'a': 1}"),
        ("token hf_abcdefGHIJ and sk-ant-api03-xyz", "token [hidden] and [hidden]"),
        ("a task-list and risk-free words", "a task-list and risk-free words"),
    ],
)
def test_secrets_are_hidden(said: str, shown: str) -> None:
    assert Redactor(["hunter2hunter2", None, "", "a"])(said) == shown


def test_only_the_last_lines_are_kept_and_they_are_numbered() -> None:
    tail = LogTail(Redactor([]))
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
    assert tail_of(path, Redactor([])) == []
    path.write_text("".join(f"line {number}\n" for number in range(20_000)) + "Bearer abc\n")
    lines = tail_of(path, Redactor([]), lines=3)
    assert lines == ["line 19998", "line 19999", "Bearer [hidden]"]
