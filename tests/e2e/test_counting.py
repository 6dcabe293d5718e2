"""The measure itself: what counts as new."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.counting import CLOSING, MARKUP, OPENING, TOOL_MARKUP, TRANSIENT, NewTokens, is_opening

SYSTEM = {"role": "system", "content": "You help.\nToday: Monday"}
ASK = {"role": "user", "content": "Look."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "a.py\nb.py\n"}
TOLD = {"role": "user", "content": TRANSIENT}
MADE_UP = [{"role": "assistant", "content": text} for text in ("Generated.", "Ok.")]
FIRST = "You help.\nToday: Monday" + "Look." + 2 * MARKUP + OPENING
GOES_ON = "a.py\nb.py\n" + TOOL_MARKUP + CLOSING + OPENING


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        pytest.param([], [SYSTEM, ASK], FIRST, id="a first request altogether"),
        pytest.param([SYSTEM, ASK], [SYSTEM, ASK, CALL, RESULT], GOES_ON, id="the result, not what was generated"),
        pytest.param([SYSTEM, ASK, CALL, RESULT], [SYSTEM, ASK, *[CALL, RESULT] * 2], GOES_ON, id="that result again"),
        pytest.param(
            [SYSTEM, ASK],
            [{"role": "system", "content": "You help.\nToday: Tuesday"}, ASK],
            "Today: Tuesday" + OPENING,
            id="only the changed line",
        ),
        pytest.param([SYSTEM, ASK], [ASK, SYSTEM], OPENING, id="not a text that moved"),
        pytest.param([SYSTEM, ASK, TOLD], [SYSTEM, ASK, TOLD], TRANSIENT + MARKUP + OPENING, id="a transient message"),
        pytest.param(
            [{"role": "user", "content": "Look.\nNow\n"}],
            [{"role": "user", "content": "Look.  \nNow  \n"}],
            OPENING,
            id="not white space",
        ),
        pytest.param([SYSTEM, ASK], [SYSTEM, ASK, *MADE_UP], f"Ok.{MARKUP}{CLOSING}{OPENING}", id="made-up replies"),
    ],
)
def test_what_is_new(before: list[dict[str, Any]], now: list[dict[str, Any]], new: str) -> None:
    """Tokens are characters here."""
    counter = NewTokens(len)
    if before:
        counter.count({"messages": before})
    assert counter.count({"messages": now}) == len(new)


def test_dialects_and_openings() -> None:
    assert is_opening({"messages": [SYSTEM, ASK]}) and not is_opening({"messages": [SYSTEM, ASK, CALL, RESULT]})
    assert is_opening({"input": "hi"}) and not is_opening({"input": [ASK, {"type": "function_call", "name": "ls"}]})
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}
    assert NewTokens(len).count({"messages": [result]}) == len("x") + len(TOOL_MARKUP) + len(OPENING)
