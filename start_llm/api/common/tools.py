"""Tools and tool choices in OpenAI's shapes (chat completions; Responses' flat form too)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal

from start_llm.api.common.fields import bad, items_of, name_in, object_of, optional_in, short, within, word
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.limits import TOOLS
from start_llm.core.messages import Tool
from start_llm.core.request import ResponseFormat, ToolChoice, ToolSearch

MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def tool_of(item: Any, path: str) -> Tool:
    """One function tool, nested under ``function`` or flat."""
    kind = object_of(item, path).get("type", "function")
    if kind != "function":
        raise NotSupported(f"{path}.type: tools of type {short(kind)} are not supported, only function.", param=path)
    nested = item.get("function")
    return function_of(nested, f"{path}.function") if isinstance(nested, dict) else function_of(item, path)


def function_of(item: Any, path: str, schema: str = "parameters") -> Tool:
    """A function of this name and description; `schema` is the field that has its arguments'."""
    name = name_in(object_of(item, path), path)
    description = optional_in(item, "description", str, path)
    parameters = optional_in(item, schema, dict, path, "a JSON schema object")
    strict = optional_in(item, "strict", bool, path)
    empty: dict[str, Any] = {"type": "object", "properties": {}}
    return Tool(name, description or "", parameters or empty, bool(strict))


def check_unique(tools: Sequence[Tool], path: str = "tools") -> tuple[Tool, ...]:
    within(TOOLS, len(tools), path)
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise BadRequest(f"{path}[{index}]: a second tool is named {short(tool.name)}.", param=f"{path}[{index}]")
        seen.add(tool.name)
    return tuple(tools)


MOST_NAMES = 4_000
"""Characters of names that a search tool tells."""


def search_tool(name: str, field: str, hidden: Sequence[Tool]) -> Tool:
    """The tool with which a model finds the `hidden` ones; it tells their names by server (``server__tool``)."""
    servers: dict[str, list[str]] = {}
    for tool in hidden:
        server, between, short_name = tool.name.rpartition("__")
        servers.setdefault(server + between, []).append(short_name)
    names = "; ".join(
        f"{server}* ({', '.join(those)})" if server else ", ".join(those) for server, those in servers.items()
    )
    if len(names) > MOST_NAMES:
        names = "; ".join(f"{server}* ({len(those)} tools)" for server, those in servers.items())[:MOST_NAMES]
    how = "words for what is needed" if field == "query" else "a regular expression for names and descriptions"
    text = f"Finds tools. Those that it finds can be called after it. Tools that can be found: {names}"
    properties = {field: {"type": "string", "description": how}, "limit": {"type": "integer"}}
    return Tool(name, text, {"type": "object", "properties": properties, "required": [field]})


def shown_tools(
    tools: Sequence[Tool], searches: Mapping[str, Literal["query", "pattern"]], deferred: Set[str], found: Set[str]
) -> tuple[tuple[Tool, ...], ToolSearch | None]:
    """The tools, without those that are deferred and were not found.

    `searches`: the argument of each search tool that this server runs, by name. Such a tool tells what can be found; it
    is left out where that is nothing.
    """
    hidden = [tool for tool in tools if tool.name in deferred]
    if not hidden:
        return tuple(tool for tool in tools if tool.name not in searches), None
    known = tuple(
        search_tool(each.name, searches[each.name], hidden) if each.name in searches else each for each in tools
    )
    shown = tuple(tool for tool in known if tool.name not in deferred - found)
    return shown, ToolSearch(searches, known) if searches else None


def choose(choice: Any, tools: tuple[Tool, ...], path: str = "tool_choice") -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The choice, and the tools that it leaves (``allowed_tools`` takes some away)."""
    if choice is None:
        return ToolChoice(), tools
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice, tools, path)
    picked = _choice(choice, path)
    if picked.mode in {"required", "named"} and not tools:
        raise BadRequest(f"{path}: {short(choice)} needs tools, but there are none.", param=path)
    if picked.mode == "named" and picked.name not in {tool.name for tool in tools}:
        raise BadRequest(f"{path}: there is no tool named {short(picked.name)}.", param=path)
    return picked, tools


def _choice(choice: Any, path: str) -> ToolChoice:
    if isinstance(choice, str) and choice in MODES:
        return ToolChoice(MODES[choice])  # type: ignore[arg-type]
    if isinstance(choice, dict):
        kind = choice.get("type")
        mode = MODES.get(word(kind) or "")
        if mode is not None and choice.get("function") is None and choice.get("name") is None:
            return ToolChoice(mode)  # type: ignore[arg-type]
        place = choice.get("function") if isinstance(choice.get("function"), dict) else choice
        if kind in (None, "function", "tool") and isinstance(place, dict) and isinstance(place.get("name"), str):
            return ToolChoice("named", place["name"])
    raise bad(path, "auto, none, required (any) or a named function (tool)", choice)


def _allowed(choice: dict[str, Any], tools: tuple[Tool, ...], path: str) -> tuple[ToolChoice, tuple[Tool, ...]]:
    inner = choice.get("allowed_tools")
    place: dict[str, Any] = inner if isinstance(inner, dict) else choice
    items = items_of(place.get("tools"), f"{path}.tools", "a list of tools")
    names = {_choice(item, where).name or "" for where, item in items}
    left = tuple(tool for tool in tools if tool.name in names)
    return choose(place.get("mode", "auto"), left, f"{path}.mode")


def response_format_of(value: Any, path: str = "response_format") -> ResponseFormat:
    """``text``, ``json_object``, ``json_schema`` (nested or flat, as in Responses' ``text.format``).

    A ``json_object`` may have a schema, as clients of llama.cpp's server send it; an empty one says nothing.
    """
    if value is None:
        return ResponseFormat()
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return ResponseFormat()
    if kind == "json_object" and not value.get("schema"):
        return ResponseFormat("json_object")
    if kind not in ("json_schema", "json_object"):
        raise bad(f"{path}.type", "text, json_object or json_schema", kind if isinstance(value, dict) else value)
    nested = value.get("json_schema")
    place = nested if isinstance(nested, dict) else value
    inner = f"{path}.json_schema" if isinstance(nested, dict) else path
    schema = place.get("schema")
    if not isinstance(schema, dict):
        raise bad(f"{inner}.schema", "a JSON schema object", schema)
    name = place.get("name")
    return ResponseFormat(
        "json_schema", schema, name if isinstance(name, str) and name else "response", f"{inner}.schema"
    )
