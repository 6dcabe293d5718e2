"""Tools whose schemas are deferred: names until they are found, then tools like others, and the prefix stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.live import Live
from tests.oracle import script


def tool(name: str, **more: Any) -> dict[str, Any]:
    about = f"{name} does what its name says, with a file of the repository. " * 5
    return {
        "name": name,
        "description": about,
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    } | more


FIND = tool("ToolSearch")
MANY = [tool(f"mcp__server__tool_{number}", defer_loading=True) for number in range(60)]


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
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
