# ruff: noqa: E501
"""The append policy: what was shown stays, what differs is told, nothing is hidden."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from start_llm.core.messages import Message
from start_llm.prompt.notes import NOTE_OPEN
from tests.prompt.client import BASH, EDIT, READ, Client, pipeline, request, say
from tests.prompt.models import TEMPLATES, model

GIT = (
    "This is the git status at the start of the conversation. It will not update.\nCurrent branch: main\n\nStatus:\n"
    "{}\n\nRecent commits:\n610c949 Initial commit"
)
INBOUND = '## Inbound Context (trusted metadata)\nFields of this message.\n\n```json\n{{"chat": "{}"}}\n```'
INTERNAL = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive sessions: {}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
REMINDER = "<system-reminder>\n{}\n</system-reminder>"


def decoded(client: Client) -> str:
    assert client.prepared is not None
    return model(client.family)[1].decode(client.prepared.prompt.tokens)


def two_turns(first: str, second: str, role: str = "system", family: str = "chatml") -> tuple[Client, tuple[int, ...]]:
    """A turn with `first` as the text of the leading message, then one with `second`."""
    client = Client(family, pipeline(family))
    lead = [Message(role, first)] + ([Message("user", "Go")] if role == "system" else [])
    client.ask(*lead)
    spoken = client.answer(say("Running.", bash={"command": "ls"}))
    client.messages[0] = Message(role, second)
    client.ask(Message("tool", "a listing", tool_call_id="call_bash"))
    return client, spoken


@pytest.mark.parametrize(
    ("rule", "first", "second", "told"),
    [
        ("clock", "Help.\nCurrent time is 08:20 UTC", "Help.\nCurrent time is 08:21:13 UTC", "Current time is 08:21:13 UTC"),
        ("date", "Help.\nToday's date is 2026-11-21.\nBye", "Help.\nToday's date is 2026-11-22.\nBye", "2026-11-22"),
        ("date in env", "<env>\n  Today's date: Sat\n</env>", "<env>\n  Today's date: Sun\n</env>", "Today's date: Sun"),
        ("openclaw date", "A\nCurrent date: 2026-11-21\nB", "A\nCurrent date: 2026-11-22\nB", "Current date: 2026-11-22"),
        ("runtime", "A\nRuntime: agent=main | host=a", "A\nRuntime: agent=main | host=b", "host=b"),
        ("stats", "A\nStats: runtime 5s • tokens 3k", "A\nStats: runtime 9s • tokens 4k", "Stats: runtime 9s"),
        ("message id", 'A {"message_id": "m-1"} B', 'A {"message_id": "m-2"} B', "m-2"),
        ("git", "A\n\n" + GIT.format("(clean)"), "A\n\n" + GIT.format("M x.py"), "M x.py"),
        ("git came", "A", "A\n\n" + GIT.format("M x.py"), "M x.py"),
        ("git went", "A\n\n" + GIT.format("M x.py"), "A", "No longer part"),
        ("inbound", INBOUND.format("one") + "\n\nA", INBOUND.format("two") + "\n\nA", '"chat": "two"'),
        ("inbound came", "A", INBOUND.format("two") + "\n\nA", '"chat": "two"'),
        ("reminder came", "A", "A\n" + REMINDER.format("Be quick."), "Be quick."),
        ("reminder changed", REMINDER.format("Old one") + "\nA", REMINDER.format("New one") + "\nA", "New one"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["system", "user"])
def test_a_change_is_told_and_the_prefix_stays(rule, first, second, told, role):
    client, spoken = two_turns(first, second, role)
    assert client.prepared is not None
    text = decoded(client)
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken
    assert told in text[text.index(NOTE_OPEN) :]
    assert text.index(NOTE_OPEN) > text.index("a listing")
    assert any(told in line for line in client.prepared.notes)
    # the next request is the same again: nothing more to tell, the note stays where it was seen
    spoken = client.answer(say("Again.", bash={"command": "pwd"}))
    prepared = client.ask(Message("tool", "/home", tool_call_id="call_bash"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    assert prepared.notes == ()


def test_telemetry_is_left_out_and_its_change_costs_nothing():
    header = "x-anthropic-billing-header: cc_version=2.1; cch={};\nYou help."
    client, spoken = two_turns(header.format("aaa"), header.format("bbb"))
    assert client.prepared is not None
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken
    assert client.prepared.notes == ()
    assert "billing" not in decoded(client) and "You help." in decoded(client)


def test_a_value_that_returns_is_told_again_only_if_another_was_told():
    client, _ = two_turns("Current time is 1", "Current time is 2")
    client.answer(say("x", bash={"command": "ls"}))
    client.messages[0] = Message("system", "Current time is 1")
    assert client.ask(Message("tool", "b", tool_call_id="call_bash")).notes == ("Current time is 1",)
    client.answer(say("y", bash={"command": "ls"}))
    assert client.ask(Message("tool", "c", tool_call_id="call_bash")).notes == ()


def test_a_reminder_that_goes_or_moves_stays_where_it_was_seen():
    client, spoken = two_turns("A\n" + REMINDER.format("Be quick."), "A", "user")
    assert client.prepared is not None
    assert client.prepared.prompt.tokens[: len(spoken)] == spoken and client.prepared.notes == ()
    client.answer(say("x", bash={"command": "ls"}))
    spoken = client.spoken
    prepared = client.ask(Message("tool", "b\n" + REMINDER.format("Be quick."), tool_call_id="call_bash"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken and prepared.notes == ()


def test_a_message_of_reminders_only_may_appear_and_go():
    client = Client("chatml", pipeline("chatml"))
    client.ask(Message("user", "Go"), Message("user", REMINDER.format("Only this.")))
    spoken = client.answer(say("x"))
    del client.messages[1]
    assert client.ask(Message("user", "More")).prompt.tokens[: len(spoken)] == spoken
    spoken = client.answer(say("y"))
    client.messages.insert(1, Message("user", REMINDER.format("Something new.")))
    prepared = client.ask(Message("user", "Still more"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    assert "Something new." in decoded(client)


def test_a_transient_message_is_shown_where_it_is_and_gone_next_time():
    client = Client("chatml", pipeline("chatml"))
    first = client.ask(Message("user", "Go"), Message("user", INTERNAL.format("none")))
    tokenizer = model("chatml")[1]
    assert first.prompt.transient is not None
    assert "Active" not in tokenizer.decode(first.prompt.tokens[: first.prompt.transient])
    client.answer(say("x", bash={"command": "ls"}))
    del client.messages[1]
    second = client.ask(Message("tool", "res", tool_call_id="call_bash"), Message("user", INTERNAL.format("one")))
    text = tokenizer.decode(second.prompt.tokens)
    assert text.count("Active sessions") == 1 and text.index("sessions: one") > text.index("res")
    assert second.prompt.tokens[: first.prompt.transient] == first.prompt.tokens[: first.prompt.transient]
    assert second.fresh < len(second.prompt.tokens) - first.prompt.transient
    assert second.notes == ()


def test_a_new_session_shows_the_known_system_text_and_a_note():
    pipe = pipeline("chatml")
    old = Client("chatml", pipe)
    first = old.ask(Message("system", "You help.\nCurrent date: 1\n" + GIT.format("(clean)")), Message("user", "Go"))
    old.answer(say("Done."))
    new = Client("chatml", pipe)
    prepared = new.ask(Message("system", "You help.\nCurrent date: 2\n" + GIT.format("M a")), Message("user", "Else"))
    assert prepared.prompt.tokens[: first.prompt.head] == first.prompt.tokens[: first.prompt.head]
    assert len(prepared.notes) == 2 and "M a" in decoded(new)


def test_tools_in_another_order_keep_the_order():
    client = Client("chatml", pipeline("chatml"), tools=(READ, BASH, EDIT))
    client.ask(Message("user", "Go"))
    spoken = client.answer(say("x"))
    client.tools = (EDIT, READ, BASH)
    prepared = client.ask(Message("user", "More"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken and prepared.notes == ()


def test_tools_that_come_go_and_change_are_told():
    client = Client("chatml", pipeline("chatml"), tools=(READ, BASH))
    client.ask(Message("user", "Go"))
    spoken = client.answer(say("x"))
    client.tools = (replace(READ, description="Reads two files"), EDIT)
    prepared = client.ask(Message("user", "More"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    notes = "\n".join(prepared.notes)
    assert "Reads two files" in notes and "Edits a file" in notes and "do not call: bash" in notes
    client.answer(say("y"))
    assert client.ask(Message("user", "More")).notes == ()
    client.answer(say("z"))
    client.tools = (READ, BASH)
    assert len(client.ask(Message("user", "More")).notes) == 3


def test_tools_that_vary_come_last_in_the_next_new_head():
    pipe = pipeline("chatml")
    for names in ((READ, BASH, EDIT), (READ, EDIT)):
        client = Client("chatml", pipe, tools=names)
        client.ask(Message("system", "Old"), Message("user", "Go"))
        client.answer(say("x"))
    warm, cold = Client("chatml", pipe, tools=(READ, BASH, EDIT)), Client("chatml", pipe, tools=(READ, BASH, EDIT))
    warm.ask(Message("system", "Old"), Message("user", "Other"))
    cold.ask(Message("system", "New"), Message("user", "Go"))
    assert decoded(warm).index('"bash"') < decoded(warm).index('"edit"')
    assert decoded(cold).index('"bash"') > decoded(cold).index('"edit"')


def test_strict_is_the_clients_bytes():
    first = "x-anthropic-billing-header: a\nCurrent time is 1\n" + REMINDER.format("r")
    client = Client("chatml", pipeline("chatml", cache_drift_policy="strict"), tools=(READ, BASH))
    client.ask(Message("system", first), Message("user", "Go"))
    client.answer(say("x"))
    client.messages[0] = Message("system", first.replace("is 1", "is 2"))
    client.tools = (BASH, READ)
    prepared = client.ask(Message("user", "More"))
    text = decoded(client)
    assert "billing-header" in text and "is 2" in text and "is 1" not in text and prepared.notes == ()
    assert text.index('"bash"') < text.index('"read"')


def test_rules_switched_off_leave_the_bytes_alone():
    client = Client("chatml", pipeline("chatml", cache_canonicalize_tool_context=False))
    client.ask(Message("system", "x-anthropic-billing-header: a\nCurrent time is 1"), Message("user", "Go"))
    client.answer(say("x"))
    client.messages[0] = Message("system", "Current time is 2")
    client.ask(Message("user", "More"))
    assert "Current time is 2" in decoded(client) and "is 1" not in decoded(client)


def test_the_safety_check_falls_back_to_strict():
    long = REMINDER.format("word " * 50)
    for check in (True, False):
        pipe = pipeline("chatml", cache_norm_safety_check=check)
        client = Client("chatml", pipe)
        client.ask(Message("user", "A\n" + long))
        client.answer(say("x"))
        client.messages[0] = Message("user", "A\n" + REMINDER.format("other " * 50))
        prepared = client.ask(Message("user", "More"))
        assert bool(prepared.notes) is not check
        assert "other other" in decoded(client)


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_family_shows_the_note(family):
    client = Client(family, pipeline(family), tools=())
    client.ask(Message("system", "Help.\nCurrent time is 1"), Message("user", "Go"))
    spoken = client.answer(say("x", None))
    client.messages[0] = Message("system", "Help.\nCurrent time is 2")
    prepared = client.ask(Message("user", "More"))
    assert "Current time is 2" in decoded(client)
    assert prepared.prompt.tokens[: len(spoken)] == spoken


# --- any drift sequence -----------------------------------------------------

_WORDS = st.sampled_from(["alpha", "beta x", "gamma\n\ndelta", "  eps", "zeta."])
_VALUE = st.sampled_from(["1", "2", "3"])
_MAYBE = st.none() | _VALUE


@st.composite
def drifts(draw):
    """One request's volatile values: for the system message, for each user message, and the tools."""
    return {
        "billing": draw(_MAYBE),
        "time": draw(_VALUE),
        "git": draw(_MAYBE),
        "inbound": draw(_MAYBE),
        "ids": draw(st.lists(_VALUE, min_size=4, max_size=4)),
        "reminders": draw(st.lists(_MAYBE, min_size=4, max_size=4)),
        "alone": draw(_MAYBE),
        "transient": draw(_MAYBE),
        "tools": draw(st.lists(st.sampled_from([READ, BASH, EDIT]), min_size=1, unique_by=lambda tool: tool.name)),
    }


