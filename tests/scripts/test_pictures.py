"""The pictures of the README show what the tables of the benchmarks say, and what a program printed in a terminal."""

from __future__ import annotations

import html
import re
import subprocess
import sys

import pytest

from scripts.recording import PICTURE, draw, record
from start_llm.clients import CLIENTS
from tests.lazy import Package

plots = Package("scripts.plots")


def texts(drawing: str) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", drawing)


SHOWN = {"reuse": {"start_llm", "mlx_lm.server", "sub-agents"}, "sessions": {"start_llm", "knows the future"}}


@pytest.mark.live
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", SHOWN)
def test_the_plot_in_the_repository_is_that_of_the_tables(name: str, theme: str) -> None:
    assert theme in plots.COLOURS and len(plots.COLOURS) == 2 and plots.PLOTS.keys() == SHOWN.keys()
    heading, draw = plots.PLOTS[name]
    rows = plots.table(plots.TABLES.read_text(encoding="utf-8"), heading)
    kept = (plots.IMAGES / f"{name}-{theme}.svg").read_text(encoding="utf-8")
    assert texts(kept) == texts(draw(rows, theme)), "run scripts/plots.py again"
    assert SHOWN[name] <= set(texts(kept))


@pytest.mark.thorough
def test_another_figure_in_the_table_is_another_plot() -> None:
    text = plots.TABLES.read_text(encoding="utf-8")
    rows = plots.table(text, "scenario")
    rows["clock"]["ours, plain"] = "7.77"
    assert "7.77" in texts(plots.reuse(rows, "light"))
    with pytest.raises(ValueError, match="no table begins with a column 'nothing'"):
        plots.table(text, "nothing")


def words(drawing: str) -> list[str]:
    return re.sub(r"<[^>]+>|&#160;", " ", drawing.partition("<g class")[2]).split()


@pytest.mark.live
def test_what_a_program_prints_is_drawn_without_what_it_overwrote_and_without_keys() -> None:
    program = "print('10%', end='\\r'); print('\\033[1mdone\\033[0m key sk-ABC123def')"
    drawing = draw("program", record([sys.executable, "-c", program]))
    assert words(drawing)[1:] == ["$", "program", "done", "key", "sk-..."]
    assert "10%" not in drawing and "sk-ABC" not in drawing and "@font-face" not in drawing


@pytest.mark.live
def test_a_program_that_fails_is_not_recorded() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        record([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_kept_picture_is_small_and_fetches_nothing() -> None:
    drawing = PICTURE.read_text("utf-8")
    assert len(drawing) < 300_000
    assert "url(" not in drawing.replace("url(#", "") and "@import" not in drawing
    assert "What each turn cost" in drawing.replace("&#160;", " ")


def test_no_line_of_the_kept_picture_is_stretched_and_it_names_every_agent() -> None:
    """``textLength`` draws a text that wide, whatever it says: of a longer text, its letters stand apart."""
    found = re.findall(r'textLength="([\d.]+)"[^>]*>([^<]*)<', PICTURE.read_text("utf-8"))
    lines = [(float(width), html.unescape(text)) for width, text in found]
    wide = min(width for width, text in lines if text == "\n")
    assert len(lines) > 40 and [text for width, text in lines if abs(width - wide * len(text)) > 1] == []
    assert any("|".join(CLIENTS) in text for _, text in lines)
