"""Packages that few tests use and that take long to import: each is imported by the first test that uses it.

Each worker collects all files and runs a third of them. `tests/test_kinds.py` sees to it that no file imports one of
these while it is collected.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SLOW_TO_IMPORT = ("anthropic", "matplotlib", "openai", "scipy", "selenium")

ROOT = Path(__file__).parents[1]
SHARED = {
    "vendors": ("tests.vendors", "server.openai.", 'Package("openai'),
}
"""What stands in the files that import the same packages, by their kind."""


@cache
def shared(path: str) -> str:
    """The kind of a test file; ``""``: it imports nothing that is slow."""
    text = (ROOT / path).read_text("utf-8")
    return next((kind for kind, words in SHARED.items() if any(word in text for word in words)), "")


class Package:
    """A module whose contents are taken from it when they are asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks at everything in a file
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
