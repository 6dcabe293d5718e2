"""``context_management``: what is cleared, when, and what the answer says of it."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from start_llm.api.anthropic.context import apply, edits_of
from start_llm.api.server import ApiServer
from start_llm.clients.agent import CLEARED_RESULT
from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message, ToolCall
from tests.api.attacks import MESSAGES
from tests.api.fakes import FakeService
from tests.api.test_limits import post

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


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"edits": [{"type": "clear_all"}]}, "edits[0].type"),
        ({"edits": {"a": 1}}, "context_management.edits"),
        ({"edits": [{"type": USES, "keep": {"type": "tool_uses", "value": -1}}]}, "edits[0].keep.value"),
        ({"edits": [{"type": USES, "exclude_tools": "read"}]}, "edits[0].exclude_tools"),
    ],
)
def test_a_wrong_edit_is_refused_by_its_place(given: dict[str, Any], name: str) -> None:
    with pytest.raises(BadRequest) as error:
        edits_of(given)
    assert name in error.value.message and name in (error.value.param or "")


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
    status, answer = post(server, MESSAGES, json.dumps(body).encode())
    assert status == 200 and json.loads(answer)["context_management"] == told
    shown = [message.content for message in service.requests[-1].messages if message.role == "tool"]
    assert shown == [CLEARED_RESULT] * 2 + ["result 2", "result 3", "result 4"]
    _, stream = post(server, MESSAGES, json.dumps(body | {"stream": True}).encode())
    assert f'"context_management":{json.dumps(told, separators=(",", ":"))}' in stream.replace(" ", "")
    status, counted = post(server, f"{MESSAGES}/count_tokens", json.dumps(body).encode())
    assert json.loads(counted) == {"input_tokens": 42, "context_management": {"original_input_tokens": 42}}
