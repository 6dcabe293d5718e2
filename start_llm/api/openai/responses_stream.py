"""Responses, the way out: the event sequence of the API, and the whole response."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

from start_llm.api.common.dialect import AnswerWriter, Exchange, logprobs_body
from start_llm.api.common.shapes import ChosenLogprobShape
from start_llm.api.http import sse
from start_llm.api.openai import shapes
from start_llm.api.openai.responses_store import OwnResponses
from start_llm.api.openai.responses_tools import InputText, Named
from start_llm.core import events as ev
from start_llm.core.errors import StartLLMError, Unavailable
from start_llm.core.jsontext import object_in, parse_inner
from start_llm.core.protocol import SEAL, responses_code
from start_llm.core.report import CacheReport
from start_llm.files.database import FileUnavailable

Logprobs = list[ChosenLogprobShape]


@dataclass(frozen=True, slots=True)
class TextKind:
    """An item that holds text: events of its text, and of its one part."""

    prefix: str
    text_event: str
    part_event: str


MESSAGE = TextKind("msg", "response.output_text", "response.content_part")
REASONING = TextKind("rs", "response.reasoning_text", "response.content_part")
SUMMARY = TextKind("rs", "response.reasoning_summary_text", "response.reasoning_summary_part")
"""Reasoning, for a client that asked for a summary of it."""


@dataclass(frozen=True, slots=True)
class ResponsesExchange(Exchange):
    """A response that is being made."""

    echo: shapes.ResponseEchoShape
    items: list[Any]  # the whole input, that of earlier responses included
    thinking: TextKind  # how reasoning is shown, `REASONING` or `SUMMARY`; `sealed`: also as only this server reads it
    sealed: bool
    created: float  # unix seconds
    # where the response is kept, ``None`` if it is not; `must_store`: if that fails, so does the answer
    store: OwnResponses | None
    must_store: bool
    origin: Callable[[str], Named]  # the client's tool by the name that the model calls

    def writer(self) -> AnswerWriter:
        return ResponsesWriter(self)

    def found_items(self, searched: ev.Searched) -> Iterator[shapes.OutputFoundShape]:
        for call_id, names, _ in searched.results:
            yield {
                "type": "tool_search_output",
                "id": new_id("tso"),
                "call_id": call_id,
                "execution": "server",
                "status": "completed",
                "tools": [self.origin(name).listed() for name in names],
            }

    def finish(
        self, output: list[shapes.OutputItem], reason: ev.FinishReason, usage: ev.Usage, report: CacheReport
    ) -> shapes.ResponseShape:
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

    def response(self, status: shapes.ResponseStatus, output: list[shapes.OutputItem]) -> shapes.ResponseShape:
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
            **self.echo,
        }


@contextmanager
def telling(field: str) -> Iterator[None]:
    """What cannot be stored or read now is a 503, with the field that asks for it."""
    try:
        yield
    except FileUnavailable as error:
        raise Unavailable(f"{field}: {error}.", param=field, code="storage_unavailable") from error


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def usage_body(usage: ev.Usage, report: CacheReport) -> shapes.ResponseUsageShape:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
        "start_llm": report.as_dict(),
    }


def seal(reasoning: str) -> str:
    """``encrypted_content``: opaque to clients, and whole, since some send back nothing else."""
    return SEAL + base64.b64encode(reasoning.encode("utf-8", "replace")).decode("ascii")


def text_part(text: str, logprobs: Logprobs) -> shapes.OutputTextShape:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_part(kind: TextKind, text: str) -> shapes.ReasoningPartShape:
    return {"type": "summary_text" if kind is SUMMARY else "reasoning_text", "text": text}


def item_of(
    kind: TextKind, item_id: str, status: shapes.ItemStatus, text: str | None = None, logprobs: Any = ()
) -> shapes.OutputMessageShape | shapes.OutputReasoningShape:
    """`text`: ``None``: there is no part yet."""
    if kind is MESSAGE:
        content = [] if text is None else [text_part(text, logprobs)]
        return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}
    parts = [] if text is None else [reasoning_part(kind, text)]
    item: shapes.OutputReasoningShape = {"type": "reasoning", "id": item_id, "summary": [], "status": status}
    if kind is SUMMARY:
        item["summary"] = parts
    elif parts:
        item["content"] = parts
    return item


def call_status(arguments: str) -> shapes.ItemStatus:
    """A call that a limit cut has arguments that do not end."""
    try:
        parse_inner(arguments)
    except ValueError:
        return "incomplete"
    return "completed"


def call_item(item_id: str, call_id: str, tool: Named, written: str, status: shapes.ItemStatus) -> shapes.OutputItem:
    """A call as the client names its tool; `written` are the arguments, or a custom tool's text."""
    if tool.search:
        given = object_in(written) if written else {}
        return {
            "type": "tool_search_call",
            "id": item_id,
            "call_id": call_id,
            "execution": tool.search,
            "arguments": given,
            "status": status,
        }
    named: shapes.NamedCallShape = {"id": item_id, "call_id": call_id, "name": tool.name}
    if tool.namespace:
        named["namespace"] = tool.namespace
    if tool.custom:
        return {"type": "custom_tool_call", **named, "input": written, "status": status}
    return {"type": "function_call", **named, "arguments": written, "status": status}


