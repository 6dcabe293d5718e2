"""Items of the Responses API as the conversation that the model sees.

What a tool of another server did (a search, a call of an MCP server) is a call and its result, as of any tool. What
only that server can read says nothing: the model does not see it, and the answer names it.
"""

from __future__ import annotations

import base64
import json
import tomllib
from pathlib import Path
from typing import Any

from start_llm.api.common import fields, parts
from start_llm.api.openai.responses_tools import flat_name, toolbox
from start_llm.core.messages import Message, ToolCall
from start_llm.core.protocol import SEAL
from start_llm.core.request import found_text

_TABLE = tomllib.loads(Path(__file__).with_name("items.toml").read_text("utf-8"))
_SETS = ("calls", "outputs", "silent", "brings_tools")
CALLS, OUTPUTS, SILENT, BRINGS_TOOLS = (frozenset[str](_TABLE[name]) for name in _SETS)
ACTIONS: dict[str, Any] = _TABLE["actions"]
RAN: dict[str, Any] = _TABLE["ran"]
INSTEAD: dict[str, str] = _TABLE["instead"]
KNOWN = ", ".join(
    ["message", "reasoning", "agent_message", "additional_tools", *sorted({*CALLS, *ACTIONS, *OUTPUTS, *RAN, *SILENT})]
)


def unseal(text: str) -> str | None:
    """What `seal` was given; ``None`` if another server made it."""
    if not text.startswith(SEAL):
        return None
    try:
        return base64.b64decode(text.removeprefix(SEAL), validate=True).decode()
    except ValueError:  # of base64 and of UTF-8
        return None


