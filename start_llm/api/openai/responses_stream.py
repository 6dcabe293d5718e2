"""Responses, the way out: the event sequence of the API, and the whole response."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from start_llm.api.common.collect import Collected
from start_llm.api.common.dialect import Exchange, StreamWriter
from start_llm.api.http import sse
from start_llm.api.openai.responses_custom import InputText, input_of
from start_llm.api.openai.responses_items import seal
from start_llm.api.openai.responses_store import OwnResponses
from start_llm.api.openai.responses_tools import Named
from start_llm.api.openai.stream import logprobs_body
from start_llm.core.errors import StartLLMError, Unavailable
from start_llm.core.events import (
    ChoiceDone,
    Done,
    Event,
    FinishReason,
    Progress,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Usage,
)
from start_llm.core.jsontext import parse_inner
from start_llm.core.protocol import responses_code
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.files.database import FileUnavailable

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """How reasoning is shown: as a summary if the client asked for one, and sealed beside it."""

    summary: bool = False
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class ResponsesExchange(Exchange):
    """A response that is being made.

    Attributes:
        echo: the fields that repeat the request.
        items: the whole input, that of earlier responses included.
        created: unix seconds.
        store: where the response is kept, ``None`` if it is not.
        must_store: the client asked for that; if it fails, so does the answer.
        origin: the client's tool by the name that the model calls.
    """

    request: ChatRequest
    echo: dict[str, Any]
    items: list[Any]
    style: Style
    created: float
    token_text: Callable[[int], str]
    store: OwnResponses | None
    must_store: bool
    origin: Callable[[str], Named]

    def body(self, result: Collected) -> dict[str, Any]:
        choice = result.choices[0]
        output: list[Item] = []
        if choice.reasoning:
            output.append(reasoning_item(new_id("rs"), choice.reasoning, self.style))
        if choice.text:
            output.append(message_item(new_id("msg"), choice.text, self.logprobs(choice.logprobs)))
        for call in choice.calls:
            tool = self.origin(call.name)
            written = input_of(call.arguments) if tool.custom else call.arguments
            output.append(call_item(new_call_id(tool), call.id, tool, written, call_status(call.arguments)))
        return self.finish(output, choice.finish_reason, result.usage, result.report)

    def writer(self) -> StreamWriter:
        return ResponsesWriter(self)

    def logprobs(self, items: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return logprobs_body(items, self.token_text)

    def finish(self, output: list[Item], reason: FinishReason, usage: Usage, report: CacheReport) -> dict[str, Any]:
        """The final object; kept if it is to be kept. Raises Unavailable if it has to be and cannot."""
        cut = reason in {"length", "cancelled"}
        body = self.response("incomplete" if cut else "completed", output)
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        body["usage"] = usage_body(usage, report)
        if self.store is not None:
            try:
                with telling("store"):
                    self.store.put(body, self.items)
            except Unavailable:
                if self.must_store:
                    raise
                body["store"] = False
        return body

    def response(self, status: str, output: list[Item]) -> dict[str, Any]:
        return {
            "id": self.request.id,
            "object": "response",
            "created_at": int(self.created),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.request.model,
            "output": output,
            "usage": None,
        } | self.echo


@contextmanager
def telling(field: str) -> Iterator[None]:
    """What cannot be stored or read now is told to the client as 503, with the field that asks for it."""
    try:
        yield
    except FileUnavailable as error:
        raise Unavailable(f"{field}: {error}.", param=field, code="storage_unavailable") from error


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def usage_body(usage: Usage, report: CacheReport) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
        "start_llm": report.as_dict(),
    }


def reasoning_item(item_id: str, text: str, style: Style) -> Item:
    item: Item = {"type": "reasoning", "id": item_id, "summary": [], "status": "completed"}
    if style.summary:
        item["summary"] = [{"type": "summary_text", "text": text}]
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    if style.sealed:
        item["encrypted_content"] = seal(text)
    return item


def text_part(text: str, logprobs: list[dict[str, Any]]) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(item_id: str, text: str, logprobs: list[dict[str, Any]]) -> Item:
    content = [text_part(text, logprobs)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": "completed", "content": content}


def new_call_id(tool: Named) -> str:
    return new_id("ctc" if tool.custom else "fc")


def call_status(arguments: str) -> str:
    """A call that a limit cut has arguments that do not end."""
    try:
        parse_inner(arguments)
    except ValueError:
        return "incomplete"
    return "completed"


def call_item(item_id: str, call_id: str, tool: Named, written: str, status: str) -> Item:
    """A call as the client names its tool; `written` are the arguments, or a custom tool's text."""
    item: Item = {"type": "function_call", "id": item_id, "call_id": call_id, "name": tool.name}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if tool.custom:
        return item | {"type": "custom_tool_call", "input": written, "status": status}
    return item | {"arguments": written, "status": status}


