"""What a dialect is to the server: requests in, answers and streams out. It computes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from start_llm.api.common.shapes import ChosenLogprobShape, TokenLogprobShape
from start_llm.api.http import sse
from start_llm.api.http.answers import CACHE_HEADER
from start_llm.api.http.routes import Reply
from start_llm.core import events as ev
from start_llm.core.errors import StartLLMError
from start_llm.core.media import Computation
from start_llm.core.messages import ToolCall
from start_llm.core.protocol import error_body, error_headers, style_of
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.service import EventStream, Service

TokenText = Callable[[int], str]


@dataclass(slots=True)
class CollectedChoice:
    """What was said of one choice."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[ev.TokenLogprob] = field(default_factory=list)
    finish_reason: ev.FinishReason = "stop"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)


class AnswerWriter(ABC):
    """Writes one request's answer: as a stream, mostly of server-sent events (`open`, `write`, `fail`), or as a whole
    (`take`, `whole`). Used by one thread, events in order."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, choices: int = 1) -> None:
        self.choices = [CollectedChoice() for _ in range(choices)]

    def open(self) -> bytes:
        """What goes out before the first event."""
        return b""

    @abstractmethod
    def write(self, event: ev.Event) -> bytes:
        """Any event but `Failed`; ``b""`` where the dialect says nothing."""

    @abstractmethod
    def fail(self, error: StartLLMError) -> bytes:
        """The last bytes of a stream that failed after it was opened."""

    def take(self, event: ev.Event) -> None:
        """Any event but `Done` and `Failed`."""
        if isinstance(event, ev.TextDelta):
            self.choices[event.choice].texts.append(event.text)
            self.choices[event.choice].logprobs.extend(event.logprobs)
        elif isinstance(event, ev.ReasoningDelta):
            self.choices[event.choice].thoughts.append(event.text)
        elif isinstance(event, ev.ToolCallFinished):
            self.choices[event.choice].calls.append(ToolCall(event.id, event.name, event.arguments))
        elif isinstance(event, ev.ChoiceDone):
            self.choices[event.choice].finish_reason = event.finish_reason

    @abstractmethod
    def whole(self, done: ev.Done) -> Mapping[str, object]:
        """The whole answer, in the shape that the dialect publishes."""


@dataclass(frozen=True, slots=True)
class Exchange(ABC):
    """A validated request with the two ways to answer it."""

    request: ChatRequest
    service: Service

    def token_text(self, token: int) -> str:
        return self.service.models.token_text(token, self.request.model)

    def begin(self) -> EventStream:
        """Submits it. Raises StartLLMError: it is refused."""
        return self.service.chat(self.request)

    def reply(self, events: Iterator[ev.Event]) -> Reply:
        """The whole answer. Of `events` `Done` is the last one, and none is `Failed`."""
        writer = self.writer()
        while not isinstance(event := next(events), ev.Done):
            writer.take(event)
        return Reply(sse.dumps(writer.whole(event)), headers={CACHE_HEADER: event.report.header()})

    @abstractmethod
    def writer(self) -> AnswerWriter: ...


class Task(EventStream):
    """A validated request whose answer is computed in steps and sent as a whole.

    It is its own `EventStream`: closed, it ends behind the step that is being computed.

    Args:
        request: as observers see it: its id, its kind and its model; no messages.
        work: computes; each part is a step. Raises StartLLMError.
        answer, tokens: of what it returns: the answer, and the tokens that were read.
    """

    def __init__(
        self,
        request: ChatRequest,
        work: Computation[Any],
        answer: Callable[[Any], Reply],
        tokens: Callable[[Any], int] = lambda result: 0,
    ) -> None:
        self.request = request
        self._result: Any = None
        self._answer, self._tokens = answer, tokens
        self._steps, self._closed = self._events(work), False

    def begin(self) -> EventStream:
        return self

    def reply(self, events: Iterator[ev.Event]) -> Reply:
        for _ in events:
            pass
        return self._answer(self._result)

    def __next__(self) -> ev.Event:
        if self._closed:
            self._steps.close()
            raise StopIteration
        return next(self._steps)

    def close(self) -> None:
        self._closed = True

    def last_report(self, patience: float) -> CacheReport | None:
        return None

    def _events(self, work: Computation[Any]) -> Generator[ev.Event]:
        self._result = yield from work
        # The counts of a report are of KV that is reused or not; here there is none, and shares must not be thinned.
        yield ev.Done(ev.Usage(prompt=self._tokens(self._result), completion=0, cached=0), CacheReport())


def logprobs_body(logprobs: Sequence[ev.TokenLogprob], token_text: TokenText) -> list[ChosenLogprobShape]:
    """Tokens with their probabilities, as OpenAI and Ollama write them."""

    def entry(token: int, logprob: float) -> TokenLogprobShape:
        text = token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    return [
        {**entry(item.token, item.logprob), "top_logprobs": [entry(token, value) for token, value in item.top]}
        for item in logprobs
    ]


def error_reply(error: StartLLMError, path: str) -> Reply:
    """The error in the dialect of `path`."""
    body, kind = error_body(error, style_of(path))
    return Reply(sse.dumps(body), error.status, kind, error_headers(error))
