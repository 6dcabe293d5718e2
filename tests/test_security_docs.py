"""`docs/security.md` names a test for each attack; each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "security.md").read_text(encoding="utf-8")
_NAMED = re.compile(r"`((?:\w+/)*test_\w+\.py)(?:::(test_\w+))?`")


def test_every_test_that_is_named_is_there() -> None:
    named = _NAMED.findall(TEXT)
    assert len(named) > 60
    missing = [
        f"{file}::{function}"
        for file, function in named
        if not (TESTS / file).is_file() or (function and f"def {function}(" not in (TESTS / file).read_text())
    ]
    assert missing == []


def test_every_attack_has_one() -> None:
    rows = [line for line in TEXT.split("## Attacks that were tried")[1].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 50
    assert [row for row in rows if not _NAMED.search(row)] == []
    assert [row for row in rows if row.count(" | ") != 3 and "| | " not in row] == []
