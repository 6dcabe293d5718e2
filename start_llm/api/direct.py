"""A chat without HTTP, for a program that has the server in its own process.

It is read, run, counted and shown as a request to `/v1/chat/completions` is. It knows no sockets.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, Unpack, overload

from start_llm.api.handler import Edge, Observation
from start_llm.api.http import sse
from start_llm.api.http.access import visitor_of
from start_llm.api.http.routes import Request
from start_llm.api.openai.stream import ChatExchange
from start_llm.api.table import Dialects
from start_llm.core.errors import ClientGone
from start_llm.core.events import Done, Event, FinishReason, Usage
from start_llm.core.messages import ToolCall
from start_llm.core.report import CacheReport

ChatMessages = str | Sequence[Mapping[str, Any]]
"""A user's text, or messages as `/v1/chat/completions` takes them."""
_HEADERS = {"User-Agent": "library"}
_PATH = "/v1/chat/completions"


class ChatFields(TypedDict, total=False):
    """Fields of the body of `/v1/chat/completions`; their meaning and limits are the same."""

    model: str
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    response_format: Mapping[str, Any]
    max_tokens: int
    stop: str | Sequence[str]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    seed: int
    drafts: bool
    repetition_guard: bool
    user: str
    session_id: str
    adapter: str
    enable_thinking: bool
    reasoning_effort: Literal["minimal", "low", "medium", "high", "xhigh", "max"]
    chat_template_kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A whole answer."""

    id: str
    model: str  # the name of the model that answered
    text: str
    reasoning: str  # "" where the model did not think, or does not show it
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    usage: Usage
    report: CacheReport  # what was reused and computed, and why
    message: dict[str, Any]  # the assistant message: the next request has it behind this one's messages


class ChatAnswerStream:
    """Events of one answer, as they come. Used by one thread.

    The request begins with the first event that is asked for. `close` ends it early, and so does leaving a ``with``.
    """

    def __init__(self, exchange: ChatExchange, edge: Edge) -> None:
        self._exchange, self._writer = exchange, exchange.writer()
        self._done: Done | None = None
        self._events = _events(exchange, edge)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = next(self._events)
        if isinstance(event, Done):
            self._done = event
        else:
            self._writer.take(event)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._events.close()

    def answer(self) -> ChatAnswer:
        """The whole answer; reads what is left of it. Raises ClientGone where the stream was closed before its end."""
        for _ in self:
            pass
        if self._done is None:
            raise ClientGone("The stream was closed before the answer's end.")
        (choice,) = self._writer.choices
        return ChatAnswer(
            id=self._exchange.request.id,
            model=self._exchange.request.model,
            text=choice.text,
            reasoning=choice.reasoning,
            tool_calls=tuple(choice.calls),
            finish_reason=choice.finish_reason,
            usage=self._done.usage,
            report=self._done.report,
            message=dict(self._writer.whole(self._done)["choices"][0]["message"]),
        )


class DirectChat:
    """Asks the model. Any thread; the caller's thread does the work that an HTTP thread does for others."""

    def __init__(self, dialects: Dialects, edge: Edge, api_key: str | None) -> None:
        self._dialects, self._edge = dialects, edge
        self._visitor = visitor_of(_HEADERS, "127.0.0.1", api_key)

    @overload
    def __call__(
        self, messages: ChatMessages, *, stream: Literal[False] = False, **fields: Unpack[ChatFields]
    ) -> ChatAnswer: ...

    @overload
    def __call__(
        self, messages: ChatMessages, *, stream: Literal[True], **fields: Unpack[ChatFields]
    ) -> ChatAnswerStream: ...

    def __call__(
        self, messages: ChatMessages, *, stream: bool = False, **fields: Unpack[ChatFields]
    ) -> ChatAnswer | ChatAnswerStream:
        """A chat completion without HTTP. A stream begins nothing before its first event is asked for.

        Raises StartLLMError where a client would get an error; TypeError: no such field.
        """
        known = ChatFields.__annotations__
        if unknown := sorted(fields.keys() - known.keys()):
            raise TypeError(f"chat() takes no {unknown[0]!r}. It takes: {', '.join(sorted(known))}.")
        given = _messages_of(messages)
        try:
            body = sse.dumps({**fields, "messages": given, "stream": stream})
        except TypeError as error:
            raise TypeError(f"chat() takes what JSON can hold: {error}") from None
        inbound = Request("POST", _PATH, _HEADERS, body, received=time.monotonic(), visitor=self._visitor)
        answer = ChatAnswerStream(self._dialects.chat(inbound), self._edge)
        return answer if stream else answer.answer()


def _messages_of(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise TypeError(
            f"messages: a text, or a list of messages (each a dict), are allowed, but got {messages!r:.80}."
        )
    return list(map(dict, messages))


def _events(exchange: ChatExchange, edge: Edge) -> Generator[Event]:
    """The events of a whole request; the last one is `Done`. Raises StartLLMError: the request failed."""
    with Observation(exchange.request, edge, connection=None) as observation:
        for event in observation.begin(exchange):
            if isinstance(event, Done):
                observation.answered()
            yield event
