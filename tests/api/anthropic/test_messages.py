"""Anthropic messages with the official client; every event checked against its typed models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from start_llm.api.server import ApiServer
from start_llm.core.errors import ContextLengthExceeded, NotSupported, OutOfMemory
from start_llm.core.events import Failed, TextDelta
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
