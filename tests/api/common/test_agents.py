"""Which agent a request seems to come from."""

from __future__ import annotations

import pytest

from start_llm.api.common.request import agent_of
from start_llm.core.messages import Message


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("codex_cli_rs/0.1 (Linux)", "codex_cli_rs"),
        ("Mozilla/5.0 (X11)", "browser"),
        ("<img src=x>/1", "other"),
        ("", "other"),
        ("x" * 500, "x" * 40),
        ("a\u00e9b/1", "a"),
    ],
)
def test_it_is_named_by_its_product(agent: str, name: str) -> None:
    assert agent_of((), {"User-Agent": agent}) == name


def test_its_system_text_says_more() -> None:
    messages = (Message("system", "You are Claude Code, a helper"), Message("user", "hi"))
    assert agent_of(messages, {"User-Agent": "axios/1"}) == "claude code"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("You are an expert coding assistant operating inside pi, a coding agent harness.", "pi"),
        ("You are Cline, an AI coding agent.", "cline"),
        ("You know pi: 3.14.", "OpenAI"),
    ],
)
def test_an_agent_that_sends_its_librarys_name_is_known_by_its_words(text: str, name: str) -> None:
    assert agent_of((Message("system", text),), {"User-Agent": "OpenAI/JS 6.1"}) == name
