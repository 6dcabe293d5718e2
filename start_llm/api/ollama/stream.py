"""``/api/chat`` and ``/api/generate``, the way out: events to lines of JSON, a collected answer to one object."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from start_llm.api.common.dialect import AnswerWriter, CollectedChoice, Exchange, logprobs_body
from start_llm.api.http import sse
from start_llm.api.ollama import shapes
from start_llm.core import events as ev
from start_llm.core.errors import StartLLMError
from start_llm.core.jsontext import object_in
from start_llm.core.messages import ToolCall
from start_llm.core.protocol import ollama_error
from start_llm.core.report import CacheReport

OllamaShape = shapes.OllamaChatShape | shapes.OllamaGenerateShape
LINES = "application/x-ndjson"


def line(value: Any) -> bytes:
    return sse.dumps(value) + b"\n"


def now() -> str:
    """RFC 3339, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def head_of(model: str) -> shapes.OllamaHeadShape:
    return {"model": model, "created_at": now()}


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

    def durations(self, usage: ev.Usage) -> shapes.OllamaTimesShape:
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


def call_body(call: ToolCall, index: int) -> shapes.OllamaCallShape:
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": object_in(call.arguments)}}


@dataclass(frozen=True, slots=True)
class OllamaAnswer(Exchange):
    """A request of this API that is being answered."""

    times: AnswerTimes = field(default_factory=lambda: AnswerTimes(time.monotonic()))

    def end(self, said: CollectedChoice, usage: ev.Usage, report: CacheReport) -> shapes.OllamaRestShape:
        """``start_llm`` is our own field: the cache report."""
        word: Literal["stop", "length"] = "length" if said.finish_reason in {"length", "cancelled"} else "stop"
        rest = self.rest(said, done=True)
        return {**rest, "done_reason": word, **self.times.durations(usage), "start_llm": report.as_dict()}

    def rest(self, said: CollectedChoice, *, done: bool = False) -> shapes.OllamaRestShape:
        if said.logprobs:
            return {"logprobs": logprobs_body(said.logprobs, self.token_text), "done": done}
        return {"done": done}

    @abstractmethod
    def part(self, said: CollectedChoice, rest: shapes.OllamaRestShape, first: int = 0) -> OllamaShape:
        """What was said, or a piece of it. `first`: the index of its first call among all."""

    def writer(self) -> AnswerWriter:
        return LineWriter(self)


class OllamaChatAnswer(OllamaAnswer):
    def part(self, said: CollectedChoice, rest: shapes.OllamaRestShape, first: int = 0) -> shapes.OllamaChatShape:
        message: shapes.OllamaMessageShape = {"role": "assistant", "content": said.text}
        if said.reasoning:
            message["thinking"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [call_body(call, first + number) for number, call in enumerate(said.calls)]
        return {**head_of(self.request.model), "message": message, **rest}


class OllamaGenerateAnswer(OllamaAnswer):
    def part(self, said: CollectedChoice, rest: shapes.OllamaRestShape, first: int = 0) -> shapes.OllamaGenerateShape:
        response: shapes.OllamaSaidShape = {"response": said.text}
        if said.reasoning:
            response["thinking"] = said.reasoning
        return {**head_of(self.request.model), **response, **rest}


class LineWriter(AnswerWriter):
    """A line for each piece. A line that says nothing shows life: this API has no comments."""

    content_type = LINES

    def __init__(self, answer: OllamaAnswer) -> None:
        super().__init__()
        self._answer = answer

    def write(self, event: ev.Event) -> bytes:
        self._answer.times.note(event)
        if isinstance(event, ev.Done):
            return line(self.whole(event))
        if isinstance(event, ev.ChoiceDone):
            self.choices[0].finish_reason = event.finish_reason
        elif isinstance(event, ev.TextDelta):
            return self._piece(CollectedChoice([event.text], logprobs=list(event.logprobs)))
        elif isinstance(event, ev.ReasoningDelta):
            return self._piece(CollectedChoice(thoughts=[event.text]))
        elif isinstance(event, ev.ToolCallFinished):
            call = ToolCall(event.id, event.name, event.arguments)
            return self._piece(CollectedChoice(calls=[call]), event.index)
        elif isinstance(event, ev.Progress):
            return self._piece(CollectedChoice())
        return b""

    def take(self, event: ev.Event) -> None:
        self._answer.times.note(event)
        super().take(event)

    def whole(self, done: ev.Done) -> OllamaShape:
        """Of a stream only its last line: the others have the words."""
        choice = self.choices[0]
        return self._answer.part(choice, self._answer.end(choice, done.usage, done.report))

    def fail(self, error: StartLLMError) -> bytes:
        return line(ollama_error(error))

    def _piece(self, said: CollectedChoice, first: int = 0) -> bytes:
        return line(self._answer.part(said, self._answer.rest(said), first))
