"""The measure itself: what counts as new."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.counting import CLOSING, MARKUP, OPENING, TOOL_MARKUP, TRANSIENT, NewTokens, is_opening

SYSTEM = {"role": "system", "content": "You help.\nToday: Monday"}
ASK = {"role": "user", "content": "Look."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "a.py\nb.py\n"}


def body(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.fixture
def new() -> NewTokens:
    """Tokens are characters here."""
    return NewTokens(len)


def test_a_first_request_is_new_altogether(new: NewTokens) -> None:
    assert new.count(body(SYSTEM, ASK)) == len("You help.\nToday: Monday" + "Look.") + 2 * len(MARKUP) + len(OPENING)


def test_what_was_generated_is_not_new_and_its_result_is(new: NewTokens) -> None:
    new.count(body(SYSTEM, ASK))
    assert new.count(body(SYSTEM, ASK, CALL, RESULT)) == len("a.py\nb.py\n") + len(TOOL_MARKUP) + len(CLOSING + OPENING)


def test_the_same_result_again_is_new_again(new: NewTokens) -> None:
    new.count(body(SYSTEM, ASK, CALL, RESULT))
    again = body(SYSTEM, ASK, CALL, RESULT, CALL, RESULT)
    assert new.count(again) == len("a.py\nb.py\n") + len(TOOL_MARKUP) + len(CLOSING + OPENING)


def test_only_the_changed_line_of_a_changed_text_is_new(new: NewTokens) -> None:
    new.count(body(SYSTEM, ASK))
    changed = {"role": "system", "content": "You help.\nToday: Tuesday"}
    assert new.count(body(changed, ASK)) == len("Today: Tuesday") + len(OPENING)


def test_a_text_that_moved_is_not_new(new: NewTokens) -> None:
    new.count(body(SYSTEM, ASK))
    assert new.count(body(ASK, SYSTEM)) == len(OPENING)


def test_a_transient_message_is_new_every_time(new: NewTokens) -> None:
    transient = {"role": "user", "content": TRANSIENT}
    new.count(body(SYSTEM, ASK, transient))
    assert new.count(body(SYSTEM, ASK, transient)) == len(TRANSIENT) + len(MARKUP) + len(OPENING)


def test_dialects_and_openings() -> None:
    assert is_opening(body(SYSTEM, ASK)) and not is_opening(body(SYSTEM, ASK, CALL, RESULT))
    assert is_opening({"input": "hi"}) and not is_opening({"input": [ASK, {"type": "function_call", "name": "ls"}]})
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}
    assert NewTokens(len).count({"messages": [result]}) == len("x") + len(TOOL_MARKUP) + len(OPENING)


def test_white_space_that_a_client_adds_is_not_new(new: NewTokens) -> None:
    new.count(body(SYSTEM, {"role": "user", "content": "Look.\nNow\n"}))
    assert new.count(body(SYSTEM, {"role": "user", "content": "Look.  \nNow  \n"})) == len(OPENING)


def test_replies_that_a_client_makes_up_are_new(new: NewTokens) -> None:
    new.count(body(SYSTEM, ASK))
    more = [{"role": "assistant", "content": text} for text in ("Generated.", "Ok.")]
    assert new.count(body(SYSTEM, ASK, *more)) == len("Ok.") + len(MARKUP) + len(CLOSING + OPENING)
