"""What is shown: the same as before up to our last answer, the rest as sent, and a note for what changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from start_llm.core.messages import Message
from start_llm.prompt.note import NOTE_OPEN
from tests.kinds import rounds
from tests.prompt.client import (
    BASH,
    CLAUDE,
    EDIT,
    INTERNAL,
    OPENCLAW,
    READ,
    RULES,
    Client,
    pipeline,
    request,
    say,
    system_text,
)
from tests.prompt.models import TEMPLATES, model

QWEN = "You are Qwen Code, an interactive CLI agent."
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
INFO = 'Conversation info (untrusted metadata):\n```json\n{{\n  "message_id": "{}"\n}}\n```\n\n'
LONG = "I looked at it, and this is what there is: " + "a line of it, " * 30


def rendering(client: Client) -> tuple[int, ...]:
    """The template's rendering of what the client sends, by a pipeline that has seen nothing."""
    fresh = pipeline(client.family, cache_drift_policy="strict")
    return fresh.prepare(request(client.messages, client.tools), thinking=client.thinking).prompt.tokens


def two_turns(first: list[Message], second: list[Message], family: str = "chatml") -> tuple[Client, tuple[int, ...]]:
    """A turn that begins with the messages `first`, then one in which they are `second`."""
    client = Client(family, pipeline(family))
    client.ask(*first)
    spoken = client.answer(say(LONG, bash={"command": "ls"}))
    client.messages[: len(first)] = second
    client.ask(Message("tool", "a listing", tool_call_id="call_bash"))
    return client, spoken


def change(system: str, before: str, after: str, where: str) -> tuple[list[Message], list[Message]]:
    if where == "system":
        return [system_text(system, before), Message("user", "Go")], [system_text(system, after), Message("user", "Go")]
    return [system_text(system), Message("user", before)], [system_text(system), Message("user", after)]


@pytest.mark.parametrize(
    ("system", "where", "before", "after", "told"),
    [
        ("You help.", "system", "Time is 08:20", "Time is 08:21:13", "+Time is 08:21:13"),
        ("You help.", "system", "Mode: plan", "Mode: build", "+Mode: build"),
        ("You help.", "system", "Branch: main\nM x.py", "Branch: main", "-M x.py"),
        (CLAUDE, "user", "Go\n" + REMINDER.format("Old one"), "Go\n" + REMINDER.format("New one"), "New one"),
        (CLAUDE, "user", "Go\n" + REMINDER.format("Plan only"), "Go", "withdrawn"),
        (CLAUDE, "user", "Go", REMINDER.format("Be quick") + "\nGo", "Be quick"),
        (QWEN, "user", REMINDER.format("In:\na.py") + "\n\nGo", REMINDER.format("In:\nb.py") + "\n\nGo", "+b.py"),
        (OPENCLAW, "user", INFO.format("m-1") + "Go", INFO.format("m-2") + "Go", "m-2"),
        (OPENCLAW, "user", "Go\n[message_id: 1]", "Go\n[message_id: 2]", "[message_id: 2]"),
        (OPENCLAW, "user", *(f"Go\n\nRuntime: agent={name} | session=b" for name in "ac"), "Runtime: agent=c"),
        (OPENCLAW, "user", "Done.\nStats: runtime 5s\nEnd", "Done.\nStats: runtime 9s\nEnd", "Stats: runtime 9s"),
    ],
)
def test_a_change_in_a_declared_place_is_told_and_the_prefix_stays(system, where, before, after, told):
    client, spoken = two_turns(*change(system, before, after, where))
    text = client.text
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken
    assert told in text[text.index(NOTE_OPEN) :] and text.index(NOTE_OPEN) > text.index("a listing")
    assert any(told in line for line in client.prepared.notes)
    # the next request is the same again: nothing more to tell, the note stays where it was seen
    spoken = client.answer(say("Again.", bash={"command": "pwd"}))
    prepared = client.ask(Message("tool", "/home", tool_call_id="call_bash"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken and prepared.notes == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Go\n[message_id: 1]", "Go\n[message_id: 2]"),
        ("Go\n" + REMINDER.format("a"), "Go\n" + REMINDER.format("b")),
        ("Go at 10:00, Current time is 1", "Go at 10:00, Current time is 2"),
        ('session_id="prod-main-1"', 'session_id="prod-main-2"'),
        ("# File editing rules:\nKeep a.", "# File editing rules:\nKeep b."),
    ],
)
def test_what_a_user_types_to_an_unknown_client_is_never_searched(before, after):
    client, _ = two_turns(*change("You help.", before, after, "user"))
    assert client.prepared.notes == ()
    assert client.prepared.prompt.tokens == rendering(client)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_reminder_that_moves_to_the_newest_message_is_not_told_as_withdrawn(role):
    reminder = REMINDER.format("Plan mode is active: do not edit.")
    client = Client("chatml", pipeline("chatml"))
    client.ask(system_text(CLAUDE), Message("user", f"Go\n{reminder}"))
    spoken = client.answer(say(LONG, bash={"command": "ls"}))
    client.messages[1] = Message("user", "Go")
    new = [Message("tool", "a listing", tool_call_id="call_bash"), Message("user", f"And?\n{reminder}")]
    if role == "tool":
        new = [Message("tool", f"a listing\n{reminder}", tool_call_id="call_bash")]
    prepared = client.ask(*new)
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    assert "withdrawn" not in "".join(prepared.notes) and client.text.count("Plan mode") >= 2
    if role == "tool":  # a tool's result may say anything: that the old place is empty must be told
        assert "newer messages count" in "".join(prepared.notes)
        return
    assert prepared.notes == ()
    client.answer(say("x", bash={"command": "ls"}))
    client.messages[4] = Message("user", "And?")
    prepared = client.ask(Message("tool", "b", tool_call_id="call_bash"))
    assert [line.partition(":")[0] for line in prepared.notes] == ["reminder in messages 1, 4, withdrawn"]


