"""Requests with tens of thousands of declared places, calls or changed lines: reading them takes a second, not hours.

Each of these once took the square of its size. The limits are generous, pytest-timeout ends what does not come back.
"""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.messages import Message, ToolCall
from start_llm.prompt.clients import BUILT_IN, ClientRules, Clients, DeclaredPlace, Rule, find_parts
from start_llm.prompt.reading import ChainReader, call_id, facts_of
from start_llm.prompt.textdiff import diff

COUNT = 40_000
BY_NAME = {client.name: client for client in BUILT_IN}
REMINDER = "<system-reminder>x</system-reminder>\n"
LARGE = {
    "reminders at the start": ("claude_code", REMINDER * COUNT + "hi", COUNT),
    "reminders at the end": ("claude_code", "hi\n" + REMINDER * COUNT, COUNT),
    "reminders that nothing closes": ("claude_code", "hi\n" + "<system-reminder>\n" * COUNT + "x", 0),
    "reminders that are closed too late": (
        "claude_code", "hi\n" + "<system-reminder>\n" * COUNT + "x</system-reminder>\nbye", 0,
    ),
    "ids of messages": ("openclaw", "hi\n" + "[message_id: 1]\n" * COUNT, COUNT),
    "statistics": ("openclaw", "hi\n" + "Stats: runtime\n" * COUNT + "bye", COUNT),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LARGE)
def test_declared_places(name: str) -> None:
    client, text, count = LARGE[name]
    facts = facts_of(Message("user", text), BY_NAME[client])
    assert len(facts.parts) == count
    assert facts.counts


@pytest.mark.timeout(60)
def test_calls_and_their_results() -> None:
    calls = tuple(ToolCall(f"call_{i}", "f", "{}") for i in range(COUNT // 4))
    results = [Message("tool", "r", tool_call_id=call.id) for call in reversed(calls)]
    messages = [Message("user", "x"), Message("assistant", "", tool_calls=calls), *results]
    reading = ChainReader(Clients()).read(messages, None)
    assert len(reading.keys) == 2 + len(calls)


def test_of_hundreds_of_calls_each_result_belongs_to_its_own() -> None:
    calls = tuple(ToolCall(f"call_{number}", "read", "{}") for number in range(600))
    reader, keys = ChainReader(Clients()), set()
    for answered in (*range(600), "unknown"):
        result = Message("tool", "a listing", tool_call_id=f"call_{answered}")
        keys.add(reader.read([Message("assistant", "", tool_calls=calls), result], None).last_key)
    assert len(keys) == 601


def test_ids_of_megabytes_are_told_apart_by_a_digest() -> None:
    long = "Call " * 1_000_000
    assert len(call_id(long)) < 100
    assert len({call_id(long), call_id(long + "x"), call_id(long.lower()), call_id("call")}) == 4
    assert call_id("Call_0-1") == "call01" and call_id(None) == ""


@pytest.mark.timeout(60)
def test_changed_lines_far_down() -> None:
    before = [f"line {i}" for i in range(8 * COUNT)]
    after = [f"{line}!" if i > len(before) - 2_000 and i % 2 else line for i, line in enumerate(before)]
    lines = diff("\n".join(before), "\n".join(after))
    assert lines is not None and lines[-2:] == [f"line {len(before)}, now:", f"+line {len(before) - 1}!"]


# --- the quick way finds what the plain one finds ---


def plainly(rules: list[Rule], text: str) -> list[tuple[str, int, int]]:
    """The blocks at the end of a text, by looking at all of it for each."""
    found, end = [], len(text.rstrip())
    while True:
        for rule in rules:
            places = [one.start() for one in re.finditer(f"^(?:{rule.opens})", text[:end], re.MULTILINE)]
            place = next((at for at in reversed(places) if _closed(rule, text[:end], at) == end), None)
            if place is not None:
                break
        else:
            return found[::-1]
        found.append((rule.name, place, end))
        end = len(text[:place].rstrip())


def _closed(rule: Rule, text: str, at: int) -> int | None:
    opened = re.compile(rule.opens, re.MULTILINE).match(text, at)
    assert opened is not None
    if rule.closes is None:
        return opened.end() if text[opened.end() : opened.end() + 1] in ("", "\n") else None
    closed = re.compile(rule.closes, re.MULTILINE).search(text, opened.end())
    return closed.end() if closed else None


PIECES = [
    "<system-reminder>", "</system-reminder>", "x", "\n", " ", "\t", "[message_id: 1]", "[message_id: 2] ", "\n\n",
    "Stats: runtime", "a <system-reminder>", REMINDER,
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_blocks_at_the_end(text: str) -> None:
    rules = [
        rule.model_copy(update={"place": "end"})
        for client in ("claude_code", "openclaw")
        for rule in BY_NAME[client].rules
        if rule.name in ("reminder_behind", "message_id")
    ]
    client = ClientRules.model_construct(name="both", system="x", rules=tuple(rules))
    found = [(part.rule.name, part.start, part.end) for part in find_parts(Message("user", text), client, "")]
    assert found == plainly(rules, text)
    for part in find_parts(Message("user", text), client, ""):
        assert isinstance(part, DeclaredPlace) and part.text == text[part.start : part.end].strip()


def test_lines_that_go_one_here_one_there_take_no_square() -> None:
    """Each is named by its beginning, if no other line begins so."""

    def seconds(lines: int) -> float:
        gone = [f"{number} {'gone' if number % 2 else 'moved'} {'word ' * 20}" for number in range(lines)]
        texts = "\n".join(gone), "\n".join(["A line that came.", *gone[::-2]])
        times = []
        for _ in range(3):
            began = time.process_time()
            assert diff(*texts) is not None
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(2900) < 30 * seconds(290) + 0.05
