"""What is the same and who is the same: places, calls, tools, owners, clocks, and what a report says without proof."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.prompt.note import NOTE_OPEN
from start_llm.prompt.pipeline import Pipeline
from tests.prompt.client import (
    BASH,
    CLAUDE,
    OPENCLAW,
    READ,
    Client,
    numbered,
    pipeline,
    request,
    say,
    stripped,
    system_text,
)
from tests.prompt.models import model

FAMILY = "chatml"
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
LONG = "I looked at it, and this is what there is: " + "a line of it, " * 30
RESULT = Message("tool", "a listing", tool_call_id="call_bash")


def plainly(pipe: Pipeline, messages: list[Message], answer: Message, **who: str) -> Message:
    """A turn of a client that strips thoughts; returns the answer as it keeps it."""
    prepared = pipe.prepare(request(messages, **who), thinking=True)
    pipe.record(prepared, answer, model(FAMILY)[1].encode(f"<think>\n{answer.reasoning}\n</think>\n\n{answer.content}"))
    return replace(answer, reasoning=None)


# --- 1.1 messages of declared blocks only -----------------------------------------------------------------------------


def reminded(*reminders: str, system: str = CLAUDE) -> list[Message]:
    return [system_text(system), *(Message("user", REMINDER.format(text)) for text in reminders), Message("user", "Go")]


@pytest.mark.parametrize("system", [CLAUDE, "You are Qwen Code, an interactive CLI agent."])
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (("Plan mode.", "Be quick."), ("Plan mode.", "Be slow."), ["Be slow."]),
        (("Plan mode.", "Be quick."), ("Build mode.", "Be quick."), ["Build mode."]),
        (("Plan mode.", "Be quick."), ("Plan mode.",), ["withdrawn: Be quick."]),
        (("Plan mode.",), ("Plan mode.", "Be quick."), ["Be quick."]),
        (("Plan mode.", "Be quick."), (), ["withdrawn: Plan mode.", "withdrawn: Be quick."]),
    ],
)
def test_each_message_of_a_block_only_has_a_slot_of_its_own(system, before, after, told):
    client = Client(FAMILY, pipeline(FAMILY))
    client.ask(*reminded(*before, system=system))
    spoken = client.answer(say(LONG, bash={"command": "ls"}))
    client.messages[: len(before) + 2] = reminded(*after, system=system)
    prepared = client.ask(RESULT)
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    note = client.text.partition(NOTE_OPEN)[2]
    assert [words for words in told if words not in note] == []
    unchanged = set(before) & set(after)
    assert not any(words in note for words in unchanged)


def test_of_two_blocks_of_a_message_the_first_goes_and_the_second_is_not_told_as_withdrawn():
    client = Client(FAMILY, pipeline(FAMILY))
    client.ask(system_text(CLAUDE), Message("user", f"{REMINDER.format('Plan.')}\n{REMINDER.format('Be short.')}\nGo"))
    spoken = client.answer(say(LONG, bash={"command": "ls"}))
    client.messages[1] = Message("user", f"{REMINDER.format('Be short.')}\nGo")
    prepared = client.ask(RESULT)
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    note = client.text.partition(NOTE_OPEN)[2]
    assert "-Plan." in note and "withdrawn" not in note
    client.answer(say(LONG, bash={"command": "ls"}))
    client.messages[1] = Message("user", "Go")
    assert "withdrawn: Be short." in "".join(client.ask(RESULT).notes)


def test_blocks_behind_a_result_and_in_a_message_of_their_own_are_two():
    client = Client(FAMILY, pipeline(FAMILY))
    client.ask(system_text(CLAUDE), Message("user", "Go"))
    client.answer(say(LONG, bash={"command": "ls"}))
    client.ask(RESULT, Message("user", REMINDER.format("First.")), Message("user", REMINDER.format("Second.")))
    assert "First." in client.text and "Second." in client.text
    spoken = client.answer(say(LONG, bash={"command": "ls"}))
    del client.messages[4]  # the first reminder
    prepared = client.ask(RESULT)
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    assert "-First." in prepared.notes and "withdrawn" not in "".join(prepared.notes)
    assert client.text.rindex("Second.") > client.text.rindex("First.") or "now" in "".join(prepared.notes)


# --- 1.2 equal means equal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "sent"),
    [
        *(({"path": "x"}, {"path": "x", "force": added}) for added in (False, None, "", [], {}, 0, True)),
        *(({"x": one}, {"x": other}) for one, other in ((False, 0), (True, 1), (None, ""), (1, 1.5), ("1", 1))),
    ],
)
def test_a_member_of_a_call_that_the_client_added_or_whose_type_it_changed_is_shown(made, sent):
    client = Client(FAMILY, pipeline(FAMILY))
    client.ask(system_text("You help."), Message("user", "Go"))
    client.answer(say(LONG, bash=made))
    edited = replace(client.messages[-1].tool_calls[0], arguments=json.dumps(sent))
    client.messages[-1] = replace(client.messages[-1], tool_calls=(edited,))
    client.ask(RESULT)
    assert json.dumps(sent) in client.text


def habitual(pipe: Pipeline, system: str, *, name: str = "Edit", ours: bool = True) -> tuple[Client, tuple[int, ...]]:
    """A turn with an edit, to which the client adds what it always adds."""
    client = Client(FAMILY, pipe, tools=(Tool(name, "Edits", {"type": "object"}),))
    client.ask(system_text(system), Message("user", "Go"))
    arguments = {"file_path": "a.py"}
    call = ToolCall(numbered(1), name, json.dumps(arguments))
    spoken = client.answer(Message("assistant", LONG, None, (call,)))
    written = ToolCall(call.id if ours else "toolu_other", name, json.dumps(arguments | {"replace_all": False}))
    client.messages[-1] = Message("assistant", LONG, None, (written,))
    client.ask(Message("tool", "done", tool_call_id=written.id))
    return client, spoken


def test_a_habit_of_a_client_makes_no_other_call():
    client, spoken = habitual(pipeline(FAMILY), CLAUDE)
    assert client.prepared is not None and client.prepared.prompt.tokens[: len(spoken)] == spoken


@pytest.mark.parametrize(
    ("system", "name", "ours"), [("You help.", "Edit", True), (CLAUDE, "Remove", True), (CLAUDE, "Edit", False)]
)
def test_a_habit_is_one_clients_one_tools_and_needs_proof(system, name, ours):
    client, _ = habitual(pipeline(FAMILY), system, name=name, ours=ours)
    assert '"replace_all": false' in client.text


def test_a_tool_whose_schema_says_one_instead_of_true_is_another_tool():
    def tool(value: object) -> Tool:
        return Tool("read", "Reads", {"type": "object", "additionalProperties": value})

    client = Client(FAMILY, pipeline(FAMILY), tools=(tool(True),))
    client.ask(system_text("You help."), Message("user", "Go"))
    client.answer(say(LONG, None, read={"path": "x"}))
    client.tools = (tool(1),)
    client.ask(Message("tool", "text", tool_call_id="call_read"))
    assert '"additionalProperties": 1' in client.text


# --- calls' ids -------------------------------------------------------------------------------------------------------


def looked(pipe: Pipeline, thought: str, number: int) -> Client:
    """Two turns, alike in all words: only the thoughts and the ids of calls tell one such conversation from another."""
    client = Client("qwen35", pipe, echo=stripped)
    client.ask(system_text("You help."), Message("user", "Go"))
    client.answer(say(LONG, thought, number, bash={"command": "ls"}))
    client.messages.append(Message("tool", "a listing", tool_call_id=numbered(number)))
    return client


def test_of_conversations_of_equal_words_each_goes_on_with_its_own_thoughts() -> None:
    pipe = pipeline("qwen35")
    first, second = looked(pipe, "the first thought", 1), looked(pipe, "the second thought", 2)
    for client, own, other in ((first, "first", "second"), (second, "second", "first")):
        assert client.goes_on(client.ask())
        assert f"the {own} thought" in client.text and f"the {other} thought" not in client.text


def test_calls_that_another_server_made_are_not_shown_with_the_thoughts_of_this_one() -> None:
    """The same words, and ids like those that this server makes: they are random, so it did not make these."""
    pipe = pipeline("qwen35")
    looked(pipe, "the first thought", 1)
    elsewhere = looked(pipeline("qwen35"), "the second thought", 2)
    elsewhere.pipe = pipe
    elsewhere.ask()
    assert "first thought" not in elsewhere.text


# --- 1.3 owners -------------------------------------------------------------------------------------------------------


def numbers(pipe: Pipeline, messages: list[Message], **who: str) -> tuple[object, ...]:
    """All that is told of a request."""
    prepared = pipe.prepare(request(messages, (BASH, READ), **who), thinking=True)
    told = (prepared.new, prepared.miss, prepared.rendering.taken, prepared.notes)
    return (*told, prepared.prompt.tokens, prepared.prompt.system_end)


def test_a_guess_of_another_ones_message_changes_no_number():
    """Whatever "a" has said: what "b" is told is what a server tells that never saw "a"."""
    talk = [system_text("You help.", "Mode: plan"), Message("user", "The secret is 4711."), Message("assistant", LONG)]
    guesses = [
        [*talk, Message("user", "More")],
        [*talk[:2], Message("assistant", "Yes."), Message("user", "More")],
        [talk[0], Message("user", "The secret is 4712."), *talk[2:], Message("user", "More")],
        [talk[0], Message("user", "x"), Message("assistant", "y"), *talk[1:], Message("user", "More")],
    ]
    for session in (None, "s"):
        who = {"owner": "b"} | ({"session": session} if session else {})
        pipe, fresh = pipeline(FAMILY), pipeline(FAMILY)
        for mine in (pipe, fresh):
            plainly(mine, [system_text("You help.", "Mode: plan"), Message("user", "Hello")], say("Hi."), **who)
        names = {"owner": "a"} | ({"session": session} if session else {})
        plainly(pipe, talk[:2], say(LONG, "Thoughts."), **names)
        plainly(pipe, [*talk, Message("user", "More")], say(LONG, "More thoughts."), **names)
        pipe.sent(pipe.prepare(request(guesses[2], (READ, BASH), **names), thinking=True))
        for guess in guesses:
            assert numbers(pipe, guess, **who) == numbers(fresh, guess, **who)


def test_a_cleared_result_is_the_owners_own():
    cleared = Message("tool", "[Old tool result content cleared]", tool_call_id="call_bash")
    talk = [system_text(OPENCLAW), Message("user", "Go"), say(LONG, None, bash={"x": 1})]
    pipe, fresh = pipeline(FAMILY), pipeline(FAMILY)
    plainly(pipe, [*talk, replace(RESULT, content="a's secret")], say(LONG), owner="a")
    guess = [*talk, cleared, Message("assistant", LONG), Message("user", "More")]
    assert numbers(pipe, guess, owner="b") == numbers(fresh, guess, owner="b")


def notes_of(pipe: Pipeline, owner: str, sessions: tuple[str, str]) -> str:
    """The tag of a note in a conversation that changes its name on the way."""
    head = [system_text("You help.", "Mode: plan"), Message("user", "Go")]
    answer = say(LONG, None, bash={"x": 1})
    kept = plainly(pipe, head, answer, owner=owner, session=sessions[0])
    talk = [*head, kept, RESULT]
    kept = plainly(pipe, talk, say(LONG, None, bash={"x": 1}), owner=owner, session=sessions[1])
    talk = [system_text("You help.", "Mode: build"), *talk[1:], kept, RESULT]
    prepared = pipe.prepare(request(talk, owner=owner, session=sessions[1]), thinking=True)
    text = model(FAMILY)[1].decode(prepared.prompt.tokens)
    assert prepared.notes and NOTE_OPEN in text
    return text.partition(NOTE_OPEN)[2].partition(" ")[0]


def test_a_nonce_has_32_bits_and_is_new_for_each_owner_and_session():
    pipe = pipeline(FAMILY)
    tags = [notes_of(pipe, owner, names) for owner in ("a", "b") for names in (("s", "s"), ("s", "t"), ("u", "u"))]
    assert len(set(tags)) == len(tags)
    assert all(len(tag) == 6 for tag in tags)  # base64


# --- 1.6 clocks -------------------------------------------------------------------------------------------------------


def chat_with(line: str) -> Client:
    """A plain chat: neither tools nor a name."""
    client = Client(FAMILY, pipeline(FAMILY), tools=(), owner="ann")
    client.ask(system_text("You help.", line.format(0)), Message("user", "Go"))
    return client


def test_a_clock_needs_no_name_once_64_tokens_were_generated():
    client = chat_with("Now: 2026-11-22 10:0{}:00 UTC")
    spoken = client.answer(say(LONG, "My thoughts."))
    for turn in range(1, 4):
        client.messages[0] = system_text("You help.", f"Now: 2026-11-22 10:0{turn}:00 UTC")
        client.messages[-1] = replace(client.messages[-1], reasoning=None)
        prepared = client.ask(Message("user", f"More {turn}"))
        assert prepared.prompt.tokens[: len(spoken)] == spoken and prepared.miss is None
        assert f"10:0{turn}:00" in "".join(prepared.notes)
        assert prepared.new == len(prepared.prompt.tokens) - len(spoken)
        spoken = client.answer(say("Short.", "Hm."))


def test_without_64_tokens_a_clock_is_shown_as_sent():
    client = chat_with("Now: 10:0{}")
    client.answer(say("Yes.", None))
    client.messages[0] = system_text("You help.", "Now: 10:05")
    prepared = client.ask(Message("user", "More"))
    assert prepared.notes == () and prepared.miss is not None and prepared.miss.reason == "unproved"
    # A name would not help: a clock needs none.
    assert prepared.miss.remedy == "" and "fewer than 64 tokens were generated" in prepared.miss.detail


# --- 2 a miss without a base is a miss --------------------------------------------------------------------------------


@pytest.mark.parametrize(("sessions", "remedy"), [((None, "s"), "one session_id"), (("s", None), "one session_id")])
def test_a_name_that_comes_or_goes_is_told(sessions, remedy):
    pipe = pipeline(FAMILY)
    head = [system_text("You help.", "Mode: plan"), Message("user", "Go")]
    kept = plainly(pipe, head, say(LONG, "Hm."), **({"session": sessions[0]} if sessions[0] else {}))
    talk = [system_text("You help.", "Mode: build"), head[1], kept, Message("user", "More")]
    named = {"session": sessions[1]} if sessions[1] else {}
    miss = pipe.prepare(request(talk, **named), thinking=True).miss
    assert miss is not None and miss.reason == "unproved" and remedy in miss.remedy


def test_another_message_in_the_history_has_diverged():
    client = chat_with("x")
    for turn in range(3):
        client.answer(say(f"{turn}: {LONG}", None))
        prepared = client.ask(Message("user", f"More {turn}"))
        assert prepared.miss is None
    client.messages[3] = Message("user", "Something else")
    prepared = client.ask(Message("user", "And?"))
    miss = prepared.miss
    assert miss is not None and (miss.reason, miss.message, miss.field) == ("diverged", 3, "content")
    tokens = model(FAMILY)[1].encode(LONG)
    assert 0 < prepared.new < len(tokens)  # the long answers behind it were sent before


def test_what_was_sent_is_not_new_though_it_was_never_answered():
    pipe = pipeline(FAMILY)
    talk = [system_text("You help."), Message("user", "Go")]
    first = pipe.prepare(request(talk), thinking=True)
    assert first.new == len(first.prompt.tokens) == pipe.prepare(request(talk), thinking=True).new
    pipe.sent(first)
    assert pipe.prepare(request(talk), thinking=True).new == 0
    other = pipe.prepare(request([talk[0], Message("user", "Stop")]), thinking=True)
    assert 8 <= other.new <= len(other.prompt.tokens) - first.prompt.system_end
    assert pipe.prepare(request(talk, owner="b"), thinking=True).new == len(first.prompt.tokens)
    raw = pipe.prepare(request([], prompt="one two three " * 99), thinking=False)
    pipe.sent(raw)
    assert pipe.prepare(request([], prompt="one two three " * 99), thinking=False).new == 0
    assert pipe.prepare(request([], prompt="one two three " * 99, owner="b"), thinking=False).new == raw.new


def test_an_answer_that_was_given_twice_in_the_same_words_is_nobody_elses() -> None:
    """The client showed the second one, which was asked for with another system text that cannot be proved."""
    client = Client("qwen35", pipeline("qwen35"), echo=stripped, tools=())
    client.ask(system_text("You are an agent."), Message("user", "Go"))
    client.answer(say(LONG, "the first thought"))
    client.messages = [system_text("You are another one."), client.messages[1]]
    client.ask()
    client.answer(say(LONG, "the second thought"))
    client.messages[0] = system_text("You are an agent.")
    prepared = client.ask(Message("user", "And?"))
    text = model("qwen35")[1].decode(prepared.prompt.tokens)
    assert prepared.view.base is None and "first thought" not in text and "second thought" not in text
