"""Requests: what counts as a side request, efforts, names of conversations, calls that a client sends one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.messages import Message, Tool, ToolCall, call_ids, with_calls_together
from start_llm.core.protocol import AGENT_HEADER, SESSION_FIELDS, SESSION_HEADERS, session_of
from start_llm.core.request import (
    MOST_CHARACTERS,
    MOST_TOKENS,
    ChatRequest,
    is_side_request,
    names_tools,
    with_known_effort,
)

TITLE = ChatRequest(
    "chatcmpl-1",
    "chat",
    "m",
    messages=(Message("system", "Write a title."), Message("user", "Repair add.")),
    max_tokens=64,
)


def test_a_title_is_one_by_its_few_tokens_or_by_its_little_effort() -> None:
    assert is_side_request(TITLE) and is_side_request(replace(TITLE, dialect="messages", max_tokens=MOST_TOKENS))
    assert is_side_request(replace(TITLE, max_tokens=8192, reasoning_effort="low"))
    assert is_side_request(replace(TITLE, dialect="responses", max_tokens=None, reasoning_effort="minimal"))


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": None},
        {"max_tokens": MOST_TOKENS + 1},
        {"max_tokens": 8192, "reasoning_effort": "high"},
        {"tools": (Tool("read"),)},
        {"n": 2},
        {"dialect": "completions"},
        {"messages": TITLE.messages[1:]},
        {"messages": TITLE.messages[:1]},
        {"messages": (*TITLE.messages, Message("assistant", "Adding"), Message("user", "Shorter."))},
        {"messages": (*TITLE.messages, Message("tool", "out", tool_call_id="c"))},
        {"messages": (TITLE.messages[0], Message("user", "This.", images=("sha",)))},
        {"messages": (TITLE.messages[0], Message("user", "x" * MOST_CHARACTERS))},
    ],
)
def test_without_one_of_the_signs_it_is_none(change: dict[str, Any]) -> None:
    assert not is_side_request(replace(TITLE, **change))


def test_tools_count_whether_or_not_the_model_is_shown_them() -> None:
    assert names_tools({"tools": [{"type": "web_search"}]}) and names_tools({"functions": [{"name": "f"}]})
    assert names_tools({"input": [{"type": "additional_tools", "tools": [{"type": "mcp"}]}]})
    assert not names_tools({"tools": [], "input": "hi"}) and not names_tools({"input": [{"role": "user"}]})
    assert not names_tools([])


@pytest.mark.parametrize(
    ("asked", "thinking", "gets"),
    [
        ("none", None, "low"),
        ("minimal", True, "low"),
        ("medium", True, "medium"),
        ("xhigh", True, "high"),
        ("max", True, "high"),
        (None, False, "low"),
        (None, None, None),
        (None, True, None),
    ],
)
def test_an_effort_is_one_that_the_model_was_trained_with(
    asked: str | None, thinking: bool | None, gets: str | None
) -> None:
    request = replace(TITLE, reasoning_effort=asked, thinking=thinking, template_kwargs={"reasoning_effort": asked})
    found = with_known_effort(request, ("low", "medium", "high"))
    assert (found.reasoning_effort, found.template_kwargs["reasoning_effort"]) == (gets, gets)
    assert with_known_effort(request, ()) is request


CLAUDE = "user_1_account_2_session_00ff-11"


@pytest.mark.parametrize(
    ("body", "headers", "found"),
    [
        *(({name: "s1"}, {}, ("s1", name)) for name in SESSION_FIELDS),
        *(({}, {name: "s1"}, ("s1", name)) for name in SESSION_HEADERS),
        ({"session_id": 7}, {}, ("7", "session_id")),
        ({"metadata": {"thread_id": "s1"}}, {}, ("s1", "metadata.thread_id")),
        ({"extra_body": {"chat_id": "s1"}}, {}, ("s1", "extra_body.chat_id")),
        ({"metadata": {"user_id": CLAUDE}}, {}, ("00ff-11", "metadata.user_id.session_id")),
        ({"metadata": {"user_id": '{"device": "d", "session_id": "s1"}'}}, {}, ("s1", "metadata.user_id.session_id")),
        ({"session_id": "first", "metadata": {"session_id": "last"}}, {"x-session-id": "h"}, ("first", "session_id")),
        ({"session_id": "s1"}, {AGENT_HEADER: "a"}, ("s1/a", "session_id")),
        ({}, {"x-session-id": "s1", AGENT_HEADER: "a"}, ("s1/a", "x-session-id")),
        # no names: people, groups, values of other kinds, a sub-agent of nobody
        ({"user": "u", "prompt_cache_key": "k", "metadata": {"user_id": "u"}}, {}, ("", "")),
        ({"session_id": True, "thread_id": "", "chat_id": None, "conversation_id": {"id": "c"}}, {}, ("", "")),
        ({"metadata": {"user_id": "{" * 1000}, "extra_body": ["s"]}, {AGENT_HEADER: "a"}, ("", "")),
    ],
)
def test_where_a_name_is_found(body: dict[str, Any], headers: dict[str, str], found: tuple[str, str]) -> None:
    assert session_of(body, headers) == found


def answer(calls: int, text: str = "I look.") -> tuple[Message, ...]:
    """An assistant message with calls, and a result for each."""
    new_id = call_ids()
    made = tuple(ToolCall(new_id(), "read", f'{{"path": "{number}"}}') for number in range(calls))
    results = (Message("tool", f"of {call.arguments}", tool_call_id=call.id) for call in made)
    return (Message("assistant", text, tool_calls=made), *results)


def one_by_one(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    said, *results = messages
    pairs = [(replace(said, tool_calls=(call,)), result) for call, result in zip(said.tool_calls, results, strict=True)]
    later = [(replace(each, content=""), result) for each, result in pairs[1:]]
    return tuple(chain.from_iterable([*pairs[:1], *later]))


@given(st.lists(st.integers(1, 300), max_size=4))
def test_what_was_one_answer_is_one_again_and_nothing_else(counts: list[int]) -> None:
    answers = [answer(calls) for calls in counts]
    split = tuple(chain.from_iterable(map(one_by_one, answers)))
    found = with_calls_together(split)
    assert tuple(message for _, message in found) == tuple(chain.from_iterable(answers))
    assert all(replace(message, tool_calls=()) == replace(split[index], tool_calls=()) for index, message in found)
    assert all(message is split[index] for index, message in found if message.role == "tool")


def test_calls_that_belong_to_no_shared_answer_stay_where_they_are() -> None:
    first, second = one_by_one(answer(2))[:2], one_by_one(answer(2, ""))[:2]
    user = Message("user", "And this?")
    foreign = tuple(Message("assistant", tool_calls=(ToolCall(name, "read", "{}"),)) for name in ("a", "b"))
    one = one_by_one(answer(2))
    corrected = replace(one[2], content="I look again.")
    thought = replace(one[2], reasoning="Hm.")
    for messages in (
        (*first, *second),  # two answers
        (*one[:2], user, *one[2:]),  # somebody spoke between them
        foreign,  # ids of somebody else
        (*one[:2], corrected, one[3]),  # words of its own, which nothing may hide
        (*one[:2], thought, one[3]),
    ):
        assert with_calls_together(messages) == list(enumerate(messages))