def build(history: list[Message], drift: dict) -> list[Message]:
    """The client's request for a history of plain messages, with this drift."""
    system = ["Be helpful.", f"Current time is {drift['time']} UTC"]
    if drift["billing"]:
        system.insert(0, f"x-anthropic-billing-header: cch={drift['billing']};")
    if drift["git"]:
        system.append(GIT.format(f"M file{drift['git']}.py"))
    if drift["inbound"]:
        system.append(INBOUND.format(f"chat{drift['inbound']}"))
    messages = [Message("system", "\n".join(system))]
    users = 0
    for message in history:
        if message.role == "user":
            content = f"[message_id: id{drift['ids'][users]}] {message.content}"
            if drift["reminders"][users]:
                content += "\n" + REMINDER.format(f"remember {drift['reminders'][users]}")
            users += 1
            message = Message("user", content)
        messages.append(message)
    if drift["alone"]:
        messages.insert(2, Message("user", REMINDER.format(f"alone {drift['alone']}")))
    if drift["transient"]:
        messages.append(Message("user", INTERNAL.format(drift["transient"])))
    return messages


@pytest.mark.parametrize("family", ["chatml", "qwen35", "glm4"])
@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(sequence=st.lists(st.tuples(drifts(), _WORDS), min_size=2, max_size=4))
def test_nothing_is_hidden_by_any_drift(family, sequence):
    pipe = pipeline(family)
    tokenizer = model(family)[1]
    client = Client(family, pipe)
    history: list[Message] = []
    had_transient = False
    for step, (drift, words) in enumerate(sequence):
        history.append(Message("user", f"{words} {step}"))
        messages = build(history, drift)
        prepared = pipe.prepare(request(messages, tuple(drift["tools"])), thinking=True)
        assert prepared == pipe.prepare(request(messages, tuple(drift["tools"])), thinking=True)
        text = tokenizer.decode(prepared.prompt.tokens)
        for message in messages:
            for line in message.content.split("\n"):
                assert "billing-header" in line or line.strip() in text, line
        for tool in drift["tools"]:
            assert tool.description in text
        times = re.findall(r"Current time is (\d)", text)
        assert times[-1] == drift["time"]
        if client.spoken and not had_transient:
            assert prepared.prompt.tokens[: len(client.spoken)] == client.spoken
        had_transient = bool(drift["transient"])
        client.prepared = prepared
        answer = say(f"Answer {step}.", f"Thought {step}.")
        client.answer(answer)
        history.append(client.messages[-1])