class ResponsesWriter:
    """``response.created`` ... ``response.completed``: one item open at a time, events numbered from 0."""

    def __init__(self, exchange: ResponsesExchange) -> None:
        self._exchange = exchange
        self._summary = exchange.style.summary
        self._number = 0
        self._output: list[Item] = []
        self._open: str | None = None
        self._id = ""
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._reason: FinishReason = "stop"
        self._tool = Named("")
        self._input = InputText()

    def open(self) -> bytes:
        body = self._exchange.response("in_progress", [])
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def write(self, event: Event) -> bytes:
        if isinstance(event, ReasoningDelta):
            return self._begin("reasoning") + self._reasoning_delta(event.text)
        if isinstance(event, TextDelta):
            return self._text_delta(event)
        if isinstance(event, ToolCallStarted):
            return self._begin_call(event)
        if isinstance(event, ToolCallDelta):
            return self._call_delta(event.arguments)
        if isinstance(event, ToolCallFinished):
            return self._end_call(event)
        if isinstance(event, ChoiceDone):
            self._reason = event.finish_reason
            return self._end()
        if isinstance(event, Progress):
            return sse.ping(event.done, event.total)
        if isinstance(event, Done):
            return self._done(event)
        return b""

    def fail(self, error: StartLLMError) -> bytes:
        """Some clients know ``response.failed``, others ``error``: the first is the API's for a failed answer."""
        body = self._exchange.response("failed", self._output)
        body["error"] = {"code": responses_code(error.type, error.code), "message": error.message}
        return self._event("response.failed", response=body)

    # --- events ---

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return sse.event(kind, data)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._id, output_index=len(self._output), **fields)

    def _added(self, kind: str, item: Item) -> bytes:
        self._open = kind
        self._text = []
        self._logprobs = []
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _finished(self, item: Item) -> bytes:
        data = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return data

    # --- items ---

    def _begin(self, kind: str) -> bytes:
        """Opens a reasoning or message item unless one is open."""
        if self._open == kind:
            return b""
        head = self._end()
        if kind == "reasoning":
            self._id = new_id("rs")
            item: Item = {"type": "reasoning", "id": self._id, "summary": [], "status": "in_progress"}
            head += self._added(kind, item)
            if self._summary:
                part = {"type": "summary_text", "text": ""}
                return head + self._item_event("response.reasoning_summary_part.added", summary_index=0, part=part)
            part = {"type": "reasoning_text", "text": ""}
            return head + self._item_event("response.content_part.added", content_index=0, part=part)
        self._id = new_id("msg")
        item = {"type": "message", "id": self._id, "role": "assistant", "status": "in_progress", "content": []}
        head += self._added(kind, item)
        return head + self._item_event("response.content_part.added", content_index=0, part=text_part("", []))

    def _reasoning_delta(self, text: str) -> bytes:
        self._text.append(text)
        if self._summary:
            return self._item_event("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        return self._item_event("response.reasoning_text.delta", content_index=0, delta=text)

    def _text_delta(self, event: TextDelta) -> bytes:
        if not event.text:
            return b""
        head = self._begin("message")
        logprobs = self._exchange.logprobs(event.logprobs)
        self._text.append(event.text)
        self._logprobs += logprobs
        return head + self._item_event(
            "response.output_text.delta", content_index=0, delta=event.text, logprobs=logprobs
        )

    def _end(self) -> bytes:
        """Closes the open reasoning or message item; calls are closed by their own event."""
        text = "".join(self._text)
        if self._open == "reasoning":
            return self._end_reasoning(text)
        if self._open == "message":
            part = text_part(text, self._logprobs)
            return (
                self._item_event("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
                + self._item_event("response.content_part.done", content_index=0, part=part)
                + self._finished(message_item(self._id, text, self._logprobs))
            )
        return b""

    def _end_reasoning(self, text: str) -> bytes:
        if self._summary:
            part = {"type": "summary_text", "text": text}
            data = self._item_event("response.reasoning_summary_text.done", summary_index=0, text=text)
            data += self._item_event("response.reasoning_summary_part.done", summary_index=0, part=part)
        else:
            part = {"type": "reasoning_text", "text": text}
            data = self._item_event("response.reasoning_text.done", content_index=0, text=text)
            data += self._item_event("response.content_part.done", content_index=0, part=part)
        return data + self._finished(reasoning_item(self._id, text, self._exchange.style))

    def _begin_call(self, event: ToolCallStarted) -> bytes:
        head = self._end()
        self._tool, self._input = self._exchange.origin(event.name), InputText()
        self._id = new_call_id(self._tool)
        return head + self._added("call", call_item(self._id, event.id, self._tool, "", "in_progress"))

    def _call_delta(self, arguments: str) -> bytes:
        if not self._tool.custom:
            return self._item_event("response.function_call_arguments.delta", delta=arguments)
        return self._input_delta(self._input.feed(arguments))

    def _input_delta(self, text: str) -> bytes:
        return self._item_event("response.custom_tool_call_input.delta", delta=text) if text else b""

    def _end_call(self, event: ToolCallFinished) -> bytes:
        if self._tool.custom:
            head = self._input_delta(self._input.finish(event.arguments))
            written = self._input.text
            head += self._item_event("response.custom_tool_call_input.done", input=written)
        else:
            written = event.arguments
            head = self._item_event("response.function_call_arguments.done", name=self._tool.name, arguments=written)
        return head + self._finished(call_item(self._id, event.id, self._tool, written, call_status(event.arguments)))

    def _done(self, event: Done) -> bytes:
        head = self._end()
        body = self._exchange.finish(self._output, self._reason, event.usage, event.report)
        return head + self._event(f"response.{body['status']}", response=body)
