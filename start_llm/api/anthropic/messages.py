"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, the way in and the way out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from start_llm.api.anthropic import context, shapes
from start_llm.api.anthropic.tools import choice_of, references, tools_of
from start_llm.api.common import fields, parts
from start_llm.api.common.dialect import AnswerWriter, Exchange
from start_llm.api.common.documents import pdf_text
from start_llm.api.common.request import read_alike, stop_of
from start_llm.api.common.tools import response_format_of
from start_llm.api.http import sse
from start_llm.api.http.routes import Request
from start_llm.core import events as ev
from start_llm.core.errors import NotSupported, StartLLMError
from start_llm.core.jsontext import object_in
from start_llm.core.messages import Message, ToolCall
from start_llm.core.protocol import anthropic_error, thinking_signature
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest, ResponseFormat, found_text
from start_llm.core.service import Service
from start_llm.core.settings import Settings

log = logging.getLogger(__name__)

REDACTED = "[redacted thinking]"
REFUSED = {
    "mcp_servers": "MCP servers are called by the client, not by this server; send their tools.",
    "container": "this server runs no containers and no skills; leave it out.",
}
SILENT = frozenset({"fallback", "mcp_tool_listing"})  # these tell of the vendor's server, not of the conversation
SERVER_CALL = "srvtoolu_"  # in front of the id of a call that the server runs, see `ToolSearch`
CHANGED_TOOLS = {"tool_addition": "Tool now available", "tool_removal": "Tool no longer available"}


class MessageIn(fields.BodyModel):
    role: str
    content: Any


class OutputConfig(fields.BodyModel):
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(fields.SamplingBody):
    messages: Annotated[list[MessageIn], Field(min_length=1), FailFast()]
    system: Any = None
    max_tokens: fields.Tokens | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Any = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


def read_messages(inbound: Request, settings: Settings, service: Service) -> MessagesExchange:
    """Raises BadRequest, NotSupported."""
    body, data = fields.parse_body(MessagesBody, inbound.body)
    fields.refuse(data, REFUSED)
    chosen = (body.tool_choice or {}).get("name")
    tools, search = tools_of(body.tools or [], [message.content for message in body.messages], chosen)
    choice, parallel = choice_of(body.tool_choice, tools)
    request = ChatRequest(
        **read_alike("messages", body, data, inbound, settings),
        messages=(*_system(body.system), *messages_of(body.messages)),
        tools=tools,
        search=search,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_format(body),
        max_tokens=body.max_tokens,
        stop=stop_of(body.stop_sequences, "stop_sequences"),
    )
    effort = request.reasoning_effort or (body.output_config.effort if body.output_config else None)
    # In this API silence means no thinking: clients that do not ask expect text in the first block.
    request = replace(request, thinking=bool(request.thinking), reasoning_effort=effort)
    return MessagesExchange(request, service, context.edits_of(body.context_management))


def _system(system: Any) -> tuple[Message, ...]:
    if system is None or system == [] or system == "":
        return ()
    return (_blocks_content(system, "system").message("system"),)


def _format(body: MessagesBody) -> ResponseFormat:
    if body.output_config is not None and body.output_config.format is not None:
        return response_format_of(body.output_config.format, "output_config.format")
    return response_format_of(body.output_format, "output_format")


# --- messages ---


def messages_of(messages: list[MessageIn]) -> tuple[Message, ...]:
    """The conversation in its order. Results of tools become messages of their own, before the text beside them."""
    result: list[Message] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if message.role == "user":
            result.extend(_user(message.content, path))
        elif message.role == "assistant":
            if _summary(message.content) is not None:
                result.clear()  # as this API says: what stands before a compaction is not shown any more
            result.extend(_assistant(message.content, path))
        elif message.role == "system":
            result.append(_blocks_content(message.content, path).message("system"))
        else:
            raise fields.bad(f"messages[{index}].role", "user, assistant or system", message.role)
    return tuple(result)


def _user(content: Any, path: str) -> list[Message]:
    if isinstance(content, str):
        return [Message("user", content)]
    results: list[Message] = []
    contents: list[parts.PartContent] = []
    for where, kind, block in _blocks(content, path):
        if kind == "tool_result":
            results.append(_tool_result(block, where))
        else:
            contents.append(_block_content(kind, block, where))
    if contents or not results:
        results.append(parts.join_content(contents).message("user"))
    return results


