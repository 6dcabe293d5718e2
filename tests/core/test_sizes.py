"""Sizes are told in one unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from start_llm.core.sizes import as_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (15_784_000_000, "15.8 GB"),
        (4 * 10**13, "40.0 TB"),
        (4 * 10**16, "40000.0 TB"),
    ],
)
def test_a_size_counts_in_thousands(count: int, text: str) -> None:
    assert as_size(count) == text


def test_nobody_prints_a_size_in_another_way() -> None:
    for path in Path("start_llm").rglob("*.py"):
        found = re.findall(r"[^\n]*\} ?(?:[KMG]iB|[kMGT]B)\b[^\n]*", path.read_text("utf-8"))
        assert path.name == "sizes.py" or [line for line in found if "GB/s" not in line] == [], path
