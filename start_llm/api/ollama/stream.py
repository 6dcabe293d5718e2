"""``/api/chat`` and ``/api/generate``, the way out: events to lines of JSON, a collected answer to one object."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from start_llm.api.common.dialect import Collected, Exchange, StreamWriter, collect, logprobs_body
from start_llm.api.http import sse
from start_llm.api.http.answers import CACHE_HEADER
from start_llm.api.http.routes import Reply
from start_llm.core import events as ev
from start_llm.core.errors import StartLLMError
from start_llm.core.jsontext import parse_inner
from start_llm.core.messages import ToolCall
from start_llm.core.protocol import ollama_error

LINES = "application/x-ndjson"


def line(value: Any) -> bytes:
    return sse.dumps(value) + b"\n"


def now() -> str:
    """RFC 3339, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded_body(model: str, empty: dict[str, Any], reason: str) -> dict[str, Any]:
    """The answer to a body that asks nothing."""
    return {"model": model, "created_at": now(), **empty, "done": True, "done_reason": reason}


@dataclass(slots=True)
class AnswerTimes:
    """When a request's prompt was planned and its first token came, in ``time.monotonic()`` seconds; 0: not yet."""

    began: float
    planned: float = 0.0
    first: float = 0.0

    def note(self, event: ev.Event) -> None:
        if isinstance(event, ev.Started) and not self.planned:
            self.planned = time.monotonic()
        elif not self.first and not isinstance(event, ev.Started | ev.Progress):
            self.first = time.monotonic()

    def watch(self, events: Iterable[ev.Event]) -> Iterator[ev.Event]:
        for event in events:
            self.note(event)
            yield event

    def durations(self, usage: ev.Usage) -> dict[str, int]:
        """Nanoseconds, and the counts that belong to them."""
        end = time.monotonic()
        began = self.began or self.planned or end
        planned, first = self.planned or end, self.first or end
        return {
            "total_duration": _nanoseconds(end - began),
            "load_duration": _nanoseconds(planned - began),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": _nanoseconds(first - planned),
            "eval_count": usage.completion,
            "eval_duration": _nanoseconds(end - first),
        }


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """This API sends objects. What the model wrote is never lost: if it is none, it stands in one."""
    try:
        found = parse_inner(call.arguments)
    except ValueError:  # no JSON, nested too deeply, or with a number that is none
        found = call.arguments
    return found if isinstance(found, dict) else {"arguments": found}


def call_body(call: ToolCall, index: int) -> dict[str, Any]:
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments_of(call)}}


@dataclass(frozen=True, slots=True)
class OllamaAnswer(Exchange):
    """A request of this API that is being answered."""

    times: AnswerTimes = field(default_factory=lambda: AnswerTimes(time.monotonic()))

    def head(self) -> dict[str, Any]:
        return {"model": self.request.model, "created_at": now()}

    def reply(self, events: Iterable[ev.Event]) -> Reply | None:
        result = collect(self.times.watch(events))
        if result is None:
            return None
        return Reply(sse.dumps(self.body(result)), headers={CACHE_HEADER: result.report.header()})

    def body(self, result: Collected) -> dict[str, Any]:
        choice = result.choices[0]
        said = self.part(choice.text, choice.reasoning, choice.calls)
        end = self.end(choice.finish_reason, result.usage, result.report.as_dict())
        return self.head() | said | self.logprobs(choice.logprobs) | end

    def end(self, reason: ev.FinishReason, usage: ev.Usage, report: dict[str, Any]) -> dict[str, Any]:
        """``start_llm`` is our own field: the cache report."""
        word = "length" if reason in {"length", "cancelled"} else "stop"
        return {"done": True, "done_reason": word} | self.times.durations(usage) | {"start_llm": report}

    def logprobs(self, items: Sequence[ev.TokenLogprob]) -> dict[str, Any]:
        """Nothing where none were asked for."""
        return {"logprobs": logprobs_body(items, self.token_text)} if items else {}

    @abstractmethod
    def part(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = (), first: int = 0) -> dict[str, Any]:
        """What was said, or a piece of it. `first`: the index of the first of `calls` among all."""

    def writer(self) -> StreamWriter:
        return LineWriter(self)


class OllamaChatAnswer(OllamaAnswer):
    def part(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = (), first: int = 0) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [call_body(call, first + number) for number, call in enumerate(calls)]
        return {"message": message}


class OllamaGenerateAnswer(OllamaAnswer):
    def part(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = (), first: int = 0) -> dict[str, Any]:
        return {"response": text} | ({"thinking": thinking} if thinking else {})


class LineWriter(StreamWriter):
    """A line for each piece. A line that says nothing shows life: this API has no comments."""

    content_type = LINES

    def __init__(self, answer: OllamaAnswer) -> None:
        self._answer = answer
        self._reason: ev.FinishReason = "stop"

    def write(self, event: ev.Event) -> bytes:
        self._answer.times.note(event)
        if isinstance(event, ev.Done):
            end = self._answer.end(self._reason, event.usage, event.report.as_dict())
            return line(self._answer.head() | self._answer.part("") | end)
        if isinstance(event, ev.ChoiceDone):
            self._reason = event.finish_reason
        elif isinstance(event, ev.TextDelta):
            return self._piece(event.text, more=self._answer.logprobs(event.logprobs))
        elif isinstance(event, ev.ReasoningDelta):
            return self._piece("", event.text)
        elif isinstance(event, ev.ToolCallFinished):
            call = ToolCall(event.id, event.name, event.arguments)
            return line(self._answer.head() | self._answer.part("", "", [call], event.index) | {"done": False})
        elif isinstance(event, ev.Progress):
            return self._piece("")
        return b""

    def fail(self, error: StartLLMError) -> bytes:
        return line(ollama_error(error))

    def _piece(self, text: str, thinking: str = "", more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        return line({**self._answer.head(), **self._answer.part(text, thinking), **more, "done": False})
