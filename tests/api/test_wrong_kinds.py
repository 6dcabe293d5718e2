"""A list or an object where a word is expected: refused by its name, everywhere."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from start_llm.api.server import ApiServer
from tests.api.attacks import CHAT, MESSAGES, RESPONSES
from tests.api.fakes import USER, FakeService
from tests.api.test_limits import post
from tests.kinds import some

EXPLAIN = "/v1/cache/explain"
TOOL = {"type": "function", "function": {"name": "f"}}
NAMESPACE = {"type": "namespace", "tools": []}
WRONG: list[Any] = [["text"], {"a": 1}, 5, True, [[]]]


def user(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}], "max_tokens": 5}


@pytest.mark.parametrize("wrong", some(WRONG, 2), ids=json.dumps)
@pytest.mark.parametrize(
    ("path", "make", "names"),
    [
        (CHAT, lambda w: {"messages": [{"role": w}]}, "messages[0].role"),
        (CHAT, lambda w: user({"type": w}), "messages[0].content[0]"),
        (CHAT, lambda w: {"messages": [{"role": "assistant", "content": [{"type": w}]}]}, "messages[0].content[0]"),
        (CHAT, lambda w: {"messages": USER, "tools": [TOOL], "tool_choice": {"type": w}}, "tool_choice"),
        (CHAT, lambda w: {"messages": USER, "tools": [TOOL | {"type": w}]}, "tools[0].type"),
        (CHAT, lambda w: {"messages": USER, "response_format": {"type": w}}, "response_format.type"),
        (CHAT, lambda w: {"messages": USER, "thinking": {"type": w} if w not in (True, {"a": 1}) else 5}, "thinking"),
        (MESSAGES, lambda w: user({"type": w}), "messages[0].content[0]"),
        (MESSAGES, lambda w: user({"type": "document", "source": {"type": w}}), "messages[0].content[0].source"),
        (MESSAGES, lambda w: user("x") | {"tools": [{"name": "f", "input_schema": {}, "type": w}]}, "tools[0]"),
        (MESSAGES, lambda w: {"messages": USER, "tool_choice": {"type": w}}, "tool_choice.type"),
        (RESPONSES, lambda w: {"input": [{"type": w}]}, "input[0].type"),
        (RESPONSES, lambda w: {"input": [{"type": "message", "role": w}]}, "input[0].role"),
        (RESPONSES, lambda w: {"input": [{"type": "additional_tools", "tools": w}]}, "input[0].tools"),
        (RESPONSES, lambda w: {"input": "x", "tools": [NAMESPACE | {"name": w}]}, "tools[0].name"),
        (RESPONSES, lambda w: {"input": "x", "tools": [TOOL], "tool_choice": {"type": w}}, "tool_choice"),
        (EXPLAIN, lambda w: {"messages": [{"role": w}]}, "messages[0].role"),
    ],
)
def test_it_is_refused(path: str, make: Any, names: str, wrong: Any, server: ApiServer, service: FakeService) -> None:
    status, body = post(server, path, json.dumps(make(wrong)).encode())
    assert status in (400, 501) and service.requests == [], body
    assert names in body


MUCH = {
    "deep": '{"a":' * 3_000 + "1" + "}" * 3_000,
    "objects": '{"a":[' + "{}," * 200_000 + "{}]}",
    "numbers": '{"a":[' + "1," * 200_000 + "1]}",
}


@pytest.mark.parametrize("kind", MUCH)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_conversation_with_a_call_of_too_much_goes_on(
    path: str, kind: str, server: ApiServer, service: FakeService
) -> None:
    """Such arguments are text from then on: 12 MB of ``{},`` took 15 s, a gigabyte, and stopped every route for 4 s."""
    deep = MUCH[kind]
    function = {"name": "f", "arguments": deep}
    if path == CHAT:
        calls = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        body: dict[str, Any] = {"messages": [*USER, calls, {"role": "tool", "tool_call_id": "c", "content": "ok"}]}
    else:
        output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
        body = {"input": [{"type": "function_call", "call_id": "c", **function}, output], "store": False}
    assert post(server, path, json.dumps(body).encode())[0] == 200
    found = [call for message in service.requests[0].messages for call in message.tool_calls]
    assert [json.loads(call.arguments) for call in found] == [deep]


def test_explain_goes_by_the_body_before_the_header(server: ApiServer, service: FakeService) -> None:
    """LiteLLM and some SDKs send `anthropic-version` with everything."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat", {"messages": USER, "tools": [TOOL]}),
        ("chat", {"messages": USER, "tools": [{"type": "function", "name": "f"}]}),
        ("chat", {"messages": [{"role": "developer", "content": "be brief"}, *USER]}),
        ("chat", {"messages": [*USER, {"role": "tool", "tool_call_id": "c", "content": "ok"}]}),
        ("chat", {"messages": USER, "response_format": {"type": "json_object"}}),
        ("chat", {"messages": USER, "max_completion_tokens": 5, "thinking": {"type": "enabled"}}),
        ("messages", {"messages": USER, "max_tokens": 5}),
        ("messages", {"messages": USER, "system": "be brief"}),
        ("messages", {"messages": USER, "tools": [{"name": "f", "input_schema": {}}]}),
        ("messages", user({"type": "tool_result", "tool_use_id": "t"})),
        ("responses", {"input": "x"}),
        ("completions", {"prompt": "x"}),
    ]
    for dialect, body in bodies:
        answer = httpx.post(f"{server.url}{EXPLAIN}", json=body, headers={"anthropic-version": "2023-06-01"})
        assert answer.status_code == 200 and answer.json()["reused"] == 100, answer.text
        assert service.requests[-1].dialect == dialect, body
    httpx.post(f"{server.url}{EXPLAIN}", json={"messages": USER, "max_tokens": 5})
    assert service.requests[-1].dialect == "chat"
