"""``/v1/responses``, the way in: bodies, items, stored responses. The way out is `responses_stream`."""

from __future__ import annotations

import base64
import binascii
import json
import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from pydantic import Field

from start_llm.api.common import fields, parts
from start_llm.api.common.request import request_of, stop_of
from start_llm.api.common.tools import response_format_of
from start_llm.api.http import sse
from start_llm.api.http.access import user_of
from start_llm.api.http.routes import Reply, Request
from start_llm.api.openai.responses_store import OwnResponses, ResponsesStore, StoredResponse
from start_llm.api.openai.responses_stream import REASONING, SUMMARY, ResponsesExchange, telling
from start_llm.api.openai.responses_tools import Toolbox, flat_name, toolbox
from start_llm.core.errors import BadRequest, NotFound
from start_llm.core.limits import MESSAGES, SEALED
from start_llm.core.messages import Message, ToolCall
from start_llm.core.protocol import SEAL
from start_llm.core.service import Service
from start_llm.core.settings import Settings

log = logging.getLogger(__name__)

REFUSED = {
    "background": "answers in the background are not supported; leave it out or set it to false.",
    "conversation": "conversations are not kept; use previous_response_id.",
    "prompt": "stored prompt templates are not supported; send instructions and input.",
}
CALLS = frozenset({"function_call", "custom_tool_call"})
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
KNOWN = (
    "message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output, "
    "local_shell_call, local_shell_call_output, agent_message, additional_tools"
)


class ResponsesBody(fields.SamplingBody):
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: fields.Tokens | None = None
    max_tool_calls: fields.Tokens | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stop: Any = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


def read_responses(inbound: Request, settings: Settings, service: Service, store: OwnResponses) -> ResponsesExchange:
    """Raises BadRequest, NotFound (the previous response), NotSupported."""
    body, data = fields.parse_body(ResponsesBody, inbound.body)
    fields.refuse(data, REFUSED)
    store = store.of_user(user_of(data))
    items = [*_previous(body.previous_response_id, store), *_input(body.input)]
    fields.within(MESSAGES, len(items), "input")
    messages = messages_of(items)
    tools = _tools(body, items)
    if body.instructions:
        messages = (Message("system", body.instructions), *messages)
    include = set(body.include or [])
    wants_logprobs = "message.output_text.logprobs" in include or bool(body.top_logprobs)
    request = request_of(
        *("responses", body, data, inbound, settings),
        messages=messages,
        tools=tools.tools,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=response_format_of((body.text or {}).get("format"), "text.format"),
        max_tokens=body.max_output_tokens,
        stop=stop_of(body.stop),
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        continued=body.previous_response_id is not None,
    )
    thought = body.reasoning or {}
    thinking = SUMMARY if thought.get("summary") or thought.get("generate_summary") else REASONING
    sealed = "reasoning.encrypted_content" in include
    keep = store if body.store is not False and store.enabled else None
    if body.store:
        _check_storable(store)
    echo = _echo(body, data, tools.notes, keep is not None)
    return ResponsesExchange(
        request, service, echo, items, thinking, sealed, time.time(), keep, bool(body.store), tools.origin
    )


def _check_storable(own: OwnResponses) -> None:
    """Before anything is computed: what asks to be stored and cannot be is refused."""
    if own.owner is None:
        why = "a server without API_KEY stores responses for programs of its own machine only"
        raise fields.bad("store", f"false or left out: {why}", True)
    with telling("store"):
        own.store.check()


def _input(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list) and value:
        return value
    raise fields.bad("input", "a string or a list of items that is not empty", value)


