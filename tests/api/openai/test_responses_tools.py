"""Namespaces and custom tools as functions of flat names, and back."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.api.openai.responses_tools import (
    FREE_TEXT,
    FREE_TEXT_NOTE,
    InputText,
    Named,
    Toolbox,
    flat_name,
    toolbox,
)
from start_llm.core.messages import Tool
from start_llm.core.request import ToolChoice

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


def function(name: str, description: str = "") -> dict[str, Any]:
    return {"type": "function", "name": name, "description": description, "parameters": SCHEMA, "strict": False}


def namespace(name: str, *tools: Any, about: str = "") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": about, "tools": list(tools)}


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
AGENTS = namespace("agents", function("spawn", "Begins one."), function("wait"), about="Helpers.")


def box(*tools: Any, choice: Any = None) -> Toolbox:
    return toolbox([(f"tools[{index}]", tool) for index, tool in enumerate(tools)], choice)


def test_a_namespace_is_told_once() -> None:
    """Where it comes in two parts: with the first tool of each, with all that is said of it so far."""
    groups = [namespace(name, function("f")) for name in ("mute", "mcp__n", "mcp__m__")]
    made = box(function("read"), AGENTS, *groups, namespace("agents", function("stop"), function("go"), about="More."))
    helpers = "About all tools named agents__*: Helpers.\n\nAbout all tools named agents__*: More."
    assert made.tools == (
        Tool("read", "", SCHEMA),
        Tool("agents__spawn", f"{helpers}\n\nBegins one.", SCHEMA),
        *(Tool(name, "", SCHEMA) for name in ("agents__wait", "mute__f", "mcp__n__f", "mcp__m__f")),
        *(Tool(name, "", SCHEMA) for name in ("agents__stop", "agents__go")),
    )
    assert made.notes == ()
    assert [made.origin(tool.name) for tool in made.tools] == [
        *(Named("read"), Named("spawn", "agents"), Named("wait", "agents"), Named("f", "mute"), Named("f", "mcp__n")),
        *(Named("f", "mcp__m__"), Named("stop", "agents"), Named("go", "agents")),
    ]
    assert flat_name("f", "") == "f"


def test_what_a_call_means() -> None:
    made = box(
        function("read"),
        AGENTS,
        namespace("files", function("read"), function("wait"), {"type": "custom", "name": "put"}),
    )
    assert made.origin("files__read") == Named("read", "files")
    assert made.origin("read") == Named("read"), "a plain tool goes first"
    assert made.origin("spawn") == Named("spawn", "agents"), "there is one tool called so"
    assert made.origin("put") == Named("put", "files", custom=True)
    assert made.origin("wait") == Named("wait"), "there are two"
    assert made.origin("unheard") == Named("unheard")


def test_custom_tools() -> None:
    made = box(
        {"type": "custom", "name": "free", "description": "Says it."},
        {"type": "custom", "name": "text", "format": {"type": "text"}},
        {"type": "custom", "name": "patch", "description": "Edits.", "format": GRAMMAR},
        {"type": "custom", "name": "bare", "format": GRAMMAR},
    )
    told = "The input must match this lark grammar:\nstart: /.+/"
    assert made.tools == (
        Tool("free", f"Says it.\n\n{FREE_TEXT_NOTE}", FREE_TEXT),
        Tool("text", FREE_TEXT_NOTE, FREE_TEXT),
        Tool("patch", f"Edits.\n\n{FREE_TEXT_NOTE}\n\n{told}", FREE_TEXT),
        Tool("bare", f"{FREE_TEXT_NOTE}\n\n{told}", FREE_TEXT),
    )
    assert all(made.origin(tool.name).custom for tool in made.tools)


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "read"}, "read"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
        ({"type": "function", "name": "spawn"}, "agents__spawn"),
        ({"type": "function", "name": "agents__spawn"}, "agents__spawn"),
        ({"type": "custom", "name": "patch"}, "patch"),
    ],
)
def test_named_choice(choice: Any, name: str) -> None:
    made = box(function("read"), AGENTS, {"type": "custom", "name": "patch"}, choice=choice)
    assert made.choice == ToolChoice("named", name)
    assert len(made.tools) == 4


@pytest.mark.parametrize("nested", [False, True])
def test_allowed_tools(nested: bool) -> None:
    """The namespace is told though its first tool is not allowed."""
    tools = [
        {"type": "function", "name": "wait", "namespace": "agents"},
        {"type": "web_search"},
        {"type": "custom", "name": "patch"},
    ]
    allowed = {"mode": "required", "tools": tools}
    choice = {"type": "allowed_tools"} | ({"allowed_tools": allowed} if nested else allowed)
    made = box(function("read"), AGENTS, {"type": "custom", "name": "patch"}, choice=choice)
    assert made.choice == ToolChoice("required")
    assert [(tool.name, tool.description) for tool in made.tools] == [
        ("agents__wait", "About all tools named agents__*: Helpers."), ("patch", FREE_TEXT_NOTE),
    ]  # fmt: skip
    whole = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "agents"}]}
    assert [tool.name for tool in box(function("read"), AGENTS, choice=whole).tools] == [
        "agents__spawn",
        "agents__wait",
    ]


LATER = {"defer_loading": True}
SEARCHED = namespace("git", function("log", "The history.") | LATER, function("push") | LATER, about="A repository.")


def test_deferred_tools_are_found_by_a_search_of_this_server() -> None:
    made = box(function("read"), SEARCHED, {"type": "tool_search"})
    assert [tool.name for tool in made.tools] == ["read", "tool_search"] and made.search is not None
    assert "git__* (log, push)" in made.tools[1].description
    assert [tool.name for tool in made.search.tools] == ["read", "git__log", "git__push", "tool_search"]
    assert made.origin("git__log").listed() == {"type": "namespace", "name": "git", "tools": [SEARCHED["tools"][0]]}
    output = [("input[1].tools[0]", made.origin("git__log").listed())]
    after = toolbox([("a", function("read")), ("b", SEARCHED), ("c", {"type": "tool_search"})], None, output)
    assert [tool.name for tool in after.tools] == ["read", "git__log", "tool_search"], "found, in its place"
    assert after.tools[2] == made.tools[1], "the search tells what it told before"


def test_the_client_searches_by_itself() -> None:
    tool = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": SCHEMA}
    made = box(tool, function("read") | LATER)
    assert made.tools == (Tool("tool_search", "Finds.", SCHEMA),) and made.search is None
    assert made.origin("tool_search").search == "client"
    twice = [("a", function("read") | LATER), ("b", function("read", "Newer."))]
    after = toolbox([("tools[0]", tool)], None, twice)
    assert after.tools[1:] == (Tool("read", "Newer.", SCHEMA),), "what it finds twice is one tool"


def test_without_a_search_nothing_is_hidden() -> None:
    assert [tool.name for tool in box(function("read") | LATER).tools] == ["read"]
    assert [tool.name for tool in box(function("read"), {"type": "tool_search"}).tools] == ["read"]
    search = {"type": "tool_search"}
    allowed = {"type": "allowed_tools", "tools": [search, {"type": "function", "name": "read"}]}
    assert [tool.name for tool in box(SEARCHED, function("read"), search, choice=allowed).tools] == ["read"]
    assert box(SEARCHED, search, choice=search).choice == ToolChoice("named", "tool_search")
    chosen = box(function("read") | LATER, search, choice={"type": "function", "name": "read"})
    assert [tool.name for tool in chosen.tools] == ["read", "tool_search"]


# --- the text of a custom tool's call, while its JSON arrives ---


def input_of(arguments: str) -> str:
    reader = InputText()
    return reader.feed(arguments) + reader.finish(arguments)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    reader = InputText()
    pieces = ['{"inp', 'ut" : "ab', "c\\", "n\\u00", 'e9"', ', "more": "x"}']
    assert [reader.feed(piece) for piece in pieces] == ["", "ab", "c", "\n", "é", ""]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"more": 1, "input": "x"}', "x"),
        ('{"input": "first", "input": "second"}', "first"),
        ('"bare"', "bare"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ("", ""),
        ("not JSON", "not JSON"),
        ('{"input": "cut of', "cut of"),
        ('{"input": "line\nbreak"}', "line\nbreak"),
        ('{"input": "half \\ud83d pair"}', "half \ud83d pair"),
        ('{"input": "other half \\ude00"}', "other half \ude00"),
    ],
)
def test_other_shapes(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
    reader = InputText()
    pieces = "".join(reader.feed(char) for char in arguments)
    assert pieces + reader.finish(arguments) == reader.text == text
