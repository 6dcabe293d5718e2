"""Tools whose schemas are deferred: names until they are found, then tools like others, and the prefix stays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.integration.live import Live
from tests.kinds import some
from tests.oracle import script
from tests.vendors import anthropic, openai


def tool(name: str, **more: Any) -> dict[str, Any]:
    about = f"{name} does what its name says, with a file of the repository. " * 5
    return {
        "name": name,
        "description": about,
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    } | more


FIND = tool("ToolSearch")
MANY = [tool(f"mcp__server__tool_{number}", defer_loading=True) for number in range(60)]


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.thorough), "hybrid"])
def test_a_found_tool_is_told_where_it_was_found(servers: Callable[..., Live], kind: str) -> None:
    server = servers(kind)

    def count(tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> int:
        body = {"model": "default", "messages": messages, "tools": tools}
        return int(server.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    def ask(tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        body = {"model": "default", "max_tokens": 100, "messages": messages, "tools": tools}
        answer = server.post("/v1/messages", json=body).json()
        report = answer["usage"]["start_llm"]
        assert count(tools, messages) == report["prompt"]
        return answer, report

    def called(name: str) -> str:
        return script(f'I call it.<tool_call>{{"name": "{name}", "arguments": {{"path": "a.py"}}}}</tool_call>')

    def result(answer: dict[str, Any], content: Any) -> list[dict[str, Any]]:
        (call,) = (block for block in answer["content"] if block["type"] == "tool_use")
        told = {"type": "tool_result", "tool_use_id": call["id"], "content": content}
        return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [told]}]

    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Find a tool, for {kind}. {called('ToolSearch')}"}]
    answer, first = ask([FIND, *MANY], messages)
    _, shown = ask([FIND, *({**each, "defer_loading": False} for each in MANY)], messages)
    assert first["prompt"] < shown["prompt"] / 10, "60 schemas are not in the prompt"

    found = "mcp__server__tool_7"
    messages += result(answer, [{"type": "tool_reference", "tool_name": found}])
    messages[-1]["content"].append({"type": "text", "text": called(found)})
    schema = count([FIND, *MANY], messages) - count([FIND], messages)
    assert schema > 60, "the model reads the schema of what was found"
    answer, second = ask([FIND, *MANY], messages)
    assert answer["stop_reason"] == "tool_use" and answer["content"][-1]["name"] == found
    assert second["computed"] <= second["new"] * 1.05 + 8 and second["reused"] >= first["prompt"] - 8

    messages += result(answer, "It worked.")
    messages[-1]["content"].append({"type": "text", "text": called(found)})
    answer, third = ask([FIND, *MANY], messages)
    assert answer["content"][-1]["name"] == found, "what was found stays found"
    assert third["computed"] <= third["new"] * 1.05 + 8 and third["reused"] >= second["prompt"] - 8
    assert third["new"] + schema / 2 < second["new"], "its schema is told once"


SEARCHES = {
    "query": {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
    "pattern": {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
}
WORDS = {"query": "reading pages of the archives", "pattern": "archive_.age"}
PAGE = tool("mcp__library__archive_page", defer_loading=True, description="Reads a page of an archive.")


def in_turn(one: Iterable[Any]) -> list[Any]:
    """Each of these streamed and whole."""
    return some((each, stream) for each in one for stream in (True, False))


def call_of(name: str, **given: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(given)}}}</tool_call>'


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.thorough), "hybrid"])
@pytest.mark.parametrize(("field", "stream"), in_turn(SEARCHES))
def test_the_server_searches_within_one_request(
    servers: Callable[..., Live], kind: str, field: str, stream: bool
) -> None:
    server = servers(kind)
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tools: Any = [SEARCHES[field], *MANY, PAGE]

    def ask(messages: list[Any]) -> Any:
        body: Any = {"model": "default", "max_tokens": 500, "messages": messages, "tools": tools}
        if not stream:
            return client.beta.messages.create(**body)
        with client.beta.messages.stream(**body) as events:
            return events.get_final_message()

    def report(message: Any) -> dict[str, Any]:
        return dict(server.get(f"/v1/cache/requests/{message.id}").json())

    search = call_of(SEARCHES[field]["name"], **{field: WORDS[field]})
    found = call_of(PAGE["name"], path="a.py")
    steps = script(f"I look.{search}", f"It is there.{found}", "Done with it.")
    messages: list[Any] = [{"role": "user", "content": f"Read a page, {field} {kind} {stream}. {steps}"}]
    answer = ask(messages)
    assert [block.type for block in answer.content] == [
        *("text", "server_tool_use", "tool_search_tool_result", "text", "tool_use")
    ]
    assert answer.stop_reason == "tool_use" and answer.content[1].input == {field: WORDS[field]}
    assert [each.tool_name for each in answer.content[2].content.tool_references] == [PAGE["name"]]
    assert answer.content[2].tool_use_id == answer.content[1].id
    first = report(answer)
    assert first["computed"] <= first["new"] * 1.05 + 8, "the second answer goes on from the first one's KV"
    assert first["prompt"] < 4_000, "60 schemas are not in the prompt"

    messages += [{"role": "assistant", "content": answer.content}]
    told = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "larch"}
    messages += [{"role": "user", "content": [told]}]
    answer = ask(messages)
    assert [block.text for block in answer.content] == ["Done with it."]
    second = report(answer)
    assert second["computed"] <= second["new"] * 1.05 + 8, second
    assert second["new"] < 100, "its schema is told once"


@pytest.mark.parametrize(("stored", "stream"), in_turn((False, True)))
def test_the_server_searches_for_the_responses_api(servers: Callable[..., Live], stream: bool, stored: bool) -> None:
    server = servers("hybrid")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def function(given: dict[str, Any]) -> dict[str, Any]:
        names = {"name": given["name"].rpartition("__")[2], "description": given["description"]}
        return names | {"type": "function", "parameters": given["input_schema"], "defer_loading": True}

    spaces = {"mcp__server": MANY, "mcp__library": [PAGE]}
    tools: Any = [
        {"type": "namespace", "name": name, "description": f"About {name}.", "tools": [*map(function, those)]}
        for name, those in spaces.items()
    ]

    def ask(items: Any, **more: Any) -> Any:
        given = {"model": "default", "input": items, "tools": [*tools, {"type": "tool_search"}], "store": stored} | more
        if not stream:
            return client.responses.create(**given)
        with client.responses.create(**given, stream=True) as events:
            *_, last = events
        return last.response

    search, found = call_of("tool_search", query=WORDS["query"]), call_of(PAGE["name"], path="a.py")
    steps = script(f"I look.{search}", f"It is there.{found}", "Done with it.")
    items: list[Any] = [{"role": "user", "content": f"Read a page, {stream} {stored}. {steps}"}]
    answer = ask(items)
    _, searched, brought, _, made = answer.output
    assert [item.type for item in answer.output] == [
        *("message", "tool_search_call", "tool_search_output", "message", "function_call")
    ]
    assert searched.execution == "server" and searched.arguments == {"query": WORDS["query"]}
    assert [each.tools[0].name for each in brought.tools] == ["archive_page"] and brought.call_id == searched.call_id
    assert (made.namespace, made.name) == ("mcp__library", "archive_page")
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "larch"}
    if stored:
        answer = ask([result], previous_response_id=answer.id)
    else:
        answer = ask([*items, *answer.output, result])
    assert answer.output_text == "Done with it."
    report = server.get(f"/v1/cache/requests/{answer.id}").json()
    assert report["computed"] <= report["new"] * 1.05 + 8 and report["new"] < 100, report
