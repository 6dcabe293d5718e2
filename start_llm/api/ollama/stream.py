"""``/api/chat`` and ``/api/generate``, the way out: events to lines of JSON, a collected answer to one object."""

from __future__ import annotations

import time
from abc import abstractmethod
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

OllamaShape = shapes.OllamaChatShape | shapes.OllamaGenerateShape
LINES = "application/x-ndjson"


def line(value: Any) -> bytes:
    return sse.dumps(value) + b"\n"


def now() -> str:
    """RFC 3339, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def head_of(model: str) -> shapes.OllamaHeadShape:
    return {"model": model, "created_at": now()}


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


def call_body(call: ToolCall, index: int) -> shapes.OllamaCallShape:
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": object_in(call.arguments)}}


class OllamaAnswer(Exchange):
    """A request of this API that is being answered."""

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
    """A line for each piece. A line that says nothing shows life: this API has no comments.

    It takes the times that the last line tells, by ``time.monotonic()``.
    """

    content_type = LINES

    def __init__(self, answer: OllamaAnswer) -> None:
        super().__init__()
        self._answer = answer
        self._began = answer.request.received or time.monotonic()
        self._planned = self._first = 0.0  # of the prompt's plan and of the first token; 0: not yet

    def write(self, event: ev.Event) -> bytes:
        self._note(event)
        if isinstance(event, ev.Done):
            return line(self.whole(event))
        if isinstance(event, ev.ChoiceDone):
            self.choices[0].finish_reason = event.finish_reason
        elif isinstance(event, ev.TextDelta):
            return self._piece(CollectedChoice([event.text], logprobs=list(event.logprobs)))
        elif isinstance(event, ev.ReasoningDelta):
            return self._piece(CollectedChoice(thoughts=[event.text]))
        elif isinstance(event, ev.ToolCallFinished):
            return self._piece(CollectedChoice(calls=[ToolCall(event.id, event.name, event.arguments)]), event.index)
        elif isinstance(event, ev.Progress):
            return self._piece(CollectedChoice())
        return b""

    def take(self, event: ev.Event) -> None:
        self._note(event)
        super().take(event)

    def whole(self, done: ev.Done) -> OllamaShape:
        """Of a stream only its last line: the others have the words. ``start_llm`` is our own field."""
        said = self.choices[0]
        word: Literal["stop", "length"] = "length" if said.finish_reason in {"length", "cancelled"} else "stop"
        rest = self._answer.rest(said, done=True)
        times, report = self._durations(done.usage), done.report.as_dict()
        return self._answer.part(said, {**rest, "done_reason": word, **times, "start_llm": report})

    def fail(self, error: StartLLMError) -> bytes:
        return line(ollama_error(error))

    def _note(self, event: ev.Event) -> None:
        if isinstance(event, ev.Started):
            self._planned = self._planned or time.monotonic()
        elif not isinstance(event, ev.Progress):
            self._first = self._first or time.monotonic()

    def _durations(self, usage: ev.Usage) -> shapes.OllamaTimesShape:
        """Nanoseconds, and the counts that belong to them."""
        end = time.monotonic()
        planned, first = self._planned or end, self._first or end
        return {
            "total_duration": _nanoseconds(end - self._began),
            "load_duration": _nanoseconds(planned - self._began),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": _nanoseconds(first - planned),
            "eval_count": usage.completion,
            "eval_duration": _nanoseconds(end - first),
        }

    def _piece(self, said: CollectedChoice, first: int = 0) -> bytes:
        return line(self._answer.part(said, self._answer.rest(said), first))
