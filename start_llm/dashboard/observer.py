"""What the dashboard is told about requests. Called on HTTP threads, many at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from start_llm.core.events import Event, Usage
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended.

    Attributes:
        status: the HTTP status, or that of the error that ended a stream; 499 for a client that went away.
        seconds: from arrival to end.
        seconds_first: from arrival to the first piece of the answer; ``None`` if there was none.
        report: final, or the first one where the request did not end well.
    """

    status: int
    seconds: float
    seconds_first: float | None = None
    usage: Usage | None = None
    report: CacheReport | None = None
    error: str | None = None


class Observer(Protocol):
    """Sees every request: `started`, its events in order, `ended`. Must be quick and must not raise."""

    def started(self, request: ChatRequest) -> None: ...

    def event(self, request: ChatRequest, event: Event) -> None: ...

    def ended(self, request: ChatRequest, outcome: Outcome) -> None: ...
