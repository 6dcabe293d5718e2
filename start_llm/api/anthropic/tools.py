"""Tools of the messages API: those that the model may know, and which of them it has to call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from start_llm.api.common import fields
from start_llm.api.common.tools import check_unique, choose, function_of, shown_tools
from start_llm.core.errors import NotSupported
from start_llm.core.messages import Tool
from start_llm.core.request import ToolChoice, ToolSearch

CHOICES = ("auto", "any", "tool", "none")


def tools_of(items: list[Any], contents: list[Any], chosen: Any = None) -> tuple[tuple[Tool, ...], ToolSearch | None]:
    """The tools, without those that are deferred and were not found: no ``tool_reference`` in `contents` names them.

    The client searches among these by a tool of its own, or this server does (``tool_search_tool_*``). What was found
    is a tool that came later: the model reads of it where the conversation is by then.
    """
    tools, deferred, searches = list[Tool](), set[str](), dict[str, Literal["query", "pattern"]]()
    found = {*references(contents), fields.word(chosen) or ""}
    for path, item in fields.items_of(items, "tools"):
        kind = fields.object_of(item, path).get("type")
        if isinstance(kind, str) and kind.startswith("tool_search_tool"):
            tools.append(Tool(fields.name_in(item, path)))
            searches[tools[-1].name] = "pattern" if "regex" in kind else "query"
            continue
        tools.append(_own_tool(item, path))
        if fields.optional_in(item, "defer_loading", bool, path):
            deferred.add(tools[-1].name)
    check_unique(tools)
    return shown_tools(tools, searches, deferred, found)


def _own_tool(item: dict[str, Any], path: str) -> Tool:
    """A tool of the client's. Raises BadRequest, NotSupported."""
    kind = item.get("type")
    if kind not in (None, "custom"):
        what = f"only the vendor's models know the schema of {fields.short(kind)}"
        raise NotSupported(f"{path}.type: {what}; send name, description and input_schema.", param=f"{path}.type")
    if not isinstance(item.get("input_schema"), dict):
        raise fields.bad(f"{path}.input_schema", "a JSON schema object", item.get("input_schema"))
    return function_of(item, path, schema="input_schema")


def references(contents: list[Any]) -> Iterator[str]:
    """The names in ``tool_reference`` blocks of messages, of results in messages, and of searches that were run."""
    outer = [block for content in contents for block in _blocks(content)]
    inner = [block for each in outer for block in _blocks(each.get("content"))]
    for block in (*outer, *inner):
        if block.get("type") == "tool_reference" and isinstance(block.get("tool_name"), str):
            yield block["tool_name"]


def _blocks(content: Any) -> list[dict[str, Any]]:
    """Of a list, or of what a search found."""
    content = content.get("tool_references") if isinstance(content, dict) else content
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def choice_of(choice: dict[str, Any] | None, tools: tuple[Tool, ...]) -> tuple[ToolChoice, bool]:
    """The choice, and whether several calls at once are allowed."""
    if choice is None:
        return ToolChoice(), True
    kind = choice.get("type")
    if fields.word(kind) not in CHOICES:  # other dialects have more, which leave tools out
        raise fields.bad("tool_choice.type", "auto, any, tool or none", kind)
    picked, _ = choose(choice, tools)
    alone = fields.optional_in(choice, "disable_parallel_tool_use", bool, "tool_choice")
    return picked, not alone
