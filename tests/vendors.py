"""The vendors' packages, imported by the first test that uses them: together they take three seconds.

Each worker collects all files and runs a third of them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter


class Package:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks at everything in a file
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


anthropic: Any = Package("anthropic")
openai: Any = Package("openai")


@cache
def anthropic_event() -> TypeAdapter[Any]:
    """Checks an event of a streamed message."""
    return TypeAdapter(anthropic.types.RawMessageStreamEvent)


@cache
def openai_event() -> TypeAdapter[Any]:
    """Checks an event of a streamed response."""
    return TypeAdapter(openai.types.responses.ResponseStreamEvent)
