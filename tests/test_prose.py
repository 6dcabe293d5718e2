"""The documentation is plain English, as far as a program can tell: proselint finds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
#: Quotes and dashes stand in code, and a heading's words may begin the sentence behind it.
CHECKS = {"checks": {"typography": False, "lexical_illusions": False}}


def lint(folder: Path, *pages: Path) -> subprocess.CompletedProcess[str]:
    config = folder / "proselint.json"
    config.write_text(json.dumps(CHECKS))
    command = [sys.executable, "-m", "proselint", "check", "--config", str(config), *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.smoke
def test_the_pages_are_plain_english(tmp_path: Path) -> None:
    assert len(PAGES) > 25
    run = lint(tmp_path, *PAGES)
    assert (run.returncode, run.stdout) == (0, ""), run.stdout + run.stderr


@pytest.mark.live
@pytest.mark.parametrize("planted", ["It goes on for ever.", "This is a very unique server.", "At this point in time."])
def test_a_planted_phrase_is_found(planted: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{planted}\n")
    run = lint(tmp_path, page)
    assert run.returncode != 0 and "page.md" in run.stdout


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 120