# --- blocks that are told as changes, blocks that move ------------------------


def test_a_long_block_is_told_as_the_lines_that_changed():
    status = "\n".join(f"M src/file{n}.py" for n in range(20))
    client, spoken = two_turns("A\n\n" + GIT.format(status), "A\n\n" + GIT.format(status.replace("file7.", "seven.")))
    assert client.prepared is not None and client.prepared.prompt.tokens[: len(spoken)] == spoken
    (note,) = client.prepared.notes
    assert note.split("\n")[1:] == ["-M src/file7.py", "+M src/seven.py"]
    client.answer(say("x", bash={"command": "ls"}))
    assert client.ask(Message("tool", "b", tool_call_id="call_bash")).notes == ()


def test_changes_of_changes_end_with_the_whole_block():
    client = Client("chatml", pipeline("chatml"))
    lines = [f"M src/file{n}.py" for n in range(8)]
    client.ask(Message("system", GIT.format("\n".join(lines))), Message("user", "Go"))
    whole = []
    for number in range(8):
        client.answer(say(f"answer {number}"))
        lines[number] = f"M src/other{number}.py"
        client.messages[0] = Message("system", GIT.format("\n".join(lines)))
        whole.append(
            "This is the git status" in "".join(client.ask(Message("user", f"More {number}")).notes)
            and "Recent commits" in "".join(client.prepared.notes if client.prepared else ())
        )
    assert not whole[0] and 1 <= sum(whole) < 8


