from __future__ import annotations

import pytest

from start_llm.parsing.output import CodeTracker


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("plain ", False),
        ("a `", True),
        ("a `b` ", False),
        ("a `b\n", False),
        ("``a ` ", True),
        ("```py\ncode ", True),
        ("```py\ncode\n```\n", False),
        ("  ```py\ncode ", True),
        ("````\n```\nstill ", True),
        ("text ```sh\ncode ", True),
        ("- ```sh\n  code\n  ```\n", False),
        ("text ```sh\ncode```\n", False),
        ("```\ncode ``` more ", True),
        ("```\ncode\n```", False),
        ("```one line``` ", False),
        ("```\n``` not the end\n", True),
    ],
)
def test_inside(text: str, inside: bool) -> None:
    for size in (1, 2, len(text)):
        tracker = CodeTracker()
        for start in range(0, len(text), size):
            tracker.add(text[start : start + size])
        assert tracker.inside is inside
