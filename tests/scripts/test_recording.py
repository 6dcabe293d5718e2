"""The picture of a terminal is what a program printed there."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from scripts.recording import PICTURE, draw, record


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
