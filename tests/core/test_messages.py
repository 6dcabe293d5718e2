"""Calls of one answer that a client sends one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.messages import Message, ToolCall, call_ids, with_calls_together


def answer(calls: int, text: str = "I look.") -> tuple[Message, ...]:
    """An assistant message with calls, and a result for each."""
    new_id = call_ids()
    made = tuple(ToolCall(new_id(), "read", f'{{"path": "{number}"}}') for number in range(calls))
    results = (Message("tool", f"of {call.arguments}", tool_call_id=call.id) for call in made)
    return (Message("assistant", text, tool_calls=made), *results)


def one_by_one(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    said, *results = messages
    pairs = [(replace(said, tool_calls=(call,)), result) for call, result in zip(said.tool_calls, results, strict=True)]
    later = [(replace(each, content=""), result) for each, result in pairs[1:]]
    return tuple(chain.from_iterable([*pairs[:1], *later]))


@given(st.lists(st.integers(1, 300), max_size=4))
def test_what_was_one_answer_is_one_again_and_nothing_else(counts: list[int]) -> None:
    answers = [answer(calls) for calls in counts]
    split = tuple(chain.from_iterable(map(one_by_one, answers)))
    found = with_calls_together(split)
    assert tuple(message for _, message in found) == tuple(chain.from_iterable(answers))
    assert all(replace(message, tool_calls=()) == replace(split[index], tool_calls=()) for index, message in found)
    assert all(message is split[index] for index, message in found if message.role == "tool")


def test_calls_that_belong_to_no_shared_answer_stay_where_they_are() -> None:
    first, second = one_by_one(answer(2))[:2], one_by_one(answer(2, ""))[:2]
    user = Message("user", "And this?")
    foreign = tuple(Message("assistant", tool_calls=(ToolCall(name, "read", "{}"),)) for name in ("a", "b"))
    one = one_by_one(answer(2))
    corrected = replace(one[2], content="I look again.")
    thought = replace(one[2], reasoning="Hm.")
    for messages in (
        (*first, *second),  # two answers
        (*one[:2], user, *one[2:]),  # somebody spoke between them
        foreign,  # ids of somebody else
        (*one[:2], corrected, one[3]),  # words of its own, which nothing may hide
        (*one[:2], thought, one[3]),
    ):
        assert with_calls_together(messages) == list(enumerate(messages))
