"""Which agent a request seems to come from: its product's name, or what its system text says."""

from __future__ import annotations

import pytest

from start_llm.api.common.request import agent_of
from start_llm.core.messages import Message


@pytest.mark.parametrize(
    ("text", "agent", "name"),
    [
        ("", "codex_cli_rs/0.1 (Linux)", "codex_cli_rs"),
        ("", "Mozilla/5.0 (X11)", "browser"),
        ("", "<img src=x>/1", "other"),
        ("", "", "other"),
        ("", "x" * 500, "x" * 40),
        ("", "a\u00e9b/1", "a"),
        ("You are Claude Code, a helper", "axios/1", "claude code"),
        ("You are an expert coding assistant operating inside pi, a coding agent harness.", "OpenAI/JS 6.1", "pi"),
        ("You are Cline, an AI coding agent.", "OpenAI/JS 6.1", "cline"),
        ("You know pi: 3.14.", "OpenAI/JS 6.1", "OpenAI"),
    ],
)
def test_an_agent_has_a_name(text: str, agent: str, name: str) -> None:
    messages = (Message("system", text), Message("user", "hi")) if text else ()
    assert agent_of(messages, {"User-Agent": agent}) == name
