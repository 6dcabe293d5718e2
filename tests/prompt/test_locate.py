"""Explaining: a prompt token is led back to its message, field and rule."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import pytest

from start_llm.core.messages import Message, ToolCall, call_ids
from start_llm.core.report import Miss
from tests.kinds import some
from tests.prompt.client import BASH, OPENCLAW, READ, RULES, Client, pipeline, request, say
from tests.prompt.models import TEMPLATES, model

TALK = [
    Message("system", f"{OPENCLAW}\nYou are the zebra helper.\nCurrent time is yellow\n{RULES}"),
    Message("user", "Please paint the fence."),
    say("Now walking over.", "Thinking about brushes.", bash={"command": "ls garden"}),
    Message("tool", "hammer and nails", tool_call_id="call_bash"),
    Message("user", "Paint it twice.\n[message_id: pink42]"),
]


def where(family: str, word: str, messages: list[Message] = TALK):
    pipe = pipeline(family)
    prepared = pipe.prepare(request(messages, (READ, BASH)), thinking=True)
    return pipe.locate(prepared, Miss("policy", first_with(word, family, prepared.prompt.tokens)))


def first_with(word: str, family: str, tokens: Sequence[int]) -> int:
    """The token with which `word` is there for the first time."""
    decode = model(family)[1].decode
    return bisect_left(range(len(tokens)), True, key=lambda index: word in decode(tokens[: index + 1]))


@pytest.mark.parametrize("family", some(["qwen35", "chatml", "glm4"]))
@pytest.mark.parametrize(
    ("word", "message", "field", "rule"),
    [
        ("zebra", 0, "system", None),
        ("yellow", 0, "system", None),
        ("Please paint", 1, "content", None),
        ("brushes", 2, "reasoning", None),
        ("walking", 2, "content", None),
        ("ls garden", 2, "tool_calls", None),
        ("nails", 3, "content", None),
        ("pink42", 4, "content", "message_id"),
    ],
)
def test_a_token_is_led_back(family, word, message, field, rule):
    found = where(family, word)
    if family == "qwen35" and field == "reasoning":
        assert found.message == message  # PRESERVE_THINKING shows it
    assert (found.message, found.field, found.rule) == (message, field, rule)
    assert word.split()[-1][-3:] in found.found


@pytest.mark.parametrize("family", TEMPLATES)
def test_tools_and_the_generation_prompt_have_no_message(family):
    if family != "gemma":
        found = where(family, "Runs a command", TALK[:2])
        assert (found.field in ("tools", "system")) and found.rule is None
    pipe = pipeline(family)
    prepared = pipe.prepare(request(TALK[:2]), thinking=True)
    if prepared.prompt.generation < len(prepared.prompt.tokens):
        last = pipe.locate(prepared, Miss("policy", len(prepared.prompt.tokens) - 1))
        assert (last.message, last.field) == (None, "generation")


def test_places_are_those_of_the_client_that_sends_calls_of_one_answer_apart():
    new_id = call_ids()
    calls = [ToolCall(new_id(), "bash", f'{{"command": "{word}"}}') for word in ("hammering", "sawing")]
    sent = [Message("user", "Please paint."), Message("assistant", "Walking.", tool_calls=(calls[0],))]
    sent += [Message("tool", "yellow", tool_call_id=calls[0].id), Message("assistant", tool_calls=(calls[1],))]
    sent += [Message("tool", "nails", tool_call_id=calls[1].id), Message("user", "Then zebra.")]
    found = {word: where("chatml", word, sent).message for word in ("paint", "Walking", "yellow", "nails", "zebra")}
    assert found == {"paint": 0, "Walking": 1, "yellow": 2, "nails": 4, "zebra": 5}
    prepared = pipeline("chatml").prepare(request(sent, (BASH,)), thinking=True)
    assert prepared.request.messages == tuple(sent), "a router is told of the messages as they were sent"
    assert [len(one.tool_calls) for one in prepared.view.messages] == [0, 2, 0, 0, 0]
    pipe = pipeline("chatml", cache_drift_policy="strict")
    prepared = pipe.prepare(request(sent, (BASH,)), thinking=True)
    token = first_with("sawing", "chatml", prepared.prompt.tokens)
    assert pipe.locate(prepared, Miss("policy", token)).message == 3 and prepared.view.messages == sent


def test_a_note_is_called_one():
    client = Client("chatml", pipeline("chatml"), tools=())
    client.ask(*TALK[:2])
    client.answer(TALK[2])
    client.messages[0] = Message("system", TALK[0].content.replace("yellow", "purple"))
    prepared = client.ask(*TALK[3:])
    found = client.pipe.locate(prepared, Miss("policy", first_with("purple", "chatml", prepared.prompt.tokens)))
    assert (found.message, found.field) == (4, "note") and "purple" in client.text


def test_a_raw_prompt_has_only_text():
    pipe = pipeline("chatml")
    prepared = pipe.prepare(request([], prompt="one two three"), thinking=False)
    found = pipe.locate(prepared, Miss("policy", 0))
    assert (found.message, found.field) == (None, "prompt") and "one" in found.found
