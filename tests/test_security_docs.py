"""`docs/security.md` names a test for each attack, `docs/page.md` one for each task of a chat."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT, PAGE = ((TESTS.parent / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("security", "page"))
_NAMED = re.compile(r"`((?:\w+/)*test_\w+\.py)(?:::(test_\w+))?`")


def test_every_test_that_is_named_is_there() -> None:
    named = _NAMED.findall(TEXT + PAGE)
    assert len(named) > 80
    missing = [
        f"{file}::{function}"
        for file, function in named
        if not (TESTS / file).is_file() or (function and f"def {function}(" not in (TESTS / file).read_text())
    ]
    assert missing == []


def test_every_task_of_a_chat_has_one() -> None:
    rows = [line for line in PAGE.split("## What one does in a chat")[1].splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20 and [row for row in rows if not _NAMED.search(row)] == []


def test_every_attack_has_one() -> None:
    rows = [line for line in TEXT.split("## Attacks that were tried")[1].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 50
    assert [row for row in rows if not _NAMED.search(row)] == []
    assert [row for row in rows if row.count(" | ") != 3 and "| | " not in row] == []
