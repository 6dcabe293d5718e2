"""Folds a request's events into one answer, for clients that do not stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from start_llm.core.events import (
    ChoiceDone,
    Done,
    Event,
    Failed,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallFinished,
    Usage,
)
from start_llm.core.messages import ToolCall
from start_llm.core.report import CacheReport


@dataclass(slots=True)
class CollectedChoice:
    """One finished choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    stop_sequence: str | None = None


@dataclass(slots=True)
class Collected:
    """A whole answer; `choices` in the order of their index."""

    choices: list[CollectedChoice]
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    report: CacheReport = field(default_factory=CacheReport)


def collect(events: Iterable[Event], n: int = 1) -> Collected | None:
    """Reads `events` to their end; ``None`` if that comes without a final one.

    Raises:
        StartLLMError: what a `Failed` carries.
    """
    result = Collected([CollectedChoice() for _ in range(n)])
    text: list[list[str]] = [[] for _ in range(n)]
    reasoning: list[list[str]] = [[] for _ in range(n)]
    for event in events:
        if isinstance(event, TextDelta):
            text[event.choice].append(event.text)
            result.choices[event.choice].logprobs.extend(event.logprobs)
        elif isinstance(event, ReasoningDelta):
            reasoning[event.choice].append(event.text)
        elif isinstance(event, ToolCallFinished):
            result.choices[event.choice].calls.append(ToolCall(event.id, event.name, event.arguments))
        elif isinstance(event, ChoiceDone):
            result.choices[event.choice].finish_reason = event.finish_reason
            result.choices[event.choice].stop_sequence = event.stop_sequence
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Done):
            result.usage, result.report = event.usage, event.report
            for index, choice in enumerate(result.choices):
                choice.text, choice.reasoning = "".join(text[index]), "".join(reasoning[index])
            return result
    return None