def _previous(response_id: str | None, store: OwnResponses) -> list[Any]:
    """What was said up to and with the previous response; its instructions are not carried over."""
    if response_id is None:
        return []
    with telling("previous_response_id"):
        stored = store.get(response_id)
    if stored is None:
        raise NotFound(
            f"previous_response_id: there is no stored response {fields.short(response_id)}; it may have expired.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [*stored.items, *stored.body["output"]]


def _tools(body: ResponsesBody, items: list[Any]) -> Toolbox:
    found = list(fields.items_of(body.tools or [], "tools"))
    for path, item in fields.items_of(items, "input"):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            found += fields.items_of(item.get("tools") or [], f"{path}.tools", "a list of tools")
    tools = toolbox(found, body.tool_choice)
    if tools.notes:
        log.info("tools passed over: %s", ", ".join(tools.notes))
    return tools


def _echo(body: ResponsesBody, data: Mapping[str, Any], notes: Sequence[str], stored: bool) -> dict[str, Any]:
    """The fields of a response that say what was asked."""
    metadata = {name: value for name, value in (body.metadata or {}).items() if isinstance(value, str)}
    if notes:
        note = f"These tools were passed over, they would run elsewhere: {', '.join(notes)}"
        metadata["start_llm_warnings"] = note if len(note) <= 512 else note[:509] + "..."
    reasoning = body.reasoning or {}
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": stored,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class StoredResponses:
    """``GET`` and ``DELETE /v1/responses/{id}``, and the input items of one."""

    def __init__(self, store: ResponsesStore) -> None:
        self._store = store

    def get(self, inbound: Request) -> Reply:
        return Reply(sse.dumps(self._find(inbound).body))

    def delete(self, inbound: Request) -> Reply:
        response_id = inbound.params[0]
        with telling("response_id"):
            deleted = self._own(inbound).delete(response_id)
        if not deleted:
            raise _missing(response_id)
        return Reply(sse.dumps({"id": response_id, "object": "response", "deleted": True}))

    def input_items(self, inbound: Request) -> Reply:
        items = self._find(inbound).items
        return Reply(sse.dumps({"object": "list", "data": items, "has_more": False}))

    def _own(self, inbound: Request) -> OwnResponses:
        """Of the key, and of the user that ``?user=`` names."""
        users = parse_qs(inbound.query).get("user", [None])
        return self._store.of(inbound.visitor.scope).of_user(users[0])

    def _find(self, inbound: Request) -> StoredResponse:
        """Whose it is makes no difference in words: that there is one is nobody else's business."""
        response_id = inbound.params[0]
        with telling("response_id"):
            stored = self._own(inbound).get(response_id)
        if stored is None:
            raise _missing(response_id)
        return stored


def _missing(response_id: str) -> NotFound:
    return NotFound(f"There is no stored response {fields.short(response_id)}.", param="response_id")


# --- items ---


def unseal(text: str, most: int = SEALED.most) -> str | None:
    """What `seal` was given; ``None`` if another server made it.

    Anybody can make one, and a thousandth of what it says is enough: ValueError where it holds more than `most` bytes.
    """
    if not text.startswith(SEAL):
        return None
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(base64.b64decode(text.removeprefix(SEAL), validate=True), most + 1)
        if len(found) <= most:
            return found.decode() if unpacking.eof else None
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        return None
    raise ValueError(f"it holds more than {most} bytes")


class _Seals:
    """Opens the sealed reasoning of one request's items, as long as all of it together is not too much."""

    def __init__(self) -> None:
        self._left = SEALED.most

    def open(self, text: str, path: str) -> str | None:
        """As `unseal`. Raises BadRequest."""
        try:
            found = unseal(text, self._left)
        except ValueError:
            message = f"{path}: at most {SEALED.most:,} {SEALED.what} are allowed, but there are more."
            raise BadRequest(message, param=path, code="limit_exceeded") from None
        self._left -= len((found or "").encode())
        return found


@dataclass(slots=True)
class _Turn:
    """Assistant items that stand together are one message."""

    contents: list[parts.PartContent] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> list[Message]:
        if not (self.contents or self.thoughts or self.calls):
            return []
        said, reasoning = parts.join_content(self.contents), parts.join_text(self.thoughts) or None
        calls = tuple(self.calls)
        return [Message("assistant", said.text, reasoning=reasoning, tool_calls=calls, attachments=said.attachments)]


def messages_of(items: list[Any], path: str = "input") -> tuple[Message, ...]:
    """The conversation in its order. Raises BadRequest, NotSupported."""
    result: list[Message] = []
    turn, seals = _Turn(), _Seals()
    for where, item in fields.items_of(items, path):
        default = "message" if "role" in fields.object_of(item, where) else None
        kind = fields.optional_in(item, "type", str, where) if "type" in item else default
        if kind == "reasoning" and (turn.contents or turn.calls):
            result.extend(turn.message())
            turn = _Turn()
        if _join(turn, kind, item, where, seals) or kind == "additional_tools":
            continue
        result.extend(turn.message())
        turn = _Turn()
        result.append(_other(kind, item, where))
    result.extend(turn.message())
    return tuple(result)


def _join(turn: _Turn, kind: Any, item: dict[str, Any], path: str, seals: _Seals) -> bool:
    """Adds an assistant's item to its turn; false if it is not one."""
    if kind == "message" and item.get("role") == "assistant":
        turn.contents.append(parts.content_of(item.get("content"), f"{path}.content"))
    elif kind == "reasoning":
        turn.thoughts.extend(_reasoning(item, path, seals))
    elif kind in CALLS:
        turn.calls.append(_call(kind, item, path))
    elif kind == "local_shell_call":
        action = json.dumps(item.get("action") or {}, ensure_ascii=False)
        turn.calls.append(ToolCall(fields.string_in(item, "call_id", path), "local_shell", action))
    else:
        return False
    return True


def _other(kind: Any, item: dict[str, Any], path: str) -> Message:
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise fields.bad(f"{path}.role", "user, assistant, system or developer", role)
        content = parts.content_of(item.get("content"), f"{path}.content")
        return Message("user" if role == "user" else "system", content.text, attachments=content.attachments)
    if kind == "agent_message":
        return Message("user", _agents_text(item, path))
    if kind in OUTPUTS:
        call_id = item.get("call_id", item.get("id"))
        if not isinstance(call_id, str):
            raise fields.bad(f"{path}.call_id", "a string", call_id)
        output = parts.result_content(item.get("output"), f"{path}.output")
        return Message("tool", output.text, tool_call_id=call_id, attachments=output.attachments)
    raise BadRequest(
        f"{path}.type: items of type {fields.short(kind)} are not supported, only {KNOWN}.",
        param=f"{path}.type",
        code="invalid_value",
    )


def _agents_text(item: dict[str, Any], path: str) -> str:
    """What one of Codex's agents tells another. A call's argument travels as ``encrypted_content``: as we gave it."""
    texts = []
    for place, part in fields.items_of(item.get("content"), f"{path}.content", "a list of parts"):
        sealed = isinstance(part, dict) and part.get("type") == "encrypted_content"
        texts.append(fields.string_in(part, "encrypted_content", place) if sealed else parts.part_text(part, place))
    return "".join(texts)


def _call(kind: str, item: dict[str, Any], path: str) -> ToolCall:
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": fields.string_in(item, "input", path)}, ensure_ascii=False)
    else:
        arguments = parts.arguments_in(item, "arguments", path)
    name = flat_name(fields.string_in(item, "name", path), fields.optional_in(item, "namespace", str, path))
    return ToolCall(fields.string_in(item, "call_id", path), name, arguments)


def _reasoning(item: dict[str, Any], path: str, seals: _Seals) -> list[str]:
    """The sealed text if it is ours, else the content, else the summary."""
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str):
        text = seals.open(sealed, f"{path}.encrypted_content")
        if text is not None:
            return [text]
    for name in ("content", "summary"):
        given = item.get(name)
        if given is not None and given != []:
            found = fields.items_of(given, f"{path}.{name}", "a list of parts")
            return [fields.string_in(fields.object_of(part, where), "text", where) for where, part in found]
    return []
