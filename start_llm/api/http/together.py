"""Several prompts in one request: their streams one after the other, as the choices of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from start_llm.core.errors import StartLLMError
from start_llm.core.events import (
    ChoiceDone,
    Done,
    Event,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Usage,
)
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.service import EventStream, Service

OfChoice = ReasoningDelta | TextDelta | ToolCallStarted | ToolCallDelta | ToolCallFinished | ChoiceDone


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
    return Together(streams, requests[0].n)


class Together:
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
