"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, the way in. The way out is `anthropic_stream`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

from pydantic import FailFast, Field

from start_llm.api.anthropic.stream import MessagesExchange
from start_llm.api.common import fields, parts
from start_llm.api.common.request import request_of, stop_of
from start_llm.api.common.tools import check_unique, function_of, response_format_of
from start_llm.api.http.routes import Request
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.request import ResponseFormat, ToolChoice
from start_llm.core.service import Service
from start_llm.core.settings import Settings

log = logging.getLogger(__name__)

REDACTED = "[redacted thinking]"
CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


class MessageIn(fields.BodyModel):
    role: str
    content: Any


class OutputConfig(fields.BodyModel):
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(fields.SamplingBody):
    model: fields.ModelName | None = None
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


def read_messages(inbound: Request, settings: Settings, service: Service) -> MessagesExchange:
    """Raises BadRequest, NotSupported."""
    body, data = fields.parse_body(MessagesBody, inbound.body)
    tools = _tools(body.tools or [])
    choice, parallel = _choice(body.tool_choice, tools)
    request = request_of(
        *("messages", body, data, inbound, settings),
        messages=(*_system(body.system), *messages_of(body.messages)),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_format(body),
        max_tokens=body.max_tokens,
        stop=stop_of(body.stop_sequences, "stop_sequences"),
    )
    effort = request.reasoning_effort or (body.output_config.effort if body.output_config else None)
    # In this API silence means no thinking: clients that do not ask expect text in the first block.
    return MessagesExchange(replace(request, thinking=bool(request.thinking), reasoning_effort=effort), service)


def _system(system: Any) -> tuple[Message, ...]:
    if system is None or system == [] or system == "":
        return ()
    content = _blocks_content(system, "system")
    return (Message("system", content.text, attachments=content.attachments),)


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
            result.append(_assistant(message.content, path))
        elif message.role == "system":
            content = _blocks_content(message.content, path)
            result.append(Message("system", content.text, attachments=content.attachments))
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
        said = parts.join_content(contents)
        results.append(Message("user", said.text, attachments=said.attachments))
    return results


def _tool_result(block: dict[str, Any], path: str) -> Message:
    is_error = fields.optional_in(block, "is_error", bool, path)
    content = block.get("content")
    said = parts.PartContent() if content is None else _blocks_content(content, f"{path}.content")
    call_id = fields.string_in(block, "tool_use_id", path)
    return Message("tool", said.text, tool_call_id=call_id, is_error=bool(is_error), attachments=said.attachments)


def _assistant(content: Any, path: str) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    contents: list[parts.PartContent] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for where, kind, block in _blocks(content, path):
        if kind == "thinking":
            thoughts.append(fields.string_in(block, "thinking", where))
        elif kind == "redacted_thinking":
            thoughts.append(REDACTED)
        elif kind == "tool_use":
            calls.append(_tool_use(block, where))
        else:
            contents.append(_block_content(kind, block, where))
    reasoning = parts.join_text(thought for thought in thoughts if thought) or None
    said = parts.join_content(contents)
    return Message("assistant", said.text, reasoning=reasoning, tool_calls=tuple(calls), attachments=said.attachments)


def _tool_use(block: dict[str, Any], path: str) -> ToolCall:
    arguments = json.dumps(fields.optional_in(block, "input", dict, path) or {}, ensure_ascii=False)
    return ToolCall(fields.string_in(block, "id", path), fields.string_in(block, "name", path), arguments)


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
        return parts.PartContent(parts.join_text([*head, found]))
    if kind == "tool_reference":
        return parts.PartContent(f"Tool now available: {fields.string_in(block, 'tool_name', path)}")
    raise parts.unusable(kind, path)


def _document(block: dict[str, Any], path: str) -> parts.PartContent:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        raise NotSupported(
            f"{path}.source: documents of type {fields.short(kind)} are not supported, only text.", param=path
        )
    said = (
        parts.PartContent(fields.string_in(source, "data", f"{path}.source"))
        if kind == "text"
        else _blocks_content(source.get("content"), f"{path}.source.content")
    )
    about = [block[name] for name in ("title", "context") if isinstance(block.get(name), str) and block[name]]
    return parts.join_content([*(parts.PartContent(text) for text in about), said])


# --- tools ---


def _tools(items: list[Any]) -> tuple[Tool, ...]:
    tools = []
    for path, item in fields.items_of(items, "tools"):
        kind = fields.object_of(item, path).get("type")
        if isinstance(kind, str) and kind.startswith("tool_search_tool"):
            log.info("%s: every tool is shown to the model already, %s is not needed", path, kind)
            continue
        if kind not in (None, "custom"):
            raise NotSupported(
                f"{path}.type: tools of type {fields.short(kind)} run at the vendor; not supported.", param=path
            )
        if not isinstance(item.get("input_schema"), dict):
            raise fields.bad(f"{path}.input_schema", "a JSON schema object", item.get("input_schema"))
        tools.append(function_of(item, path, schema="input_schema"))
    return check_unique(tools)


def _choice(choice: dict[str, Any] | None, tools: tuple[Tool, ...]) -> tuple[ToolChoice, bool]:
    """The choice, and whether several calls at once are allowed."""
    if choice is None:
        return ToolChoice(), True
    kind = choice.get("type")
    mode = CHOICES.get(fields.word(kind) or "")
    if mode is None:
        raise fields.bad("tool_choice.type", "auto, any, tool or none", kind)
    if mode in {"required", "named"} and not tools:
        raise BadRequest(f"tool_choice: {fields.short(kind)} needs tools, but there are none.", param="tool_choice")
    name = fields.string_in(choice, "name", "tool_choice") if mode == "named" else None
    if name is not None and name not in {tool.name for tool in tools}:
        raise BadRequest(f"tool_choice.name: there is no tool named {fields.short(name)}.", param="tool_choice.name")
    alone = fields.optional_in(choice, "disable_parallel_tool_use", bool, "tool_choice")
    return ToolChoice(mode, name), not alone  # type: ignore[arg-type]
