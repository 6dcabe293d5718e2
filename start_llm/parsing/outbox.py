"""Events on their way out of a parser."""

from __future__ import annotations

from dataclasses import replace

from start_llm.core.events import Event, ReasoningDelta, TextDelta, ToolCallDelta


class Outbox:
    """Collects the events of one choice; neighbours of one kind become one event. One thread.

    Attributes:
        holding: visible text is kept back until `release`, or taken out by `withdraw`.
    """

    def __init__(self, choice: int, *, holding: bool) -> None:
        self.holding = holding
        self._choice = choice
        self._events: list[Event] = []
        self._held: list[str] = []

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def emit(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and last.index == event.index:
            self._events[-1] = replace(last, arguments=last.arguments + event.arguments)
        else:
            self._events.append(event)

    def text(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if self.holding:
            self._held.append(text)
        elif isinstance(last, TextDelta):
            self._events[-1] = replace(last, text=last.text + text)
        else:
            self._events.append(TextDelta(text, self._choice))

    def reasoning(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, ReasoningDelta):
            self._events[-1] = replace(last, text=last.text + text)
        else:
            self._events.append(ReasoningDelta(text, self._choice))

    def release(self) -> None:
        """What was kept back is visible text; from now on text goes out at once."""
        text = self.withdraw()
        if text:
            self.text(text)

    def withdraw(self) -> str:
        """What was kept back, which does not go out; from now on text does."""
        self.holding = False
        text = "".join(self._held)
        self._held.clear()
        return text
