"""Runs work that is done in steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def through(steps: Iterator[Any]) -> tuple[list[Any], Any]:
    """What the steps yield, and what they return."""
    seen = []
    while True:
        try:
            seen.append(next(steps))
        except StopIteration as end:
            return seen, end.value
