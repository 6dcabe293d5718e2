from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from scripts import bench_notes
from scripts.bench.note_cases import STATE, TOOLS, Case, cases, system_text
from scripts.bench.role_cases import role_cases
from scripts.bench.withdrawn_cases import withdrawn_cases
from start_llm.prompt.textdiff import withdraws


def test_lines_that_are_gone_are_shown_as_sent_not_told_by_a_note() -> None:
    gone = list(withdrawn_cases())
    assert all(case.role is not None and not re.search(case.forbid, case.role) for case in gone)
    assert len(gone) == 60 and all(withdraws(case.first, case.role or "") for case in gone)


@pytest.mark.parametrize("case", [*cases(), *role_cases()], ids=lambda case: f"{case.kind}-{case.name}")
def test_a_case_is_about_something_that_changed(case: Case) -> None:
    first = (system_text(()), TOOLS, (case.reminder or (None, None))[0])
    now = (case.role or system_text(case.edits), case.tools, (case.reminder or (None, None))[1])
    between = system_text(case.before) if case.before is not None else first[0]
    assert now != first or between != first[0]
    re.compile(case.expect), re.compile(case.forbid)


@pytest.mark.parametrize(
    ("text", "right"),
    [("It is release/4.2.", True), ("It was main, now release/4.2", False), ("main", False), ("", False)],
)
def test_an_answer_is_right_if_it_says_the_new_value_only(text: str, right: bool) -> None:
    assert bench_notes.is_right(cases()[0], text) is right


def test_the_first_turn_is_asked_once_and_edits_hold_in_the_last() -> None:
    asked: list[list[dict[str, Any]]] = []

    def ask(session: str, messages: Sequence[dict[str, Any]], *more: Any) -> Any:
        asked.append(list(messages))
        usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 7}}
        return {"choices": [{"message": {"content": "release/4.2"}}], "usage": usage}

    conversation = bench_notes.Conversation(ask)
    changed, back = cases()[0], next(case for case in cases() if case.kind == "changed back")
    assert conversation.answer(changed).right
    assert conversation.answer(back).computed == 3
    assert [len(messages) for messages in asked] == [2, 4, 4, 6]
    assert [STATE[0] in messages[0]["content"] for messages in asked] == [True, False, False, True]
