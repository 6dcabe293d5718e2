"""Answers that repeat themselves are ended as soon where drafts and a head say a part of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from start_llm.parsing.repetition import ANYTHING_REPEATS, WORDS_REPEAT
from tests.integration.live import Live, live
from tests.integration.test_repetition import TOOL, ask
from tests.kinds import some
from tests.model_thread import on_model_thread
from tests.oracle.build import make_tokenizer

pytestmark = pytest.mark.usefixtures("indexed", "cheap_passes")
PERIODS = (1, 2, 7, 40, 128)


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


@pytest.mark.parametrize("period", some(PERIODS))
@pytest.mark.parametrize("where", some(["text", "reasoning", "arguments"]))
def test_a_loop_is_ended_as_soon_with_drafts_and_a_head(headed: Live, where: str, period: int) -> None:
    certain = ANYTHING_REPEATS if period == 1 else WORDS_REPEAT  # one word again and again is no text's loop yet
    said = loop(period, certain + 1024)
    text, more = {
        "text": (f"Well:{said}", {}),
        "reasoning": (f"<think>\nWell:{said}</think>\n\nSo it is.", {"enable_thinking": True}),
        "arguments": (
            f'<tool_call>{{"name": "write", "arguments": {{"text": "{said}"}}}}</tool_call>',
            {"tools": [TOOL]},
        ),
    }[where]
    choice, report = ask(headed, text, **more)
    assert report["repeated"] == period and certain < report["generated"] < certain + 512, report
    assert report["copied"] + report["headed"] > certain / 2
    if where == "reasoning":
        assert choice["finish_reason"] == "stop" and "cut" not in report
    else:
        assert choice["finish_reason"] == "length" and report["cut"] == "repetition"
