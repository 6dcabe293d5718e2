"""Every optional field and every member of a union that a vendor's library of today can send, once.

It is served, or refused by its name; what is refused stands in the table of docs/api.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.api.openai.responses_items import conversation_of
from start_llm.core.errors import StartLLMError
from tests.api.fakes import read
from tests.api.sdk_values import bodies
from tests.lazy import Package

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
CHAT: Any = Package("openai.types.chat.completion_create_params")
RESPONSES: Any = Package("openai.types.responses.response_create_params")
MESSAGES: Any = Package("anthropic.types.beta.message_create_params")
# The library's type of a body, and a tool that one with a choice of tools needs.
WALKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "Chat": (lambda: CHAT.CompletionCreateParamsBase, {"type": "function", "function": {"name": "x"}}),
    "Responses": (lambda: RESPONSES.ResponseCreateParamsBase, {"type": "function", "name": "x"}),
    "Messages": (lambda: MESSAGES.MessageCreateParamsBase, {"name": "x", "input_schema": {}}),
}


def sent(api: str, body: dict[str, Any], tool: Any) -> Iterator[dict[str, Any]]:
    """The forms in which a body is sent. Anthropic's library has one type for the blocks of all roles."""
    body |= {"tools": [tool]} if "tool_choice" in body else {}
    yield body
    if api == "Messages":
        yield body | {"messages": [message | {"role": "assistant"} for message in body["messages"]]}


def refusals(api: str) -> dict[str, StartLLMError]:
    """By field, without numbers."""
    kind, tool = WALKS[api]
    found: dict[str, StartLLMError] = {}
    all_bodies = [*bodies(kind())]
    assert len(all_bodies) > 300
    for body in all_bodies:
        errors = []
        for variant in sent(api, body, tool):
            try:
                read(api.lower(), **variant)
            except StartLLMError as error:
                errors.append(error)
            else:
                break
        else:
            found[re.sub(r"\[\d+\]", "[]", errors[-1].param or "")] = errors[-1]
    return found


@pytest.mark.parametrize("api", WALKS)
def test_a_field_is_served_or_refused_by_its_name_as_the_docs_say(api: str) -> None:
    found = refusals(api)
    assert all(error.status in (400, 404, 501) for error in found.values())
    assert all(name and error.message.startswith(error.param or "?") for name, error in found.items()), found
    told = set(re.findall(rf"^\| {api} \| `([^`]+)` \| (\d+) \|", DOCS.read_text(), re.M))
    assert {(name, str(error.status)) for name, error in found.items()} == told


def test_what_ran_at_another_server_is_a_call_and_its_result() -> None:
    items = [
        {"type": "message", "role": "user", "content": "What is new?"},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "news"}},
        {"type": "mcp_call", "id": "m", "server_label": "git", "name": "log", "arguments": '{"n":1}', "output": "abc"},
        {"type": "local_shell_call", "call_id": "l", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "l", "output": "a.py"},
        {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a.py"}},
        {"type": "apply_patch_call_output", "call_id": "p", "status": "failed", "output": "no such file"},
        {"type": "tool_search_call", "arguments": {"query": "weather"}},
        {"type": "tool_search_output", "tools": [{"type": "function", "name": "forecast"}]},
        {"type": "message", "role": "assistant", "content": "Nothing."},
    ]
    told, silent = conversation_of(items)
    assert silent == ("input[1] (compaction)",)
    calls = [(call.id, call.name, call.arguments) for message in told for call in message.tool_calls]
    assert calls == [
        ("w", "web_search", '{"type": "search", "query": "news"}'),
        ("m", "git__log", '{"n":1}'),
        ("l", "local_shell", '{"command": ["ls"]}'),
        ("p", "apply_patch", '{"type": "delete_file", "path": "a.py"}'),
        ("tool_search", "tool_search", '{"query": "weather"}'),
    ]
    results = [(message.tool_call_id, message.content) for message in told if message.role == "tool"]
    assert [call_id for call_id, _ in results] == [call[0] for call in calls]
    assert [text for _, text in results[1:]] == ["abc", "a.py", "failed\nno such file", "Tools now available: forecast"]
    assert told[-1].content == "Nothing."
    assert [tool.name for tool in read("responses", input=items).tools] == ["forecast"]


def test_blocks_of_the_vendor_s_server_are_calls_and_results_and_a_compaction_stands_for_what_was_before() -> None:
    search = [{"type": "web_search_result", "title": "News", "url": "u", "encrypted_content": "gAAAA"}]
    said = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "news"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": search},
        {"type": "text", "text": "It rains."},
    ]
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    sent = read("messages", messages=talk).messages
    assert [message.role for message in sent] == ["user", "assistant", "tool", "assistant"]
    assert sent[1].tool_calls[0].name == "web_search" and sent[2].tool_call_id == "s"
    assert "News" in sent[2].content and "gAAAA" not in sent[2].content
    said.insert(2, {"type": "compaction", "content": "They spoke of the weather."})
    sent = read("messages", messages=talk).messages
    assert [(message.role, message.content) for message in sent] == [
        ("user", "They spoke of the weather."),
        ("assistant", "It rains."),
    ]
