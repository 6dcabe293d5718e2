"""Anthropic messages with the official client; every event checked against its typed models."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from start_llm.api.anthropic.context import apply, edits_of
from start_llm.api.server import ApiServer
from start_llm.clients.agent import CLEARED_RESULT
from start_llm.core.errors import ContextLengthExceeded, NotSupported, OutOfMemory
from start_llm.core.events import Failed, TextDelta
from start_llm.core.messages import Message, ToolCall
from start_llm.core.protocol import anthropic_error, thinking_signature
from tests.api.fakes import FIRST, TURN, USER, FakeService, answer
from tests.api.fakes import read as reading
from tests.api.test_limits import post
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


# --- ``context_management``: what is cleared, when, and what the answer says of it ---

USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def talk(calls: int) -> tuple[Message, ...]:
    """Each call's tool is ``read``, every third one's ``look``; its result has ten words."""
    said = [Message("user", "Go")]
    for number in range(calls):
        name = "look" if number % 3 == 2 else "read"
        call = ToolCall(f"c{number}", name, json.dumps({"path": f"{number}.py"}))
        said.append(Message("assistant", "", reasoning=f"Thought {number}", tool_calls=(call,)))
        said.append(Message("tool", f"result {number} " + "word " * 8, tool_call_id=call.id))
    return tuple(said)


def words(messages: tuple[Message, ...]) -> int:
    return sum(len(f"{message.content} {message.reasoning or ''}".split()) for message in messages)


def cleared(edit: dict[str, Any], calls: int = 6) -> tuple[list[int], list[dict[str, Any]], tuple[Message, ...]]:
    """The numbers of the results that were cleared, what is told, and all messages."""
    before = talk(calls)
    after, told = apply(before, edits_of({"edits": [edit]}), words)
    assert [message.role for message in after] == [message.role for message in before]
    results = [message for message in after if message.role == "tool"]
    return [number for number, one in enumerate(results) if one.content == CLEARED_RESULT], told, after


def tool_uses(value: int, kind: str = "tool_uses") -> dict[str, Any]:
    return {"type": kind, "value": value}


tokens = partial(tool_uses, kind="input_tokens")


@pytest.mark.parametrize(
    ("more", "numbers"),
    [
        ({}, []),  # 100,000 tokens are not reached
        ({"trigger": tokens(60)}, [0, 1, 2]),
        ({"trigger": tokens(500)}, []),
        ({"trigger": tool_uses(5)}, [0, 1, 2]),
        ({"trigger": tool_uses(6)}, []),
        ({"trigger": tool_uses(5), "keep": tool_uses(0)}, [0, 1, 2, 3, 4, 5]),
        ({"trigger": tool_uses(5), "keep": tool_uses(9)}, []),
        ({"trigger": tool_uses(5), "exclude_tools": ["look"], "keep": tool_uses(1)}, [0, 1, 3]),
        ({"trigger": tool_uses(5), "clear_at_least": tokens(15)}, [0, 1, 2]),
        ({"trigger": tool_uses(5), "clear_at_least": tokens(16)}, []),
    ],
)
def test_results_are_cleared_as_the_api_says(more: dict[str, Any], numbers: list[int]) -> None:
    found, told, after = cleared({"type": USES, **more})
    assert found == numbers
    assert [edit["cleared_tool_uses"] for edit in told] == ([len(numbers)] if numbers else [])
    assert all(edit["cleared_input_tokens"] == words(talk(6)) - words(after) for edit in told)
    assert [m.tool_calls for m in after] == [m.tool_calls for m in talk(6)]


@pytest.mark.parametrize(("inputs", "emptied"), [(True, [0, 1, 2]), (["read"], [0, 1]), (False, []), (["x"], [])])
def test_inputs_of_cleared_calls_go_where_that_is_asked(inputs: Any, emptied: list[int]) -> None:
    _, _, after = cleared({"type": USES, "trigger": tool_uses(5), "clear_tool_inputs": inputs})
    calls = [call.arguments for message in after for call in message.tool_calls]
    assert [number for number, arguments in enumerate(calls) if arguments == "{}"] == emptied


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, 1),
        ({"keep": "all"}, 6),
        ({"keep": {"type": "all"}}, 6),
        ({"keep": {"type": "thinking_turns", "value": 2}}, 2),
    ],
)
def test_thoughts_of_old_turns_go(keep: dict[str, Any], left: int) -> None:
    found, told, after = cleared({"type": THINKING, **keep})
    assert found == [] and [m.reasoning for m in after if m.reasoning] == [f"Thought {n}" for n in range(6)][6 - left :]
    assert [edit["cleared_thinking_turns"] for edit in told] == ([6 - left] if left < 6 else [])


def test_the_answer_tells_and_the_count_has_both(server: ApiServer, service: FakeService) -> None:
    uses = [{"type": "tool_use", "id": f"c{n}", "name": "read", "input": {}} for n in range(5)]
    results = [{"type": "tool_result", "tool_use_id": f"c{n}", "content": f"result {n}"} for n in range(5)]
    said = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
    ]
    edit = {"type": USES, "trigger": tool_uses(4)}
    body = {"messages": said, "max_tokens": 5, "context_management": {"edits": [edit]}}
    told = {"applied_edits": [{"type": USES, "cleared_tool_uses": 2, "cleared_input_tokens": 0}]}
    status, answer = post(server, "/v1/messages", json.dumps(body).encode())
    assert status == 200 and json.loads(answer)["context_management"] == told
    shown = [message.content for message in service.requests[-1].messages if message.role == "tool"]
    assert shown == [CLEARED_RESULT] * 2 + ["result 2", "result 3", "result 4"]
    _, stream = post(server, "/v1/messages", json.dumps(body | {"stream": True}).encode())
    assert f'"context_management":{json.dumps(told, separators=(",", ":"))}' in stream.replace(" ", "")
    status, counted = post(server, "/v1/messages/count_tokens", json.dumps(body).encode())
    assert json.loads(counted) == {"input_tokens": 42, "context_management": {"original_input_tokens": 42}}