@pytest.mark.parametrize("between", ["build", "plan"])
def test_a_reminder_that_goes_is_told_though_an_earlier_one_says_the_same(between: str):
    """plan, build, plan: without the last one it is build that holds. plan, plan: without the last one it is plan."""
    client = Client("chatml", pipeline("chatml"))
    client.messages = [system_text(CLAUDE)]
    modes = [REMINDER.format(f"Mode is {mode}.") for mode in ("plan", between, "plan")]
    for number, mode in enumerate(modes):
        client.ask(Message("user", f"Question {number}\n{mode}"))
        client.answer(say(LONG, bash={"command": "ls"}))
        client.ask(Message("tool", "a listing", tool_call_id="call_bash"))
        spoken = client.answer(say(LONG))
    last = max(index for index, message in enumerate(client.messages) if message.role == "user")
    client.messages[last] = Message("user", "Question 2")
    prepared = client.ask(Message("user", "And now?"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    place = 1 if between == "build" else 5  # message, answer, result, answer, message
    said = f"in message 9, withdrawn there, message {place} still has it: Mode is plan."
    assert any(said in line for line in prepared.notes)


def test_telemetry_is_left_out_and_its_change_costs_nothing():
    header = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    client, spoken = two_turns(
        [system_text(header.format("aaa"), CLAUDE), Message("user", "Go")],
        [system_text(header.format("bbb"), CLAUDE), Message("user", "Go")],
    )
    assert client.prepared.notes == ()
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken
    assert "billing" not in client.text and CLAUDE in client.text
    asked = Client("chatml", pipeline("chatml"))
    later = Message("system", f"{header}\nIt broke.")
    asked.ask(system_text(CLAUDE), Message("user", f"What is this?\n{header}"), later)
    assert asked.text.count("billing") == 2 and "It broke." in asked.text


def test_a_stamp_that_its_client_leaves_out_later_stays_as_it_was_true_then():
    client, spoken = two_turns(*change(OPENCLAW, INFO.format("m-1") + "Go", "Go", "user"))
    assert client.prepared.notes == ()
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken


def test_without_proof_nothing_is_kept_that_the_request_does_not_say():
    client = Client("chatml", pipeline("chatml"))
    client.ask(system_text("You help.", "Mode: plan"), Message("user", "Hello"))
    client.answer(say("OK.", "My thoughts."))
    client.messages[0] = system_text("You help.", "Mode: build")
    client.messages[-1] = Message("assistant", "OK.")
    client.ask(Message("user", "More"))
    assert "My thoughts" not in client.text and "plan" not in client.text


def test_words_alone_show_nothing_of_another_conversation():
    """B has the same answer in its history, as long as it may be: by the same question, or from a shared transcript."""
    family = "chatml"
    for files in (False, True):
        pipe = pipeline(family)
        ours, theirs = (
            Client(family, pipe, tools=(), messages=[system_text("You help.", f"Customer: {name}")])
            for name in ("alpha", "bravo")
        )
        if files:
            ours.messages[0] = theirs.messages[0] = system_text(AIDER)
            ours.messages += [Message("user", FILES.format(code("\nalpha = 1"))), REPLY]
        ours.ask(Message("user", "What is to be done?"))
        ours.answer(say(LONG, "Thoughts about alpha."))
        theirs.messages += [Message("user", "What is to be done?"), Message("assistant", LONG)]
        if files:
            theirs.messages += [Message("user", FILES.format(code("\nbravo = 1"))), REPLY]
        theirs.ask(Message("user", "And then?"))
        assert "alpha" not in theirs.text
        assert theirs.text == model(family)[1].decode(rendering(theirs))


def test_words_alone_give_back_thoughts_about_the_same_words():
    client = Client("chatml", pipeline("chatml"), tools=())
    client.ask(system_text("You help."), Message("user", "Go"))
    spoken = client.answer(say(LONG, "My thoughts."))
    for turn in range(3):
        client.messages[-1] = replace(client.messages[-1], reasoning=None)
        prepared = client.ask(Message("user", f"More {turn}"))
        assert prepared.prompt.tokens[: len(spoken)] == spoken
        spoken = client.answer(say(LONG, "More thoughts."))


@pytest.mark.parametrize(("before", "after"), [("Mode: plan", "Mode: build"), ("Now: 10:00", "Now: 10:05")])
@pytest.mark.parametrize("other", [{"session": "b"}, {"owner": "key2"}])
def test_another_session_or_user_stands_against_a_changed_value(other, before, after):
    pipe = pipeline("chatml")
    named = {"session": "a", "owner": "key1"}
    talk = [system_text("You help.", before), Message("user", "Hello")]
    first = pipe.prepare(request(talk, **named), thinking=True)
    answer = say(LONG, "My thoughts.")
    pipe.record(first, answer, model("chatml")[1].encode(f"<think>\nMy thoughts.\n</think>\n\n{LONG}"))
    talk = [system_text("You help.", after), talk[1], replace(answer, reasoning=None), Message("user", "More")]
    for names, own in ((named, True), (named | other, False)):
        prepared = pipe.prepare(request(talk, **names), thinking=True)
        text = model("chatml")[1].decode(prepared.prompt.tokens)
        assert (before in text, "My thoughts" in text, bool(prepared.notes)) == (own, own, own)


def test_a_change_that_is_large_is_shown_where_the_client_put_it():
    before, after = ("\n".join(f"Modified: src/{letter}/file{n}.py" for n in range(90)) for letter in "ab")
    client, _ = two_turns(*change("You help.", before, after, "system"))
    assert client.prepared.notes == ()
    assert client.prepared.prompt.tokens == rendering(client)


@pytest.mark.parametrize(("before", "after", "is_whole"), [("10:00:07", "10:01", False), ("kind", "rude", True)])
def test_of_a_short_system_text_only_a_time_is_told_by_its_lines(before: str, after: str, is_whole: bool):
    texts = (f"You help Ann. What you need: 2026-11-23, {value}." for value in (before, after))
    client, spoken = two_turns(*([Message("system", text), Message("user", RULES)] for text in texts))
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken
    assert ("no longer holds" in client.prepared.notes[0]) is is_whole


def test_notes_stay_under_a_tenth_however_many_there_are():
    client = Client("chatml", pipeline("chatml"))
    client.ask(Message("system", f"You help.\nTurn: 0\n{RULES[:2500]}"), Message("user", "Go"))
    for turn in range(1, rounds(40, 15)):
        client.answer(say("x", None, bash={"command": "ls"}))
        client.messages[0] = Message("system", f"You help.\nTurn: {turn}\n{RULES[:2500]}")
        prepared = client.ask(Message("tool", "b", tool_call_id="call_bash"))
        text = client.text
        assert text.rindex(f"Turn: {turn}\n") > text.rfind(f"Turn: {turn - 1}\n")
        assert len(prepared.prompt.tokens) <= 1.1 * len(rendering(client)) + 64
    assert 1 <= client.text.count(NOTE_OPEN) < 20


def test_no_request_is_refused_for_text_that_its_client_did_not_send():
    sizes = []
    for context in (0, 1):
        client = Client("chatml", pipeline("chatml", context=context and sizes[0] + 3), tools=())
        client.ask(system_text("You help.", "Mode: plan"), Message("user", "Hello"))
        client.answer(say(LONG, "Many thoughts. " * 20))
        client.messages[0] = system_text("You help.", "Mode: build")
        client.messages[-1] = Message("assistant", LONG)
        prepared = client.ask(Message("user", "More"))
        assert ("thoughts" in client.text) is not context
        sizes.append(len(rendering(client)))
    assert len(prepared.prompt.tokens) == sizes[1]


def test_a_transient_message_is_shown_where_it_is_and_gone_next_time():
    client = Client("chatml", pipeline("chatml"))
    first = client.ask(system_text(OPENCLAW), Message("user", "Go"), Message("user", INTERNAL.format("none")))
    tokenizer = model("chatml")[1]
    assert first.prompt.transient is not None
    assert "Active" not in tokenizer.decode(first.prompt.tokens[: first.prompt.transient])
    client.answer(say("x", bash={"command": "ls"}))
    del client.messages[2]
    second = client.ask(Message("tool", "res", tool_call_id="call_bash"), Message("user", INTERNAL.format("one")))
    text = tokenizer.decode(second.prompt.tokens)
    assert text.count("Active sessions") == 1 and text.index("sessions: one") > text.index("res")
    assert second.prompt.tokens[: first.prompt.transient] == first.prompt.tokens[: first.prompt.transient]
    assert second.notes == ()


def test_a_note_stands_in_a_message_that_will_stay():
    client = Client("chatml", pipeline("chatml"))
    client.ask(system_text(OPENCLAW, "Mode: plan"), Message("user", "Go"), Message("user", INTERNAL.format("none")))
    client.answer(say("x", bash={"command": "ls"}))
    del client.messages[2]
    client.messages[0] = system_text(OPENCLAW, "Mode: build")
    client.ask(Message("tool", "res", tool_call_id="call_bash"), Message("user", INTERNAL.format("one")))
    text = client.text
    assert text.index("res") < text.index(NOTE_OPEN) < text.index("sessions: one")
    assert "<|im_start|>" not in text[text.index("res") : text.index(NOTE_OPEN)], "it is in the result's message"
    client.answer(say("x", bash={"command": "ls"}))
    del client.messages[-2]
    client.ask(Message("tool", "more", tool_call_id="call_bash"))
    assert NOTE_OPEN in client.text and "sessions: one" not in client.text


def test_a_note_that_would_hold_the_end_of_a_note_is_not_made():
    """Its last tag has no nonce: what a client writes could end it early."""
    client, _ = two_turns(*change("You help.", "Mode: plan", "Mode: x </update>", "system"))
    assert NOTE_OPEN not in client.text and "Mode: x </update>" in client.text
    client, _ = two_turns(*change("You help.", "Mode: plan", "Mode: build", "system"))
    note = client.text.partition(NOTE_OPEN)[2]
    assert note.partition(" ")[0] not in note.partition(" ")[2]
    assert note.count("</update>") == 1


# --- tools ------------------------------------------------------------------------------------------------------------


def test_tools_in_another_order_keep_the_order():
    client = Client("chatml", pipeline("chatml"), tools=(READ, BASH, EDIT))
    client.ask(Message("user", "Go"))
    spoken = client.answer(say(LONG))
    client.tools = (EDIT, READ, BASH)
    prepared = client.ask(Message("user", "More"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken and prepared.notes == ()
    stranger = Client("chatml", client.pipe, tools=(BASH, EDIT, READ))
    stranger.ask(Message("user", "Something else"))
    assert stranger.text.index('"read"') < stranger.text.index('"bash"') < stranger.text.index('"edit"')
    theirs = request([Message("user", "Something else")], (BASH, EDIT, READ), owner="key2")  # learns nothing of others
    text = model("chatml")[1].decode(client.pipe.prepare(theirs, thinking=True).prompt.tokens)
    assert text.index('"bash"') < text.index('"edit"') < text.index('"read"')


def test_tools_that_come_go_and_change_are_told():
    client = Client("chatml", pipeline("chatml"), tools=(READ, BASH), session="a")
    client.ask(system_text("You help."), Message("user", "Go"))
    spoken = client.answer(say(LONG))
    client.tools = (replace(READ, description="Reads two files"), EDIT)
    prepared = client.ask(Message("user", "More"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    notes = "\n".join(prepared.notes)
    assert "Reads two files" in notes and "Edits a file" in notes and "do not call: bash" in notes
    client.answer(say("y"))
    assert client.ask(Message("user", "More")).notes == ()


def test_of_a_changed_tool_only_what_is_new_is_told():
    long = "Reads a file. " + "The path is taken from the folder of the project, never from the root of the disk. " * 4
    client = Client("chatml", pipeline("chatml"), tools=(replace(READ, description=long),), session="a")
    client.ask(system_text("You help. " + "Keep every change small. " * 60), Message("user", "Go"))
    client.answer(say(LONG))
    client.tools = (replace(READ, description=long + "No sleep loops."),)
    (told,) = client.ask(Message("user", "More")).notes
    assert "No sleep loops." in told and "(as before)" in told and len(told) < 150


# --- aider's blocks ---------------------------------------------------------------------------------------------------

AIDER = "Act as an expert software developer.\nAlways use best practices when coding."
FILES = (
    "I have *added these files to the chat* so you can go ahead and edit them.\n\n*Trust this message as the true "
    "contents of these files!*\n\na.py\n```\n{}\n```"
)
REPLY = Message("assistant", "Ok, any changes I propose will be to those files.")


def code(changed: str = "") -> str:
    return "\n".join(f"line_{n} = {n}" for n in range(30)) + changed


def aider(client: Client, files: str, ask: str) -> str:
    """The next request: history, then the files with the reply that aider makes up, then the question."""
    kept = [m for m in client.messages if m != REPLY and not m.content.startswith("I have *added")]
    client.messages = [*kept, Message("user", FILES.format(files)), REPLY, Message("user", ask)]
    client.ask()
    return client.text


@pytest.mark.parametrize(
    ("later", "told"),
    [(code(), ""), (code("\nnew_line = 1"), "a.py, line 31:\n+new_line = 1")],
    ids=["same", "changed"],
)
def test_aiders_files_stay_where_they_were_shown_and_few_changes_are_told_as_lines(later: str, told: str):
    client = Client(
        "chatml", pipeline("chatml"), tools=(), session="a" if told else None, messages=[system_text(AIDER)]
    )
    aider(client, code(), "First question")
    spoken = client.answer(say(LONG, None))
    text = aider(client, later, "Second question")
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken
    assert text.count("added these files") == text.count(REPLY.content) == 1
    assert told in text[: text.index("Second question")]


def test_aiders_edit_rules_stay_behind_the_question_that_they_followed():
    rules = "# *SEARCH/REPLACE block* Rules:\n\nEvery *SEARCH/REPLACE block* must use this format."
    head = Message("system", f"{AIDER}\n{RULES}\n\n{rules}")
    client = Client("chatml", pipeline("chatml"), tools=(), session="a", messages=[head])
    client.ask(Message("user", f"First question\n\n\n{rules}"))
    spoken = client.answer(say(LONG, None))
    client.messages[1] = Message("user", "First question\n")
    prepared = client.ask(Message("user", f"Second question\n\n\n{rules}"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken and prepared.notes == ()
    assert client.text.count(rules) == 2


def test_aiders_files_that_changed_altogether_are_shown_where_it_puts_them():
    client = Client("chatml", pipeline("chatml"), tools=(), session="a", messages=[system_text(AIDER)])
    aider(client, code(), "First question")
    client.answer(say(LONG, None))
    text = aider(client, code().replace("line", "row"), "Second question")
    assert text.index("Second question") > text.rindex("row_29 = 29") > text.index(LONG[:40])


def test_aiders_files_that_are_gone_are_told_as_gone():
    client = Client("chatml", pipeline("chatml"), tools=(), session="a", messages=[system_text(AIDER + "\n" + RULES)])
    aider(client, code()[:100], "First question")
    client.answer(say(LONG, None))
    client.messages = [m for m in client.messages if m != REPLY and not m.content.startswith("I have *added")]
    prepared = client.ask(Message("user", "Second question"))
    assert "withdrawn" in "\n".join(prepared.notes)


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_family_shows_the_note(family):
    client = Client(family, pipeline(family), tools=(), session="a")
    client.ask(system_text("Help.", "Current time is 1"), Message("user", "Go"))
    spoken = client.answer(say(LONG, None))
    client.messages[0] = system_text("Help.", "Current time is 2")
    prepared = client.ask(Message("user", "More"))
    assert "Current time is 2" in client.text
    assert prepared.prompt.tokens[: len(spoken)] == spoken


WIKI = "The wiki of the team is at wiki.acme.test."


def test_a_sentence_of_the_system_text_that_is_gone_stands_nowhere_any_more():
    client, spoken = two_turns(*change("You help.", WIKI, "Be kind.", "system"))
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken  # another one came
    client, spoken = two_turns(
        [system_text("You help.", WIKI), Message("user", "Go")], [system_text("You help."), Message("user", "Go")]
    )
    assert WIKI not in client.text
    assert client.prepared.view.base is None and client.prepared.miss.detail.startswith("line 2 differs")


def test_a_sentence_that_a_note_told_and_that_is_gone_again_is_gone_with_the_note():
    """What stood before it is computed once only."""
    with_wiki = [system_text("You help.", WIKI), Message("user", "Go")]
    client, spoken = two_turns([system_text("You help."), Message("user", "Go")], with_wiki)
    assert WIKI in client.text
    client.answer(say("It is done.", None))
    client.messages[0] = system_text("You help.")
    client.ask(Message("user", "More"))
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken
    assert WIKI not in client.text and "a listing" in client.text
