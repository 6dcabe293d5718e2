"""White space is content: what a client corrects is shown as it is sent, what it merely trims is shown as generated."""

from __future__ import annotations

import pytest

from start_llm.core.messages import Message
from tests.prompt.client import CLAUDE, Client, pipeline, system_text

ANSWER = "  - one\n  - two, and then some words that nobody else says\n"


def second_turn(system: str, user: str, answer: str, changed_user: str, changed_answer: str) -> tuple[str, int]:
    """The prompt's text, and how many of its first tokens the first turn had, its answer included."""
    client = Client("chatml", pipeline("chatml"), tools=(), session="s")
    client.ask(system_text(system), Message("user", user))
    known = client.answer(Message("assistant", answer))
    client.messages[1:] = [Message("user", changed_user), Message("assistant", changed_answer)]
    tokens = client.ask(Message("user", "Go on.")).prompt.tokens
    same = next((at for at, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), len(known))
    return client.text, len(known) - same


@pytest.mark.parametrize("system", [CLAUDE, "You are a helper."])
@pytest.mark.parametrize(
    "corrected",
    [f"\t{ANSWER}", f"{ANSWER}\n\n", ANSWER.replace("  - one", " \t- one"), f" {ANSWER.strip()}  "],
    ids=["a tab before", "lines behind", "a tab for a blank", "other blanks"],
)
def test_an_answer_that_a_client_corrects_is_shown_as_it_is_sent(system: str, corrected: str) -> None:
    text, _ = second_turn(system, "What?", ANSWER, "What?", corrected)
    assert f"assistant\n{corrected}<|im_end|>" in text


@pytest.mark.parametrize("system", [CLAUDE, "You are a helper."])
@pytest.mark.parametrize("trimmed", [ANSWER, ANSWER.strip(), ANSWER.rstrip(), ANSWER.lstrip()])
def test_an_answer_that_a_client_trims_costs_nothing(system: str, trimmed: str) -> None:
    assert second_turn(system, "What?", ANSWER, "What?", trimmed)[1] == 0


@pytest.mark.parametrize("system", [CLAUDE, "You are a helper."])
@pytest.mark.parametrize("changed", ["\tcode", "code", "    code  "])
def test_a_user_s_blanks_are_shown_as_they_are_sent(system: str, changed: str) -> None:
    text, _ = second_turn(system, "    code", ANSWER, changed, ANSWER)
    assert f"user\n{changed}<|im_end|>" in text
