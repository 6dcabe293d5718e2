"""A request's events as one answer, for clients that do not stream; several prompts' events as those of one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from start_llm.core.errors import StartLLMError
from start_llm.core.events import (
    ChoiceDone,
    Done,
    Event,
    Failed,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Usage,
)
from start_llm.core.messages import ToolCall
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.service import EventStream, Service

OfChoice = ReasoningDelta | TextDelta | ToolCallStarted | ToolCallDelta | ToolCallFinished | ChoiceDone


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


def submit_all(service: Service, requests: Sequence[ChatRequest]) -> EventStream:
    """All are submitted at once, so that the engine can batch them; if one is refused, none is run."""
    if len(requests) == 1:
        return service.chat(requests[0])
    streams: list[EventStream] = []
    try:
        for request in requests:
            streams.append(service.chat(request))
    except StartLLMError:
        for stream in streams:
            stream.close()
        raise
    return _StreamsInTurn(streams, requests[0].n)


class _StreamsInTurn:
    """An `EventStream` of streams with `n` choices each. Counts are sums; the first one's start is everyone's."""

    def __init__(self, streams: Sequence[EventStream], n: int) -> None:
        self._streams = tuple(streams)
        self._events = self._merge(n)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def last_report(self) -> CacheReport | None:
        reports = [report for stream in self._streams if (report := stream.last_report()) is not None]
        return reduce(CacheReport.plus, reports) if reports else None

    def _merge(self, n: int) -> Iterator[Event]:
        usage, report = Usage(0, 0, 0), CacheReport()
        for index, stream in enumerate(self._streams):
            done = None
            for event in stream:
                if isinstance(event, Done):
                    done = event
                elif isinstance(event, OfChoice):
                    yield replace(event, choice=event.choice + index * n)
                elif not isinstance(event, Started) or index == 0:
                    yield event
            if done is None:
                return
            usage, report = _add(usage, done.usage), report.plus(done.report)
        yield Done(usage, report)


def _add(one: Usage, other: Usage) -> Usage:
    return Usage(
        one.prompt + other.prompt,
        one.completion + other.completion,
        one.cached + other.cached,
        one.reasoning + other.reasoning,
    )
