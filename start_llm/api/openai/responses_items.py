"""Items of the Responses API to messages, and the opaque form in which reasoning travels with a client."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from start_llm.api.common import parts
from start_llm.api.common.fields import bad, items_of, object_of, optional_in, short, string_in
from start_llm.api.openai.responses_tools import flat_name
from start_llm.core.errors import BadRequest
from start_llm.core.limits import SEALED
from start_llm.core.messages import Message, ToolCall
from start_llm.core.protocol import SEAL

CALLS = frozenset({"function_call", "custom_tool_call"})
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
KNOWN = (
    "message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output, "
    "local_shell_call, local_shell_call_output, agent_message, additional_tools"
)


def seal(reasoning: str) -> str:
    """``encrypted_content``: opaque to clients, and whole, since some send back nothing else."""
    packed = zlib.compress(reasoning.encode("utf-8", "replace"), 6)
    return SEAL + base64.b64encode(packed).decode("ascii")


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
    for where, item in items_of(items, path):
        default = "message" if "role" in object_of(item, where) else None
        kind = optional_in(item, "type", str, where) if "type" in item else default
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
        turn.calls.append(ToolCall(string_in(item, "call_id", path), "local_shell", action))
    else:
        return False
    return True


def _other(kind: Any, item: dict[str, Any], path: str) -> Message:
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise bad(f"{path}.role", "user, assistant, system or developer", role)
        content = parts.content_of(item.get("content"), f"{path}.content")
        return Message("user" if role == "user" else "system", content.text, attachments=content.attachments)
    if kind == "agent_message":
        return Message("user", _agents_text(item, path))
    if kind in OUTPUTS:
        call_id = item.get("call_id", item.get("id"))
        if not isinstance(call_id, str):
            raise bad(f"{path}.call_id", "a string", call_id)
        output = parts.result_content(item.get("output"), f"{path}.output")
        return Message("tool", output.text, tool_call_id=call_id, attachments=output.attachments)
    raise BadRequest(
        f"{path}.type: items of type {short(kind)} are not supported, only {KNOWN}.",
        param=f"{path}.type",
        code="invalid_value",
    )


def _agents_text(item: dict[str, Any], path: str) -> str:
    """What one of Codex's agents tells another. A call's argument travels as ``encrypted_content``: as we gave it."""
    texts = []
    for place, part in items_of(item.get("content"), f"{path}.content", "a list of parts"):
        sealed = isinstance(part, dict) and part.get("type") == "encrypted_content"
        texts.append(string_in(part, "encrypted_content", place) if sealed else parts.part_text(part, place))
    return "".join(texts)


def _call(kind: str, item: dict[str, Any], path: str) -> ToolCall:
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": string_in(item, "input", path)}, ensure_ascii=False)
    else:
        arguments = parts.arguments_in(item, "arguments", path)
    name = flat_name(string_in(item, "name", path), optional_in(item, "namespace", str, path))
    return ToolCall(string_in(item, "call_id", path), name, arguments)


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
            found = items_of(given, f"{path}.{name}", "a list of parts")
            return [string_in(object_of(part, where), "text", where) for where, part in found]
    return []
