"""The vendors' packages and what they check events with."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from tests.lazy import Package

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
