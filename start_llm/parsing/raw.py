"""Answers of `/v1/completions`: the text as it was decoded. Knows no reasoning, no calls and no turns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from start_llm.core.events import Event, TextDelta, TokenLogprob
from start_llm.parsing.choice import ChoiceParser
from start_llm.parsing.stream import Parsed


class RawParser:
    """What `OutputParser` is for a chat. Only a stop string ends the text; what may become one is held back.

    The stop string that is complete first counts, so that chunks make no difference.
    """

    in_reasoning = False
    faithful = True

    def __init__(self, stop: Collection[str], choice: int) -> None:
        self.stopped: str | None = None
        self._stop, self._choice = [text for text in stop if text], choice
        self._held = ""

    @property
    def ended(self) -> bool:
        return self.stopped is not None

    def feed(self, text: str) -> list[Event]:
        if self.ended:
            return []
        self._held += text
        found = [(place + len(stop), place, stop) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            _, place, self.stopped = min(found)
            return self._release(place)
        return self._release(len(self._held) - max((self._begun(stop) for stop in self._stop), default=0))

    def finish(self, *, cut: bool = False) -> list[Event]:
        return [] if self.ended else self._release(len(self._held))

    def parsed(self) -> Parsed:
        """A raw answer is no message."""
        return Parsed("", None, ())

    def _begun(self, stop: str) -> int:
        """How many characters at the end of what is held may be the beginning of this stop string."""
        most = min(len(stop) - 1, len(self._held))
        return next((size for size in range(most, 0, -1) if self._held.endswith(stop[:size])), 0)

    def _release(self, size: int) -> list[Event]:
        text, self._held = self._held[:size], self._held[size:]
        return [TextDelta(text, self._choice)] if text else []


@dataclass(slots=True)
class RawChoiceParser(ChoiceParser):
    """Each token's logprob has the text that the token completed, and goes out with the beginning of that text.

    So the texts of the tokens, joined, are the answer's text. Tokens of a stop string have none.
    """

    _told: int = 0
    """Characters that went out."""
    _begin: int = 0
    """Where the text of the first token that waits begins."""

    def _completed(self, text: str, logprob: TokenLogprob | None) -> None:
        if logprob is not None:
            self._pending.append(replace(logprob, text=text))

    def _rest(self, text: str) -> None:
        if self._pending:
            last = self._pending[-1]
            self._pending[-1] = replace(last, text=(last.text or "") + text)

    def _with_logprobs(self, events: list[Event]) -> list[Event]:
        for index, event in enumerate(events):
            if isinstance(event, TextDelta):
                self._told += len(event.text)
                events[index] = replace(event, logprobs=tuple(self._due()))
        return events

    def _due(self) -> list[TokenLogprob]:
        due = []
        while self._pending and self._begin < self._told:
            due.append(self._pending.pop(0))
            self._begin += len(due[-1].text or "")
        return due