def conversation_of(items: list[Any]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The conversation in its order, and the items that it does not show. Raises BadRequest, NotSupported."""
    result: list[Message] = []
    silent: list[str] = []
    turn = parts.Turn()
    for where, item in fields.items_of(items, "input"):
        default = "message" if "role" in fields.object_of(item, where) else "item_reference" if "id" in item else None
        kind = default if item.get("type") is None else fields.optional_in(item, "type", str, where)
        if kind in SILENT:
            silent.append(f"{where} ({kind})")
            continue
        if kind == "reasoning" and (turn.contents or turn.calls):
            result.extend(turn.messages())
            turn = parts.Turn()
        if _join(turn, kind, item, where) or kind == "additional_tools":
            continue
        answer = _ran(turn, kind, item, where) if kind in RAN else _other(kind, item, where)
        result.extend(turn.messages())
        turn = parts.Turn()
        result.append(answer)
    result.extend(turn.messages())
    return tuple(result), tuple(silent)


def _join(turn: parts.Turn, kind: Any, item: dict[str, Any], path: str) -> bool:
    """Adds an assistant's item to its turn; false if it is not one."""
    if kind == "message" and item.get("role") == "assistant":
        turn.contents.append(parts.content_of(item.get("content"), f"{path}.content"))
    elif kind == "reasoning":
        turn.thoughts.extend(_reasoning(item, path))
    elif kind in CALLS:
        turn.calls.append(_call(kind, item, path))
    elif kind in ACTIONS:
        name, given = ACTIONS[kind]
        turn.calls.append(ToolCall(_call_id(item, path), name, _arguments(item, given)))
    else:
        return False
    return True


def _other(kind: Any, item: dict[str, Any], path: str) -> Message:
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise fields.bad(f"{path}.role", "user, assistant, system or developer", role)
        content = parts.content_of(item.get("content"), f"{path}.content")
        return content.message("user" if role == "user" else "system")
    if kind == "agent_message":
        return Message("user", _agents_text(item, path))
    if kind in OUTPUTS:
        return _output(kind, item, path).message("tool", tool_call_id=_call_id(item, path))
    why = INSTEAD.get(kind, f"items of type {fields.short(kind)} are not supported, only {KNOWN}")
    raise fields.wrong(f"{path}.type", f"{why}.")


def _ran(turn: parts.Turn, kind: str, item: dict[str, Any], path: str) -> Message:
    """Adds the call of a tool that ran elsewhere to its turn. Returns what came back."""
    name, asked, answered = RAN[kind]
    if kind == "mcp_call":
        name = flat_name(fields.string_in(item, "name", path), fields.optional_in(item, "server_label", str, path))
    call_id = fields.string_in(item, "id", path)
    turn.calls.append(ToolCall(call_id, name, _arguments(item, asked)))
    found = [item[each] for each in answered if item.get(each)]
    if kind == "image_generation_call" and found:
        image = parts.attachment_of({"type": "image", "data": found[0]}, path)
        return Message("tool", tool_call_id=call_id, attachments=(image,))
    return Message("tool", "\n".join(map(parts.as_text, found)) or parts.NO_RESULT, tool_call_id=call_id)


def _output(kind: str, item: dict[str, Any], path: str) -> parts.PartContent:
    """What came back from a call, whose item stands before."""
    output = item.get("output")
    if kind == "computer_call_output" and isinstance(output, dict):
        return parts.PartContent(attachments=(parts.attachment_of(output | {"type": "input_image"}, f"{path}.output"),))
    if kind == "tool_search_output":
        found = toolbox((), None, [*fields.items_of(item.get("tools"), f"{path}.tools", "a list of tools")])
        return parts.PartContent(found_text(tool.name for tool in found.tools))
    if kind in ("shell_call_output", "apply_patch_call_output", "program_output"):
        return parts.PartContent(
            "\n".join(parts.as_text(item[each]) for each in ("status", "output", "result") if item.get(each))
        )
    return parts.content_of(output, f"{path}.output", between="\n")


def _call_id(item: dict[str, Any], path: str) -> str:
    """Calls that OpenAI's own server made have only an id."""
    call_id = item.get("call_id") or item.get("id") or ("tool_search" if "tool_search" in item["type"] else None)
    if not isinstance(call_id, str):
        raise fields.bad(f"{path}.call_id", "a string", call_id)
    return call_id


def _arguments(item: dict[str, Any], names: list[str]) -> str:
    """An object with what was asked, as JSON text."""
    given = {name: item[name] for name in names if item.get(name) is not None}
    only: Any = next(iter(given.values()), {}) if len(names) == 1 else None
    if isinstance(only, str) and names == ["arguments"]:
        return only
    return json.dumps(only if isinstance(only, dict) else given, ensure_ascii=False)


def _agents_text(item: dict[str, Any], path: str) -> str:
    """What one of Codex's agents tells another. A call's argument travels as ``encrypted_content``: as we gave it."""
    texts = []
    for place, part in fields.items_of(item.get("content"), f"{path}.content", "a list of parts"):
        if isinstance(part, dict) and part.get("type") == "encrypted_content":
            texts.append(fields.string_in(part, "encrypted_content", place))
        else:
            texts.append(parts.only_text(parts.part_content(part, place)))
    return "".join(texts)


def _call(kind: str, item: dict[str, Any], path: str) -> ToolCall:
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": fields.string_in(item, "input", path)}, ensure_ascii=False)
    else:
        arguments = parts.arguments_in(item, "arguments", path)
    name = flat_name(fields.string_in(item, "name", path), fields.optional_in(item, "namespace", str, path))
    return ToolCall(fields.string_in(item, "call_id", path), name, arguments)


def _reasoning(item: dict[str, Any], path: str) -> list[str]:
    """The sealed text if it is ours, else the content, else the summary."""
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and (text := unseal(sealed)) is not None:
        return [text]
    for name in ("content", "summary"):
        given = item.get(name)
        if given is not None and given != []:
            found = fields.items_of(given, f"{path}.{name}", "a list of parts")
            return [fields.string_in(fields.object_of(part, where), "text", where) for where, part in found]
    return []