def _tool_result(block: dict[str, Any], path: str) -> Message:
    is_error = fields.optional_in(block, "is_error", bool, path)
    content = block.get("content")
    said = parts.PartContent() if content is None else _blocks_content(content, f"{path}.content")
    call_id = fields.string_in(block, "tool_use_id", path)
    return said.message("tool", tool_call_id=call_id, is_error=bool(is_error))


def _summary(content: Any) -> str | None:
    """What a compaction block says of the conversation before it."""
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    said = [block.get("content") for block in blocks if block.get("type") == "compaction"]
    return next((text for text in reversed(said) if isinstance(text, str) and text), None)


def _assistant(content: Any, path: str) -> list[Message]:
    if isinstance(content, str):
        return [Message("assistant", content)]
    result: list[Message] = []
    turn = parts.Turn()
    for where, kind, block in _blocks(content, path):
        if kind == "thinking":
            turn.thoughts.append(fields.string_in(block, "thinking", where))
        elif kind == "redacted_thinking":
            turn.thoughts.append(REDACTED)
        elif kind in ("tool_use", "server_tool_use", "mcp_tool_use"):
            turn.calls.append(_tool_use(block, where))
        elif kind.endswith("_tool_result"):
            result += [*turn.messages(), _result_elsewhere(block, where)]
            turn = parts.Turn()
        elif kind == "compaction":
            turn = parts.Turn()
            result = [Message("user", text) for text in [_summary([block])] if text]
        elif kind not in SILENT:
            turn.contents.append(_block_content(kind, block, where))
    return result + (turn.messages() or ([] if result else [turn.message()]))


def _result_elsewhere(block: dict[str, Any], path: str) -> Message:
    """What a tool of another server gave: its call stands in the same message."""
    content = block.get("content")
    blocks = content if isinstance(content, list) else []
    if block["type"] == "tool_search_tool_result":
        wrong = content.get("error_message") or content.get("error_code") if isinstance(content, dict) else None
        text = found_text(references([content]), wrong if isinstance(wrong, str) else "")
    elif isinstance(content, str) or (blocks and all(isinstance(b, dict) and b.get("type") == "text" for b in blocks)):
        text = parts.only_text(_blocks_content(content, f"{path}.content"))
    else:
        text = parts.as_text(content) if content else ""
    call_id = fields.string_in(block, "tool_use_id", path).removeprefix(SERVER_CALL)
    return Message("tool", text or parts.NO_RESULT, tool_call_id=call_id)


def _tool_use(block: dict[str, Any], path: str) -> ToolCall:
    arguments = json.dumps(fields.optional_in(block, "input", dict, path) or {}, ensure_ascii=False)
    name, server = fields.string_in(block, "name", path), fields.optional_in(block, "server_name", str, path)
    call_id = fields.string_in(block, "id", path).removeprefix(SERVER_CALL)
    return ToolCall(call_id, f"{server}__{name}" if server else name, arguments)


# --- blocks ---


