"""An answer that repeats itself is ended, as a cut answer is; reasoning that does is closed, and the answer begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from start_llm.parsing.repetition import WORDS_REPEAT
from tests.integration.live import Live
from tests.kinds import some
from tests.oracle import script

LOOP = "the door opens again and " * 400  # some 2,800 tokens
PERIOD = 7  # tokens of it
TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}


def ask(server: Live, text: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    body = {"model": "default", "messages": [{"role": "user", "content": script(text)}], "max_tokens": 6000, **more}
    answer = server.post("/v1/chat/completions", json=body).json()
    return answer["choices"][0], answer["usage"]["start_llm"]


@pytest.mark.parametrize(
    ("where", "drafts"),
    [
        ("text", False),
        pytest.param("arguments", True, marks=pytest.mark.thorough),
        pytest.param("text", True, marks=pytest.mark.thorough),
        pytest.param("arguments", False, marks=pytest.mark.thorough),
    ],
)
def test_it_is_ended_as_a_cut_answer(servers: Callable[..., Live], where: str, drafts: bool) -> None:
    call = f'<tool_call>{{"name": "write", "arguments": {{"text": "{LOOP}"}}}}</tool_call>'
    text, more = (f"Well: {LOOP}", {}) if where == "text" else (call, {"tools": [TOOL]})
    choice, report = ask(servers("plain"), text, drafts=drafts, **more)
    assert choice["finish_reason"] == "length" and report["cut"] == "repetition" and report["repeated"] == PERIOD
    assert WORDS_REPEAT < report["generated"] < WORDS_REPEAT + 512


def test_reasoning_is_closed_once_and_the_answer_begins(servers: Callable[..., Live]) -> None:
    """What the oracle says behind the closing tag depends on all that it sees."""
    server = servers("plain")
    choice, report = ask(server, f"<think>\n{LOOP}</think>\n\nSo it is.", enable_thinking=True)
    assert report["repeated"] == PERIOD and WORDS_REPEAT < report["generated"] < 2 * WORDS_REPEAT, report
    assert choice["finish_reason"] == "stop" and "cut" not in report
    assert choice["message"]["reasoning_content"].count("the door opens") > 100
    after, _ = ask(server, "Fine.")
    assert after["message"]["content"] == "Fine."


@pytest.mark.parametrize("how", some(["field", "sound"]))
def test_it_goes_on_where_the_client_says_so_or_nothing_is_wrong(servers: Callable[..., Live], how: str) -> None:
    text = LOOP[: len(LOOP) // 2] if how == "field" else "".join(f"Line {n} of the file is new. " for n in range(150))
    choice, report = ask(servers("plain"), text, repetition_guard=how != "field")
    assert choice["finish_reason"] == "stop" and "cut" not in report and "repeated" not in report
    assert choice["message"]["content"].strip() == text.strip()
