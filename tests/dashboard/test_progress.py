from __future__ import annotations

import io

from rich.console import Console

from start_llm.dashboard.progress import ProgressBars


def run(*, terminal: bool) -> str:
    out = io.StringIO()
    bars = ProgressBars(Console(file=out, force_terminal=terminal, width=80))
    for step, part in (
        ("download [x]", 0.0),
        ("download [x]", 0.5),
        ("download [x]", 1.0),
        ("convert", 0.0),
        ("convert", 1.0),
    ):
        bars(step, part)
    return out.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    assert run(terminal=False) == "download [x] ...\ndownload [x]: done\nconvert ...\nconvert: done\n"


def test_bars_on_a_terminal_end_full() -> None:
    said = run(terminal=True)
    assert "download [x]" in said
    assert "convert" in said
    assert said.count("100%") >= 2


def test_lines_go_where_they_are_told_even_on_a_terminal() -> None:
    said: list[str] = []
    bars = ProgressBars(Console(file=io.StringIO(), force_terminal=True), said.append)
    bars("load", 0.0)
    bars("load", 1.0)
    assert said == ["load ...", "load: done"]
