from __future__ import annotations

import io

import pytest
from rich.console import Console

from start_llm.dashboard import progress
from start_llm.dashboard.progress import ProgressLines
from start_llm.dashboard.terminal import LiveRows


def test_a_step_is_told_when_it_begins_and_ends_and_in_between_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    lines = ProgressLines(said.append, LiveRows(Console(file=io.StringIO())))
    for step, part in (("download [x]", 0.0), ("download [x]", 0.5), ("download [x]", 1.0), ("convert", 0.0)):
        lines(step, part)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    lines("convert", 0.25)
    lines("convert", -1.0)
    lines("convert", 0.0)
    assert said == [
        "download [x] ...", "download [x]: done (0 s)", "convert ...", "convert: 25%", "convert: failed (0 s)",
        "convert ...",
    ]  # fmt: skip


def test_a_terminal_has_bars_and_the_ends_as_lines() -> None:
    stream, said = io.StringIO(), list[str]()
    console = Console(file=stream, force_terminal=True, width=80)
    rows = LiveRows(console)
    lines = ProgressLines(said.append, rows)
    lines("download [x]\x1b]52;c;aGk=\x07", 0.0)
    lines("download [x]\x1b]52;c;aGk=\x07", 0.45)
    lines("loading y", 0.0)
    assert said == [] and rows._drawn is not None
    rows._drawn.refresh()
    assert "45% download [x]]52;c;aGk=" in stream.getvalue() and "0% loading y" in stream.getvalue()
    lines("download [x]\x1b]52;c;aGk=\x07", 1.0)
    assert len(said) == 1 and "\x1b" not in said[0] and rows._drawn is not None
    lines("loading y", -1.0)
    assert said[1] == "loading y: failed (0 s)" and rows._drawn is None
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"


def test_a_terminal_is_given_back_in_the_middle_of_a_step() -> None:
    said: list[str] = []
    rows = LiveRows(Console(file=io.StringIO(), force_terminal=True))
    lines = ProgressLines(said.append, rows)
    lines("loading y", 0.0)
    rows.close()
    lines("loading y", 0.5)
    lines("loading y", 1.0)
    assert rows._drawn is None and said[-1] == "loading y: done (0 s)"


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(term: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": term})
    assert not LiveRows(console).live and not LiveRows(None).live
