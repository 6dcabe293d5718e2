"""Anthropic messages with the official client; every event checked against its typed models."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from start_llm.api.server import ApiServer
from start_llm.core.errors import BadRequest, ContextLengthExceeded, NotSupported, OutOfMemory, StartLLMError
from start_llm.core.events import (
    Failed,
    TextDelta,
)
from start_llm.core.messages import Message, ToolCall
from start_llm.core.protocol import anthropic_error, thinking_signature
from tests.api.fakes import FIRST, TURN, USER, FakeService, answer
from tests.api.fakes import read as reading
from tests.vendors import anthropic

TOOL: Any = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


@pytest.fixture
def client(server: ApiServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_whole_message(client: anthropic.Anthropic, service: FakeService) -> None:
    service.script = lambda request: answer(*TURN, finish="tool_calls")
    message = client.messages.create(
        model="claude-x", max_tokens=50, messages=USER, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "think hard"
    assert message.content[0].signature == thinking_signature("think hard")
    assert message.content[2].input == {"path": "x"}
    assert message.content[3].input == {}
    assert message.stop_reason == "tool_use"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (20, 100, 0)
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (3, 1)
    assert message._request_id == service.requests[0].id
    assert (service.requests[0].thinking, service.requests[0].thinking_budget) == (True, 1024)


@pytest.mark.parametrize(
    ("finish", "sequence", "reason"),
    [("stop", None, "end_turn"), ("length", None, "max_tokens"), ("stop", "END", "stop_sequence"),
     ("cancelled", None, "max_tokens")],
)  # fmt: skip
def test_stop_reasons(
    client: anthropic.Anthropic, service: FakeService, finish: str, sequence: str | None, reason: str
) -> None:
    service.script = lambda request: answer(TextDelta("a"), finish=finish, stop_sequence=sequence)
    message = client.messages.create(model="m", max_tokens=5, messages=USER, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    with client.messages.stream(model="m", max_tokens=5, messages=USER) as stream:
        assert stream.get_final_message().stop_reason == reason


def test_count_tokens_and_scale(client: anthropic.Anthropic, service: FakeService) -> None:
    service.scale = 2.0
    assert client.messages.count_tokens(model="claude-x", messages=USER, system="s").input_tokens == 84
    assert [message.role for message in service.requests[0].messages] == ["system", "user"]
    usage = client.messages.create(model="m", max_tokens=5, messages=USER).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (40, 200, 6)
    with client.messages.stream(model="m", max_tokens=5, messages=USER) as stream:
        assert stream.get_final_message().usage.cache_read_input_tokens == 200


def test_errors(client: anthropic.Anthropic, service: FakeService) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content"):
        client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": 5}])  # type: ignore[typeddict-item]
    service.script = lambda request: [FIRST, TextDelta("a"), Failed(OutOfMemory("too big"))]
    with pytest.raises(anthropic.APIStatusError, match="too big"):
        list(client.messages.create(model="m", max_tokens=5, messages=USER, stream=True))


def test_context_errors_are_in_the_vendors_words() -> None:
    error = anthropic_error(ContextLengthExceeded(prompt=210, asked=10, limit=200))
    assert error["error"]["message"] == "prompt is too long: 210 tokens > 200 maximum"
    error = anthropic_error(ContextLengthExceeded(prompt=195, asked=10, limit=200))
    assert "exceed context limit: 195 + 10 > 200" in error["error"]["message"]


# --- translation ---

read = partial(reading, "messages")


def test_a_conversation_keeps_its_order() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    request = read(
        system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "S"} | mark],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"} | mark]},
            {"role": "system", "content": "inside"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "why", "signature": "s"},
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"é": 1}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "ok"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
                 "content": [{"type": "text", "text": "no"}]},
                {"type": "text", "text": "go on"},
            ]},
        ],
    )  # fmt: skip
    assert request.messages == (
        Message("system", "x-anthropic-billing-header: cch=1;\nS"),
        Message("user", "a\nb"),
        Message("system", "inside"),
        Message(
            "assistant", "I look.", reasoning="why\n[redacted thinking]",
            tool_calls=(ToolCall("t1", "f", '{"é": 1}'), ToolCall("t2", "g", "{}")),
        ),
        Message("tool", "ok", tool_call_id="t1"),
        Message("tool", "no", tool_call_id="t2", is_error=True),
        Message("user", "go on"),
    )  # fmt: skip


def test_thinking_and_effort() -> None:
    assert read().thinking is False
    assert read(thinking={"type": "adaptive"}).thinking is True
    assert read(thinking={"type": "disabled"}).thinking is False
    assert read(output_config={"effort": "high"}).reasoning_effort == "high"


def test_tools_and_choice() -> None:
    request = read(tools=[TOOL], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    assert (request.tool_choice.mode, request.tool_choice.name, request.parallel_tool_calls) == ("named", "f", False)
    assert read(tools=[TOOL], tool_choice={"type": "any"}).tool_choice.mode == "required"
    assert read(tool_choice={"type": "none"}).tool_choice.mode == "none"
    assert read(tools=[TOOL], tool_choice={"type": "auto", "name": None}).tool_choice.mode == "auto"
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert read(output_config={"format": schema}).response_format.kind == "json_schema"


def test_sub_agents_have_sessions_of_their_own() -> None:
    metadata = {"user_id": json.dumps({"device_id": "d", "session_id": "s"})}
    assert read(metadata=metadata).session == "s"
    assert read({"x-claude-code-agent-id": "a"}, metadata=metadata).session == "s/a"


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"x-session-id": "s" * 1025}, {}, "x-session-id"),
        ({"x-session-id": "s", "x-claude-code-agent-id": "a" * 1024}, {}, "x-claude-code-agent-id"),
        ({}, {"metadata": {"user_id": json.dumps({"session_id": "s" * 1025})}}, "metadata.user_id.session_id"),
        ({}, {"extra_body": {"chat_id": "s" * 1025}}, "extra_body.chat_id"),
    ],
)
def test_a_name_that_is_too_long_is_told_where_it_stands(
    headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        read(headers, **fields)
    assert refused.value.param == param and str(refused.value).startswith(f"{param}: at most 1,024 characters")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}]},
            "messages[0].content[0].input",
        ),
        ({"system": 4}, "system"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "f"}]}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL | {"strict": "yes"}]}, "tools[0].strict"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"stop_sequences": "END", "thinking": {"type": "maybe"}}, "thinking.type"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(StartLLMError) as caught:
        read(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_text_documents_and_references_are_text() -> None:
    content = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
        {"type": "search_result", "title": "R", "source": "u", "content": [{"type": "text", "text": "C"}]},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "f"}]},
    ]
    request = read(messages=[{"role": "user", "content": content}])
    assert [message.content for message in request.messages] == ["Tool now available: f", "T\nD\nR\nu\nC"]
    with pytest.raises(NotSupported) as caught:
        read(messages=[{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}])
    assert caught.value.param == "messages[0].content[0]"


def test_a_schema_knows_its_field() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert read(output_config={"format": form}).response_format.param == "output_config.format.schema"
    request = read(output_format=form, model=None)
    assert request.response_format.param == "output_format.schema" and request.model == ""