class ResponsesWriter(AnswerWriter):
    """``response.created`` ... ``response.completed``: one item open at a time, events numbered from 0."""

    def __init__(self, exchange: ResponsesExchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._number = 0
        self._output: list[shapes.OutputItem] = []
        self._open: TextKind | None = None
        self._id = ""
        self._text: list[str] = []
        self._logprobs: Logprobs = []
        self._reason: ev.FinishReason = "stop"
        self._tool = Named("")
        self._input = InputText()

    def open(self) -> bytes:
        body = self._exchange.response("in_progress", [])
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def write(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.ReasoningDelta):
            return self._text_delta(self._exchange.thinking, event.text)
        if isinstance(event, ev.TextDelta):
            return self._text_delta(MESSAGE, event.text, logprobs_body(event.logprobs, self._exchange.token_text))
        if isinstance(event, ev.ToolCallStarted):
            return self._begin_call(event)
        if isinstance(event, ev.ToolCallDelta):
            return self._call_delta(event.arguments)
        if isinstance(event, ev.ToolCallFinished):
            return self._end_call(event)
        if isinstance(event, ev.Searched):
            items = self._exchange.found_items(event)
            return self._end() + b"".join(self._added(None, item) + self._finished(item) for item in items)
        if isinstance(event, ev.ChoiceDone):
            self._reason = event.finish_reason
            return self._end()
        if isinstance(event, ev.Progress):
            return sse.ping(event.done, event.total)
        if isinstance(event, ev.Done):
            return self._done(event)
        return b""

    def take(self, event: ev.Event) -> None:
        self.write(event)

    def whole(self, done: ev.Done) -> shapes.ResponseShape:
        self._end()
        return self._exchange.finish(self._output, self._reason, done.usage, done.report)

    def fail(self, error: StartLLMError) -> bytes:
        """Some clients know ``response.failed``, others ``error``: the first is the API's for a failed answer."""
        body = self._exchange.response("failed", self._output)
        body["error"] = {"code": responses_code(error.type, error.code), "message": error.message}
        return self._event("response.failed", response=body)

    # --- events ---

    def _event(self, kind: str, **fields: Unpack[shapes.ResponseEventFields]) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse.event(kind, data)

    def _item_event(self, kind: str, **fields: Unpack[shapes.ResponseEventFields]) -> bytes:
        fields["item_id"], fields["output_index"] = self._id, len(self._output)
        return self._event(kind, **fields)

    def _added(self, kind: TextKind | None, item: shapes.OutputItem) -> bytes:
        self._open = kind
        self._text, self._logprobs = [], []
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _finished(self, item: shapes.OutputItem) -> bytes:
        data = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return data

    # --- items ---

    def _text_delta(self, kind: TextKind, text: str, logprobs: Sequence[ChosenLogprobShape] = ()) -> bytes:
        """The next text of an item of this kind, which is opened unless it is open."""
        if kind is MESSAGE and not text:
            return b""
        head = b""
        if self._open is not kind:
            head, self._id = self._end(), new_id(kind.prefix)
            head += self._added(kind, item_of(kind, self._id, "in_progress"))
            head += self._part_event("added", "", [])
        self._text.append(text)
        self._logprobs += logprobs
        return head + self._text_event(f"{kind.text_event}.delta", logprobs=logprobs, delta=text)

    def _part_event(self, what: str, text: str, logprobs: Logprobs) -> bytes:
        kind = self._open
        assert kind is not None
        part = text_part(text, logprobs) if kind is MESSAGE else reasoning_part(kind, text)
        return self._text_event(f"{kind.part_event}.{what}", part=part)

    def _text_event(self, kind: str, **fields: Unpack[shapes.ResponseEventFields]) -> bytes:
        if self._open is not MESSAGE:
            fields.pop("logprobs", None)
        fields["summary_index" if self._open is SUMMARY else "content_index"] = 0
        return self._item_event(kind, **fields)

    def _end(self) -> bytes:
        """Closes the open reasoning or message item; calls are closed by their own event."""
        kind, text = self._open, "".join(self._text)
        if kind is None:
            return b""
        head = self._text_event(f"{kind.text_event}.done", logprobs=self._logprobs, text=text)
        head += self._part_event("done", text, self._logprobs)
        item = item_of(kind, self._id, "completed", text, self._logprobs)
        if item["type"] == "reasoning" and self._exchange.sealed:
            item["encrypted_content"] = seal(text)
        return head + self._finished(item)

    def _begin_call(self, event: ev.ToolCallStarted) -> bytes:
        head = self._end()
        self._tool, self._input = self._exchange.origin(event.name), InputText()
        self._id = new_id("ctc" if self._tool.custom else "tsc" if self._tool.search else "fc")
        return head + self._added(None, call_item(self._id, event.id, self._tool, "", "in_progress"))

    def _call_delta(self, arguments: str) -> bytes:
        if self._tool.search:
            return b""
        if not self._tool.custom:
            return self._item_event("response.function_call_arguments.delta", delta=arguments)
        return self._input_delta(self._input.feed(arguments))

    def _input_delta(self, text: str) -> bytes:
        return self._item_event("response.custom_tool_call_input.delta", delta=text) if text else b""

    def _end_call(self, event: ev.ToolCallFinished) -> bytes:
        if self._tool.custom:
            head = self._input_delta(self._input.finish(event.arguments))
            written = self._input.text
            head += self._item_event("response.custom_tool_call_input.done", input=written)
        elif self._tool.search:
            written, head = event.arguments, b""
        else:
            written = event.arguments
            head = self._item_event("response.function_call_arguments.done", name=self._tool.name, arguments=written)
        return head + self._finished(call_item(self._id, event.id, self._tool, written, call_status(event.arguments)))

    def _done(self, event: ev.Done) -> bytes:
        head, body = self._end(), self.whole(event)
        return head + self._event(f"response.{body['status']}", response=body)