FILES = "I have *added these files to the chat* so you can go ahead and edit them.\n\n*Trust this message*\n\na.py\n```\n{}```\n"
REPLY = Message("assistant", "Ok, any changes I propose will be to those files.")
RULES_OF_EDITS = "\n\n# *SEARCH/REPLACE block* Rules:\n\n" + "Every block must use this format.\n" * 20
CODE = "".join(f"line {n}\n" for n in range(20))


class Aider:
    """Sends the files before the last words, and the rules behind them."""

    def __init__(self, family: str = "chatml") -> None:
        self.family, self.pipe = family, pipeline(family)
        self.history: list[Message] = [Message("system", "You edit.")]
        self.spoken: tuple[int, ...] = ()
        self.text = ""

    def turn(
        self, words: str, code: str | None, rules: str = RULES_OF_EDITS, answer: str = "", first: str = "a.py"
    ) -> bool:
        """Whether the prompt goes on where the model had stopped."""
        files = [] if code is None else [Message("user", FILES.replace("a.py", first).format(code)), REPLY]
        client = Client(self.family, self.pipe, tools=(), messages=[*self.history, *files])
        self.prepared = client.ask(Message("user", words + rules))
        goes_on = self.prepared.prompt.tokens[: len(self.spoken)] == self.spoken
        self.text = decoded(client)[len(model(self.family)[1].decode(self.spoken)) if goes_on else 0 :]
        self.spoken = client.answer(say(answer or f"Done: {words}", None))
        self.history += [Message("user", words), client.messages[-1]]
        return goes_on


