"""An answer that repeats itself is ended, as a cut answer is; reasoning that does, or is too long, is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.parsing.repetition import ANYTHING_REPEATS, WORDS_REPEAT
from tests.integration.live import Live, live
from tests.kinds import some
from tests.model_thread import on_model_thread
from tests.oracle import make_tokenizer, script

LOOP = "the door opens again and " * 400  # some 2,800 tokens
PERIOD = 7  # tokens of it
TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
THOUGHT = " ".join(f"thought number {i}" for i in range(60))


def ask(server: Live, text: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    body = {"model": "default", "messages": [{"role": "user", "content": script(text)}], "max_tokens": 6000, **more}
    answer = server.post("/v1/chat/completions", json=body).json()
    return answer["choices"][0], answer["usage"]["start_llm"]


def places(words: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Where an answer may say these words: the whole text, and fields of the request."""
    call = f'<tool_call>{{"name": "write", "arguments": {{"text": "{words}"}}}}</tool_call>'
    return {
        "text": (f"Well:{words}", {}),
        "arguments": (call, {"tools": [TOOL]}),
        "reasoning": (f"<think>\nWell:{words}</think>\n\nSo it is.", {"enable_thinking": True}),
    }


@pytest.mark.parametrize(
    ("where", "drafts"), some([("text", False), ("arguments", True), ("text", True), ("arguments", False)])
)
def test_it_is_ended_as_a_cut_answer(servers: Callable[..., Live], where: str, drafts: bool) -> None:
    text, more = places(f" {LOOP}")[where]
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


def test_reasoning_ends_with_its_budget(servers: Callable[..., Live]) -> None:
    asked = [{"role": "user", "content": script(f"<think>\n{THOUGHT}\n</think>\n\nSo it is.")}]

    def thought(**thinking: Any) -> str:
        body = {"model": "claude-local", "max_tokens": 400, "messages": asked, "thinking": thinking}
        answer = servers("plain").post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["content"][0]["thinking"]).strip()

    assert thought(type="adaptive") == THOUGHT
    cut = thought(type="enabled", budget_tokens=20)
    assert THOUGHT.startswith(cut) and 0 < len(cut) < len(THOUGHT) / 4


# --- where drafts and a head say a part of it at once ---


@pytest.fixture(scope="module")
def headed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model with a small one that drafts for it, and says the same."""
    with live(folders["plain"], tmp_path_factory.mktemp("headed"), draft_model=str(folders["plain"])) as server:
        assert on_model_thread(server.app, lambda model, _: type(model).__name__) == "HeadedModel"
        yield server


def loop(period: int, tokens: int) -> str:
    """So many tokens of a text that repeats so many different words, each of which is one token."""
    tokenizer = make_tokenizer()
    words = [
        text for text in sorted(tokenizer.get_vocab()) if text[0] == "\u0120" and text[1:].isalpha() and len(text) > 4
    ]
    text = "".join(" " + word[1:] for word in words[:period])
    assert len(tokenizer.encode(text * 3).ids) == 3 * period
    return text * (tokens // period)


@pytest.mark.usefixtures("indexed", "cheap_passes")
@pytest.mark.parametrize("period", some((1, 2, 7, 40, 128)))
@pytest.mark.parametrize("where", some(["text", "reasoning", "arguments"]))
def test_a_loop_is_ended_as_soon_with_drafts_and_a_head(headed: Live, where: str, period: int) -> None:
    certain = ANYTHING_REPEATS if period == 1 else WORDS_REPEAT  # one word again and again is no text's loop yet
    text, more = places(loop(period, certain + 1024))[where]
    choice, report = ask(headed, text, **more)
    assert report["repeated"] == period and certain < report["generated"] < certain + 512, report
    assert report["copied"] + report["headed"] > certain / 2
    if where == "reasoning":
        assert choice["finish_reason"] == "stop" and "cut" not in report
    else:
        assert choice["finish_reason"] == "length" and report["cut"] == "repetition"
