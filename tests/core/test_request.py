"""What counts as a side request: every sign is needed. Which effort a model is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from start_llm.core.messages import Message, Tool
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