@pytest.mark.parametrize("family", ["chatml", "qwen35", "glm4"])
def test_files_behind_the_history_stay_where_they_were_shown(family):
    aider = Aider(family)
    aider.turn("First", CODE)
    assert "line 7" in aider.text and REPLY.content in aider.text
    assert aider.turn("Second", CODE) and aider.prepared.notes == ()
    assert "Second" in aider.text and "line 7" not in aider.text and REPLY.content not in aider.text
    assert "As above: # *SEARCH/REPLACE block* Rules" in aider.text and "Every block" not in aider.text


def test_what_changed_in_the_files_is_told_with_its_place():
    aider = Aider()
    aider.turn("First", CODE)
    assert aider.turn("Second", CODE.replace("line 7\n", "LINE 7\n"))
    assert aider.prepared.notes == ("a.py:\n-line 7\n+LINE 7",)
    assert aider.turn("Third", CODE.replace("line 7\n", "LINE 7\n")) and aider.prepared.notes == ()
    assert aider.turn("Fourth", CODE) and "-LINE 7\n+line 7" in aider.text


def test_a_file_that_changed_altogether_is_told_whole():
    aider = Aider()
    aider.turn("First", CODE)
    assert aider.turn("Second", CODE.replace("line", "row"))
    assert "Now: a.py" in aider.text and "row 19" in aider.text and REPLY.content not in aider.text
    assert aider.turn("Third", CODE.replace("line", "row")) and "row 19" not in aider.text


def test_after_many_changes_files_are_shown_again_where_the_client_puts_them():
    aider = Aider()
    aider.turn("First", CODE)
    for number in range(20):
        code = CODE.replace("line 1\n", f"{number} {'x' * 60}\n")
        assert aider.turn(f"More {number}", code) and f"{number} xxx" in aider.text
        if not aider.prepared.notes:
            break
    assert 3 < number < 19
    assert aider.text.index(f"{number} xxx") < aider.text.index(REPLY.content) < aider.text.index(f"More {number}")
    assert aider.turn("Last", code) and "xxx" not in aider.text


def test_files_in_another_order_are_the_same_files():
    aider = Aider()
    aider.turn("First", CODE + "```\n\nb.py\n```\nx\n")
    assert aider.turn("Second", "x\n```\n\na.py\n```\n" + CODE, first="b.py") and aider.prepared.notes == ()
    assert "line 7" not in aider.text and "<update>" not in aider.text


BLOCK = "Done.\n\n{}\n```python\n<<<<<<< SEARCH\n{}=======\n{}>>>>>>> REPLACE\n```"


def test_an_edit_of_the_models_own_is_named_and_not_repeated():
    aider = Aider()
    aider.turn("First", CODE, answer=BLOCK.format("a.py", "line 7\n", "LINE 7\n"))
    assert aider.turn("Second", CODE.replace("line 7\n", "LINE 7\n"), answer="Words.")
    assert aider.prepared.notes == ("a.py: as edited above",)
    assert "<update>\na.py: as edited above\n</update>" in aider.text
    # Somebody else's edit comes on top of an own one: then all of it is told.
    aider.turn("Third", CODE.replace("line 7\n", "LINE 7\n"), answer=BLOCK.format("a.py", "line 3\n", ""))
    assert aider.turn("Fourth", CODE.replace("line 7\n", "LINE 7\n").replace("line 3\n", "mine\n"))
    assert aider.prepared.notes == ("a.py, without the edits above:\n-line 3\n+mine",)


def test_an_edit_that_was_not_made_or_was_undone_is_told():
    """The client shows the files behind the edit, as they are without it."""
    aider = Aider()
    aider.turn("First", CODE, answer=BLOCK.format("a.py", "line 7\n", "LINE 7\n"))
    assert aider.turn("Second", CODE)
    assert aider.prepared.notes == ("a.py: not edited, still as before",)
    assert aider.turn("Third", CODE) and aider.prepared.notes == ()
    two = BLOCK.format("a.py", "line 3\n", "three\n") + "\n" + BLOCK.format("a.py", "line 5\n", "five\n")
    aider.turn("Fourth", CODE, answer=two)
    assert aider.turn("Fifth", CODE.replace("line 3\n", "three\n"))
    assert aider.prepared.notes == ("a.py, without the edits above:\n-line 3\n+three",)


