"""Chat bodies to requests: what their messages become. Other fields: `tests/api/test_reading.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.messages import Message, ToolCall
from tests.api.fakes import read as reading

TEXT = {"type": "text", "text": "a"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


read = partial(reading, "chat")


def messages(*items: dict[str, Any]) -> tuple[Message, ...]:
    return read(messages=list(items)).messages


def test_roles_and_contents_keep_their_place() -> None:
    assert messages(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a", "x": {}}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "later"},
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1"}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"b": "é"}}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
    ) == (
        Message("system", "be brief"),
        Message("user", "ab"),
        Message("system", "later"),
        Message(
            "assistant", "", reasoning="why",
            tool_calls=(ToolCall("c1", "f", '{"a": 1'), ToolCall("c2", "g", '{"b": "é"}')),
        ),
        Message("tool", "ok", tool_call_id="c1"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"content": "No.", "refusal": "I must not."}, "No.\nI must not."),
        ({"content": None, "refusal": "I must not."}, "I must not."),
        ({"content": None, "audio": {"id": "a", "transcript": "Hi there."}}, "Hi there."),
        ({"content": "Hi there.", "audio": {"id": "a", "transcript": "Hi there."}}, "Hi there."),
        ({"content": "Hi there.", "audio": {"id": "a"}}, "Hi there."),
    ],
)
def test_all_that_an_assistant_said_is_shown(given: dict[str, Any], shown: str) -> None:
    assert messages({"role": "assistant"} | given)[0] == Message("assistant", shown)


def test_a_spoken_answer_without_words_is_refused_by_its_name() -> None:
    with pytest.raises(NotSupported, match=r"messages\[0\]\.audio: .* send what was said"):
        messages({"role": "assistant", "content": None, "audio": {"id": "a"}})


def test_there_must_be_something_to_continue() -> None:
    last = {"role": "assistant", "content": "So"}
    assert read(messages=[{"role": "user", "content": "Hi"}, last], continue_final_message=True).messages[-1].content
    with pytest.raises(BadRequest, match="continue_final_message: the last message"):
        read(continue_final_message=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "why"},
        {"reasoning": "why"},
        {"thinking_blocks": [{"type": "thinking", "thinking": "why"}]},
        {"content": [{"type": "thinking", "thinking": "why"}, TEXT]},
        {"content": [{"type": "thinking", "thinking": [TEXT | {"text": "why"}]}, TEXT]},
    ],
)
def test_reasoning_comes_in_many_shapes(fields: dict[str, Any]) -> None:
    assert messages({"role": "assistant", "content": "a"} | fields) == (Message("assistant", "a", reasoning="why"),)


def test_reasoning_of_an_unknown_shape_is_shown_as_it_is() -> None:
    sent = {"role": "assistant", "content": "a", "reasoning": [{"text": "why"}]}
    assert messages(sent)[0].reasoning == '[{"text": "why"}]'


def test_legacy_functions() -> None:
    request = read(
        functions=[{"name": "f"}],
        function_call={"name": "f"},
        messages=[
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "r"},
        ],
    )
    assert request.tools[0].name == "f"
    assert (request.tool_choice.mode, request.tool_choice.name) == ("named", "f")
    assert request.messages[1].tool_call_id == request.messages[0].tool_calls[0].id


def user(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}


@pytest.mark.parametrize(
    "body",
    [
        user({"type": "input_audio"}),
        user({"type": "file"}),
        {"modalities": ["text", "audio"]},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
    ],
)
def test_what_is_not_supported_says_so(body: dict[str, Any]) -> None:
    with pytest.raises(NotSupported):
        read(**body)


def test_half_an_emoji_is_mended() -> None:
    assert messages({"role": "user", "content": "a\ud83d b\ud83d\ude00"})[0].content == "a\ufffd b\U0001f600"


def test_more_candidates_than_answers_are_not_made() -> None:
    assert read(n=2, best_of=2).n == 2
    with pytest.raises(NotSupported, match="best_of"):
        read(n=2, best_of=3)