def _blocks(content: Any, path: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(path, type, block) of every block."""
    for where, block in fields.items_of(content, path, "a string or a list of content blocks"):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise fields.bad(where, "an object with a type", block)
        yield where, block["type"], block


def _blocks_content(content: Any, path: str) -> parts.PartContent:
    if isinstance(content, str):
        return parts.PartContent(content)
    return parts.join_content([_block_content(kind, block, where) for where, kind, block in _blocks(content, path)])


def _block_content(kind: str, block: dict[str, Any], path: str) -> parts.PartContent:
    """What a block says; `cache_control` is never looked at."""
    if kind == "text":
        return parts.PartContent(fields.string_in(block, "text", path))
    if kind in parts.IMAGE_TYPES:
        return parts.PartContent(attachments=(parts.attachment_of(block, path),))
    if kind == "document":
        return _document(block, path)
    if kind == "search_result":
        head = [fields.string_in(block, "title", path), fields.string_in(block, "source", path)]
        found = parts.only_text(_blocks_content(block.get("content"), f"{path}.content"))
        return parts.PartContent("\n".join([*head, found]))
    if kind == "tool_reference":
        return parts.PartContent(f"Tool now available: {fields.string_in(block, 'tool_name', path)}")
    if kind == "browser_state":  # of a browser that the client drives
        return parts.PartContent(parts.as_text({"tabs": block.get("tabs")}))
    if kind in CHANGED_TOOLS:
        tool = fields.object_of(block.get("tool"), f"{path}.tool")
        name = tool.get("tool_name") or tool.get("name") or tool.get("mcp_server_name")
        return parts.PartContent(f"{CHANGED_TOOLS[kind]}: {name}")
    raise parts.unusable(kind, path)


def _document(block: dict[str, Any], path: str) -> parts.PartContent:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    is_pdf = isinstance(source, dict) and kind == "base64" and source.get("media_type") == "application/pdf"
    if not isinstance(source, dict) or not (is_pdf or kind in ("text", "content")):
        instead = parts.OTHER_MEDIA["document"]
        what = f"documents of type {fields.short(kind)} are not supported"
        raise NotSupported(f"{path}.source: {what}; {instead}.", param=path)
    if kind == "content":
        said = _blocks_content(source.get("content"), f"{path}.source.content")
    else:
        data = fields.string_in(source, "data", f"{path}.source")
        said = parts.PartContent(pdf_text(data, block.get("title"), f"{path}.source.data") if is_pdf else data)
    about = [block[name] for name in ("title", "context") if isinstance(block.get(name), str) and block[name]]
    return parts.join_content([*(parts.PartContent(text) for text in about), said])


# --- the way out: the event sequence of the API, and the whole message ---


_STOPS: dict[ev.FinishReason, shapes.StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "cancelled": "max_tokens",
}


def stop_body(reason: ev.FinishReason, stop_sequence: str | None) -> shapes.StopShape:
    stopped = _STOPS[reason] if stop_sequence is None else "stop_sequence"
    return {"stop_reason": stopped, "stop_sequence": stop_sequence}


def counts(prompt: int, cached: int, answer: int, scale: float) -> shapes.StartUsageShape:
    """The first three add up to the prompt. All that is computed is kept, so nothing counts as written."""
    total, read = scaled(prompt, scale), scaled(cached, scale)
    return {
        "input_tokens": max(0, total - read),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": read,
        "output_tokens": scaled(answer, scale),
    }


def scaled(tokens: int, scale: float) -> int:
    return round(tokens * scale)


def usage_body(usage: ev.Usage, report: CacheReport, scale: float) -> shapes.MessageUsageShape:
    return {
        **counts(usage.prompt, usage.cached, usage.completion, scale),
        "output_tokens_details": {"thinking_tokens": scaled(usage.reasoning, scale)},
        "start_llm": report.as_dict(),
    }


@dataclass(frozen=True, slots=True)
class MessagesExchange(Exchange):
    """A message that is being answered.

    Attributes:
        edits: what the client asks to be cleared; `edited` does it.
        applied: what was cleared, as the answer says it; None where nothing was asked.
    """

    edits: tuple[context.Edit, ...] = ()
    applied: tuple[shapes.AppliedEditShape, ...] | None = None

    def edited(self) -> MessagesExchange:
        """With the conversation as its model shall see it. Waits for the model where tokens must be counted."""
        if not self.edits:
            return self
        messages, applied = context.apply(self.request.messages, self.edits, self.tokens)
        return replace(self, request=replace(self.request, messages=messages), applied=tuple(applied))

    def tokens(self, messages: tuple[Message, ...] | None = None) -> int:
        """Of the prompt that these messages make, or the request's own, as the client is told them."""
        request = self.request if messages is None else replace(self.request, messages=messages)
        return scaled(self.service.count_tokens(request), self.scale())

    def edits_made(self) -> shapes.EditsMadeShape:
        return {} if self.applied is None else {"context_management": {"applied_edits": list(self.applied)}}

    def scale(self) -> float:
        """What every count that the client is told is multiplied by; known once the model is loaded."""
        return self.service.models.card(self.request.model).context_scale

    def head(self, content: list[shapes.ContentBlock]) -> shapes.MessageHeadShape:
        model = self.request.model
        return {"id": self.request.id, "type": "message", "role": "assistant", "model": model, "content": content}

    def writer(self) -> AnswerWriter:
        return MessageWriter(self)

    def call_block(self, call_id: str, name: str, given: dict[str, Any]) -> shapes.ToolUseShape:
        """A call of the client's tool, or of one that this server runs."""
        if self.request.search is not None and name in self.request.search.fields:
            return {"type": "server_tool_use", "id": SERVER_CALL + call_id, "name": name, "input": given}
        return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def _result_blocks(searched: ev.Searched) -> Iterator[shapes.SearchResultShape]:
    for call_id, names, wrong in searched.results:
        content: shapes.FoundShape | shapes.NotFoundShape = {
            "type": "tool_search_tool_search_result",
            "tool_references": [{"type": "tool_reference", "tool_name": name} for name in names],
        }
        if wrong:
            code: Literal["invalid_tool_input"] = "invalid_tool_input"
            content = {"type": "tool_search_tool_result_error", "error_code": code, "error_message": wrong}
        yield {"type": "tool_search_tool_result", "tool_use_id": SERVER_CALL + call_id, "content": content}


class MessageWriter(AnswerWriter):
    """``message_start`` ... ``message_stop``: one content block open at a time, blocks counted from 0.

    Before ``message_start`` signs of life are comments, since clients take no event before it.
    """

    def __init__(self, exchange: MessagesExchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._started = self._is_open = False
        self._blocks: list[shapes.ContentBlock] = []  # the last one without its text, as long as it is open
        self._text: list[str] = []
        self._stop = stop_body("stop", None)

    def write(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.Started):
            return self._start(event.report)
        if isinstance(event, ev.Progress):
            return _event({"type": "ping"}) if self._started else sse.ping(event.done, event.total)
        if isinstance(event, ev.Done):
            return self._end(event)
        if isinstance(event, ev.ChoiceDone):
            self._stop = stop_body(event.finish_reason, event.stop_sequence)
            return self._close_block()
        return self._content(event)

    def fail(self, error: StartLLMError) -> bytes:
        return sse.event("error", anthropic_error(error))

    def take(self, event: ev.Event) -> None:
        self.write(event)

    def whole(self, done: ev.Done) -> shapes.MessageShape:
        self._close_block()
        usage = usage_body(done.usage, done.report, self._exchange.scale())
        return {**self._exchange.head(self._blocks), **self._stop, "usage": usage, **self._exchange.edits_made()}

    def _content(self, event: ev.Event) -> bytes:
        if isinstance(event, ev.ReasoningDelta | ev.TextDelta) and not event.text:
            return b""
        if isinstance(event, ev.ReasoningDelta):
            head = self._block({"type": "thinking", "thinking": "", "signature": ""})
            self._text.append(event.text)
            return head + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, ev.TextDelta):
            head = self._block({"type": "text", "text": ""})
            self._text.append(event.text)
            return head + self._delta({"type": "text_delta", "text": event.text})
        if isinstance(event, ev.ToolCallStarted):
            closed = self._close_block()
            return closed + self._block(self._exchange.call_block(event.id, event.name, {}))
        if isinstance(event, ev.ToolCallDelta):
            return self._delta({"type": "input_json_delta", "partial_json": event.arguments})
        if isinstance(event, ev.ToolCallFinished):
            self._blocks[-1] = self._exchange.call_block(event.id, event.name, object_in(event.arguments))
            return self._close_block()
        if isinstance(event, ev.Searched):
            whole = (self._block(block) + self._close_block() for block in _result_blocks(event))
            return self._close_block() + b"".join(whole)
        return b""

    def _start(self, report: CacheReport) -> bytes:
        if self._started:
            return b""
        self._started = True
        begun: shapes.BegunMessageShape = {
            **self._exchange.head([]),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts(report.prompt, report.reused, 0, self._exchange.scale()),
        }
        return _event({"type": "message_start", "message": begun})

    def _block(self, block: shapes.ContentBlock) -> bytes:
        """Opens a block of this kind unless one is open."""
        if self._is_open and self._blocks[-1]["type"] == block["type"]:
            return b""
        head = self._start(CacheReport()) + self._close_block()
        self._is_open = True
        self._blocks.append(block)
        return head + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: shapes.BlockDelta) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _close_block(self) -> bytes:
        if not self._is_open:
            return b""
        block, text, last = self._blocks[-1], "".join(self._text), b""
        if block["type"] == "thinking":
            block["thinking"], block["signature"] = text, thinking_signature(text)
            last = self._delta({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "text":
            block["text"] = text
        self._is_open, self._text = False, []
        return last + _event({"type": "content_block_stop", "index": self._index})

    def _end(self, done: ev.Done) -> bytes:
        head = self._start(done.report) + self._close_block()
        usage = usage_body(done.usage, done.report, self._exchange.scale())
        edits = self._exchange.edits_made()
        delta = _event({"type": "message_delta", "delta": self._stop, "usage": usage, **edits})
        return head + delta + _event({"type": "message_stop"})


def _event(event: shapes.MessageEvent) -> bytes:
    return sse.event(event["type"], event)