def test_the_end_of_a_file_without_a_line_break_is_told():
    aider = Aider()
    aider.turn("First", CODE + "last = 1")
    assert aider.turn("Second", CODE + "last = 2") and "+last = 2" in aider.text


def test_what_aider_says_of_its_commits_may_go():
    """A conversation restored from the history file has none of it; what was shown stays."""
    aider = Aider()
    aider.turn("First", CODE)
    aider.history += [
        Message("user", "I committed the changes with git hash 840fad6 & commit msg: fix: more\n\n- x"),
        Message("assistant", "Ok."),
    ]
    assert aider.turn("Second", CODE) and "840fad6" in aider.text
    aider.history = [item for item in aider.history if "840fad6" not in item.content and item.content != "Ok."]
    assert aider.turn("Third", CODE) and aider.prepared.notes == ()


def test_files_and_rules_that_go_and_come_are_told():
    aider = Aider()
    aider.turn("First", CODE)
    assert aider.turn("Second", None, rules="")
    assert len(aider.prepared.notes) == 2 and all("No longer part" in note for note in aider.prepared.notes)
    assert aider.turn("Third", CODE) and "line 7" in aider.text and "Every block" in aider.text


def test_a_reply_that_follows_no_block_is_an_answer():
    client = Client("chatml", pipeline("chatml"), tools=())
    client.ask(Message("user", "Go"))
    client.answer(replace(REPLY, reasoning=None))
    assert len(client.ask(Message("user", "More")).turn.chain) == 3


def test_a_block_that_is_to_be_answered_is_shown():
    client = Client("chatml", pipeline("chatml"), tools=())
    block = Message("user", FILES.format(CODE))
    client.ask(block, REPLY, Message("user", "Go"))
    client.answer(say("Done.", None))
    client.ask(block)
    assert decoded(client).count("line 19") == 2


def test_rules_that_the_system_text_has_are_not_repeated_in_a_later_session():
    pipe = pipeline("chatml")
    for number in range(2):
        client = Client("chatml", pipe, tools=())
        client.ask(Message("system", "You edit." + RULES_OF_EDITS), Message("user", f"Words {number}" + RULES_OF_EDITS))
        assert decoded(client).count("Every block") == (40 if number == 0 else 20)
        client.answer(say("Done.", None))


_CODE = st.lists(st.sampled_from(["a = 1", "b = 2", "", "def f():", "    return", "x"]), max_size=9)


@pytest.mark.parametrize("family", ["chatml", "glm4"])
@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(files=st.lists(st.none() | _CODE, min_size=2, max_size=5))
def test_the_files_can_be_told_from_what_was_shown(family, files):
    aider = Aider(family)
    shown: list[str] = []
    before = None
    for number, lines in enumerate(files):
        code = None if lines is None else "".join(f"{line} # {index % 3}\n" for index, line in enumerate(lines))
        assert aider.turn(f"Words {number}", code)
        shown.append(aider.text)
        everything = "\n".join(shown)
        for line in (code or "").split("\n"):
            assert line in everything
        if code is None and before is not None:
            assert "No longer part" in aider.text
        before = code


def test_what_begins_like_an_outcome_and_goes_on_is_a_message():
    client = Client("chatml", pipeline("chatml"), tools=())
    client.ask(Message("user", "Go"))
    client.answer(say("Well."))
    client.ask(Message("user", "I updated the files.\nNow do this."))
    client.answer(say("Sure."))
    client.messages[2] = Message("user", "I updated the files.\nNow do that.")
    client.ask(Message("user", "More"))
    assert "do that." in decoded(client) and "do this." not in decoded(client)


def test_one_line_in_place_of_files_is_not_repeated_after_an_edit():
    none = Message("user", "I am not sharing any files that you can edit yet.")
    client = Client("chatml", pipeline("chatml"), tools=())
    client.ask(none, Message("assistant", "Ok."), Message("user", "Go"))
    client.answer(say(BLOCK.format("a.py", "", "new\n"), None))
    client.messages = [*client.messages[2:], *client.messages[:2]]
    client.ask(Message("user", "More"))
    assert decoded(client).count("I am not sharing") == 1
