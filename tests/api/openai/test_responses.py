"""Responses with the official client; every event checked against its typed models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from start_llm.api.openai.responses_items import unseal
from start_llm.api.openai.responses_stream import seal
from start_llm.core.errors import OutOfMemory
from start_llm.core.events import Failed, TextDelta, TokenLogprob, ToolCallDelta, ToolCallFinished, ToolCallStarted
from start_llm.core.messages import Message, ToolCall
from tests.api.fakes import FIRST, TURN, FakeService, answer
from tests.api.fakes import read as reading
from tests.vendors import openai, openai_event

TOOL: Any = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}


def test_whole_response(client: openai.OpenAI, service: FakeService) -> None:
    service.script = lambda request: answer(*TURN, finish="tool_calls")
    response = client.responses.create(
        model="gpt-x", input="Hi", instructions="Be brief.", tools=[TOOL], include=["reasoning.encrypted_content"]
    )
    openai.types.responses.Response.model_validate(response.to_dict(), strict=False)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[0].content[0].text == "think hard"
    assert unseal(response.output[0].encrypted_content) == "think hard"
    assert response.output_text == "I look."
    assert (response.output[2].call_id, response.output[2].arguments) == ("call_a", '{"path": "x"}')
    assert response.status == "completed"
    assert response.usage.input_tokens_details.cached_tokens == 100
    assert response.usage.start_llm["computed"] == 20
    assert service.requests[0].messages == (Message("system", "Be brief."), Message("user", "Hi"))
    assert client.responses.input_tokens.count(model="gpt-x", input="Hi").input_tokens == 42


def test_a_call_that_was_cut_is_incomplete(client: openai.OpenAI, service: FakeService) -> None:
    cut = [
        ToolCallStarted(0, "call_a", "read"),
        ToolCallDelta(0, '{"path": "a'),
        ToolCallFinished(0, "call_a", "read", '{"path": "a'),
    ]
    service.script = lambda request: answer(*cut, finish="length")
    response = client.responses.create(model="m", input="Hi", tools=[TOOL])
    events = list(client.responses.create(model="m", input="Hi", tools=[TOOL], stream=True))
    streamed = next(event.item for event in events if event.type == "response.output_item.done")
    for item in (response.output[0], streamed, events[-1].response.output[0]):
        assert (item.type, item.status, item.arguments) == ("function_call", "incomplete", '{"path": "a')


def test_incomplete_and_failed(client: openai.OpenAI, service: FakeService) -> None:
    service.script = lambda request: answer(TextDelta("a"), finish="length")
    response = client.responses.create(model="m", input="Hi")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert list(client.responses.create(model="m", input="Hi", stream=True))[-1].type == "response.incomplete"
    service.script = lambda request: [FIRST, TextDelta("a"), Failed(OutOfMemory("too big"))]
    last = list(client.responses.create(model="m", input="Hi", stream=True))[-1]
    openai_event().validate_python(last.to_dict())
    assert (last.type, last.response.error.code, last.response.error.message) == (
        "response.failed", "server_error", "too big",
    )  # fmt: skip


def test_logprobs(client: openai.OpenAI, service: FakeService) -> None:
    service.script = lambda request: answer(TextDelta("a", 0, (TokenLogprob(7, -0.5, ((8, -1.0),)),)))
    response = client.responses.create(model="m", input="Hi", top_logprobs=1)
    assert response.output[0].content[0].logprobs[0].top_logprobs[0].token == "<8>"


def test_stored_responses(client: openai.OpenAI, service: FakeService) -> None:
    service.script = lambda request: answer(*TURN[:4])
    first = client.responses.create(model="m", input="One", instructions="Old.")
    events = list(client.responses.create(model="m", input="Two", previous_response_id=first.id, stream=True))
    second = events[-1].response
    client.responses.create(model="m", input="Three", previous_response_id=second.id, instructions="New.")
    said = Message("assistant", "I look.", reasoning="think hard")
    assert service.requests[-1].messages == (
        Message("system", "New."), Message("user", "One"), said, Message("user", "Two"), said, Message("user", "Three"),
    )  # fmt: skip
    assert client.responses.retrieve(first.id).output_text == "I look."
    assert len(client.responses.input_items.list(second.id).data) == 4
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        client.responses.create(model="m", input="x", previous_response_id=first.id)
    assert client.responses.retrieve(second.id).id == second.id
    unstored = client.responses.create(model="m", input="One", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_tools_that_run_elsewhere_are_noted(client: openai.OpenAI, service: FakeService) -> None:
    inner = [{"type": "mcp", "server_label": "far"}, TOOL, {"type": "hologram", "name": "h"}]
    near = {"type": "namespace", "name": "near", "description": "All.", "tools": inner}
    tools: Any = [TOOL, {"type": "web_search"}, near]
    response = client.responses.create(model="m", input="Hi", tools=tools, metadata={"k": "v"})
    _, tool = service.requests[0].tools
    assert (tool.name, tool.description) == ("near__read", "About all tools named near__*: All.")
    assert response.metadata["k"] == "v"
    warnings = response.metadata["start_llm_warnings"]
    assert "tools[1] (web_search, type web_search)" in warnings
    assert "tools[2].tools[0] (far, type mcp)" in warnings and "tools[2].tools[2] (h, type hologram)" in warnings


CLIENTS_TOOLS: Any = [
    TOOL,
    {"type": "namespace", "name": "agents", "description": "", "tools": [TOOL]},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
]  # fmt: skip
NAMED_TURN = [
    ToolCallStarted(0, "call_a", "agents__read"),
    ToolCallFinished(0, "call_a", "agents__read", '{"path": "x"}'),
    ToolCallStarted(1, "call_b", "patch"),
    ToolCallFinished(1, "call_b", "patch", '{"input": "+a\\n-b\\ud83d\\ude00"}'),
]


def test_history_has_the_models_names(client: openai.OpenAI, service: FakeService) -> None:
    """What comes back, by the client or out of the store, are the calls that the model made."""
    service.script = lambda request: answer(*NAMED_TURN, finish="tool_calls")
    first = client.responses.create(model="m", input="Hi", tools=CLIENTS_TOOLS)
    results: Any = [
        {"type": "function_call_output", "call_id": "call_a", "output": "A"},
        {"type": "custom_tool_call_output", "call_id": "call_b", "output": "B"},
    ]
    client.responses.create(model="m", input=results, tools=CLIENTS_TOOLS, previous_response_id=first.id)
    sent: Any = [{"role": "user", "content": "Hi"}, *[item.to_dict() for item in first.output], *results]
    client.responses.create(model="m", input=sent)
    calls = (ToolCall("call_a", "agents__read", '{"path": "x"}'), ToolCall("call_b", "patch", '{"input": "+a\\n-b😀"}'))
    assert service.requests[1].messages == service.requests[2].messages == (
        Message("user", "Hi"),
        Message("assistant", tool_calls=calls),
        Message("tool", "A", tool_call_id="call_a"),
        Message("tool", "B", tool_call_id="call_b"),
    )  # fmt: skip


# --- translation ---

read = partial(reading, "responses")


def test_items_of_one_turn_are_one_message() -> None:
    request = read(
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
            {"role": "user", "content": "U"},
            {"type": "reasoning", "summary": [], "encrypted_content": seal("lông")},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "raw"},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok2"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "more"}]},
            {"type": "agent_message", "author": "/root", "recipient": "/root/helper", "content": [
                {"type": "input_text", "text": "Payload:\n"},
                {"type": "encrypted_content", "encrypted_content": "Look."},
            ]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "theirs"}], "encrypted_content": "gAAA"},
        ]
    )  # fmt: skip
    assert request.messages == (
        Message("system", "D"),
        Message("user", "U"),
        Message("assistant", "A", reasoning="lông",
                tool_calls=(ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", '{"input": "raw"}'))),
        Message("tool", "ok", tool_call_id="c1"),
        Message("tool", "ok2", tool_call_id="c2"),
        Message("assistant", reasoning="more"),
        Message("user", "Payload:\nLook."),
        Message("assistant", reasoning="theirs"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "start_llm.1.eJwDAAAAAAE=", "start_llm.2.!!", "start_llm.2.AAA", "start_llm.2.gAAA", "gAAA"]
)
def test_foreign_seals_are_nothing(text: str) -> None:
    assert unseal(text) is None
