"""A system text that a client changes in the middle of a conversation: told as changes, or shown anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from start_llm.core.messages import Message
from start_llm.prompt.notes import NOTE_OPEN
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.turndb import TurnDB
from start_llm.prompt.volatile import Rules
from tests.prompt.client import BASH, EDIT, READ, Client, pipeline, say, settings
from tests.prompt.models import TEMPLATES, model

LINES = [f"Rule {n}: a sentence of the system text that says something of its own." for n in range(40)]


def text(client: Client) -> str:
    assert client.prepared is not None
    return model(client.family)[1].decode(client.prepared.prompt.tokens)


def begun(lines: list[str], family: str = "chatml", **more) -> tuple[Client, tuple[int, ...]]:
    """A conversation with one answer in it, and what its model has computed."""
    client = Client(family, more.pop("pipe", None) or pipeline(family, **more))
    client.ask(Message("system", "\n".join(lines)), Message("user", "Go"))
    return client, client.answer(say("I look.", bash={"command": "ls"}))


def changed(client: Client, lines: list[str], *new: Message) -> tuple[int, ...]:
    client.messages[0] = Message("system", "\n".join(lines))
    return client.ask(*(new or (Message("user", "And now?"),))).prompt.tokens


@pytest.mark.parametrize("family", [family for family in TEMPLATES if family != "gemma"])
def test_a_change_in_the_middle_is_told_and_the_prefix_stays(family):
    client, spoken = begun(LINES, family)
    other = [*LINES[:7], "Rule 7: you may write now.", *LINES[8:]]
    tokens = changed(client, other, Message("tool", "a listing", tool_call_id="call_bash"))
    if family not in ("harmony", "mistral", "llama3"):  # these show an answer otherwise later on
        assert tokens[: len(spoken)] == spoken
    assert client.prepared.notes == (f"System text:\n-{LINES[7]}\n+Rule 7: you may write now.",)
    assert "you may write now" in text(client)
    client.answer(say("Yes."))
    changed(client, other)
    assert client.prepared.notes == () and text(client).count("you may write now") == 1
    client.answer(say("Good."))
    changed(client, LINES)
    assert client.prepared.notes == (f"System text:\n-Rule 7: you may write now.\n+{LINES[7]}",)


def test_a_new_conversation_a_short_text_and_a_great_change_show_the_text_anew():
    client, spoken = begun(LINES)
    great = [*LINES[:10], *(line.replace("says", "tells") for line in LINES[10:])]
    assert changed(client, great)[: len(spoken)] != spoken
    assert client.prepared.notes == () and "tells something" in text(client)
    short, spoken = begun(["You help.", "Be brief."])
    changed(short, ["You help.", "Be long."])
    assert short.prepared.notes == () and "brief" not in text(short)
    pipe = pipeline("chatml")
    begun(LINES, pipe=pipe)
    fresh = Client("chatml", pipe)
    fresh.ask(Message("system", "\n".join([*LINES, "One more."])), Message("user", "Go"))
    assert fresh.prepared.notes == () and text(fresh).index("One more.") < text(fresh).index("Go")


def test_many_changes_end_with_the_text_anew():
    client, _ = begun(LINES)
    notes = []
    for number in range(8):
        client.answer(say(f"Answer {number}.")) if number else None
        changed(
            client, [*LINES[:number], f"Other rule {number}, of about the same length as the others.", *LINES[number:]]
        )
        notes.append(len(client.prepared.notes))
    assert notes[0] == 1 and 0 in notes


def test_strict_shows_the_clients_bytes():
    client, spoken = begun(LINES, cache_drift_policy="strict")
    assert changed(client, [*LINES, "One more."])[: len(spoken)] != spoken
    assert client.prepared.notes == ()


def test_volatile_values_in_it_are_told_by_themselves():
    clock = "Current time is {} UTC"
    client, spoken = begun([*LINES, clock.format("08:20")])
    assert changed(client, [LINES[0], "A new rule.", *LINES[1:], clock.format("08:21")])[: len(spoken)] == spoken
    note = text(client)[text(client).index(NOTE_OPEN) :]
    assert "+A new rule." in note and note.count("Current time is 08:21 UTC") == 1 and "08:20" not in note
    client.answer(say("Yes."))
    changed(client, [LINES[0], "A new rule.", *LINES[1:]])
    assert "-Current time is ..." in text(client)


def test_tools_change_with_it():
    client, spoken = begun(LINES)
    client.tools = (replace(READ, description="Reads a file or a folder"), EDIT)
    assert changed(client, [*LINES, "You may edit."])[: len(spoken)] == spoken
    note = text(client)[text(client).index(NOTE_OPEN) :]
    assert 'The tool read has changed, now: {"description": "Reads a file or a folder"}' in note
    assert f'This tool is now available too: {{"function": {{"description": "{EDIT.description}"' in note
    assert f"No longer available, do not call: {BASH.name}" in note


def test_it_is_known_after_a_restart(tmp_path):
    template, tokenizer = model("chatml")

    def started() -> Pipeline:
        store = TurnDB(tmp_path / "turns.sqlite")
        return Pipeline(template, tokenizer, settings=settings(), rules=Rules.load(None), store=store)

    client, spoken = begun(LINES, pipe=started())
    client.pipe.close()
    client.pipe = started()
    assert changed(client, [*LINES, "One more."])[: len(spoken)] == spoken
    assert "+One more." in text(client)
    client.pipe.close()


EDITS = st.lists(
    st.lists(st.tuples(st.sampled_from(["cut", "add", "set"]), st.integers(0, 30)), max_size=3), min_size=1, max_size=6
)


@pytest.mark.parametrize("family", ["chatml", "glm4"])
@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(turns=EDITS)
def test_whatever_is_changed_is_in_the_prompt(family, turns):
    client, _ = begun(LINES, family)
    lines = list(LINES)
    for number, edits in enumerate(turns):
        before = list(lines)
        for kind, place in edits:
            at = place % len(lines)
            if kind == "cut":
                del lines[at]
            else:
                lines[at : at + (kind == "set")] = [f"New in {number} at {place}."]
        changed(client, lines, Message("user", f"Question {number}"))
        prompt = text(client)
        assert all(line in prompt for line in lines)
        if "System text" in prompt[prompt.rindex(f"Question {number}") :]:
            gone = [line for line in before if line not in lines]
            assert not gone or any(f"-{line}" in prompt for line in gone)
        elif sorted(before) != sorted(lines):
            assert all(line not in prompt for line in before if line not in lines)
        client.answer(say(f"Answer {number}."))


def test_a_text_that_was_told_in_steps_is_not_lost_where_the_conversation_goes_back():
    """Each step is a small change, both at once are not; the note stands behind the place gone back to."""
    told = set()
    for words in range(48, 62, 2):
        client, _ = begun(LINES[:20])
        first = [*LINES[:20], "A first addition to it: " + "word " * words]
        second = [*first, "A second addition, which matters."]
        changed(client, first, Message("user", "One"))
        client.answer(say("Yes."))
        changed(client, second, Message("user", "Two"))
        steps = len(client.prepared.notes)
        client.answer(say("Good."))
        del client.messages[3:]
        changed(client, second, Message("user", "Another"))
        assert "A second addition" in text(client)
        told.add((steps, len(client.prepared.notes)))
    # In steps and at once, and in steps alone.
    assert told >= {(1, 1), (1, 0)}


def test_a_conversation_of_its_own_keeps_its_prefix():
    """Another one, with another system text, went on with the same words."""
    pipe = pipeline("chatml")
    other, _ = begun(LINES, pipe=pipe)
    client, spoken = begun([*LINES[:-1], "Its own rule."], pipe=pipe)
    more = Message("tool", "a listing", tool_call_id="call_bash")
    other.ask(more)
    other.answer(say("Here."))
    other.ask(Message("user", "On"))
    other.answer(say("Well."))
    assert client.ask(more).prompt.tokens[: len(spoken)] == spoken and client.prepared.notes == ()


def test_values_in_changed_lines_are_told():
    """The value is the same, the line that it stands in is another."""
    client, _ = begun([*LINES, "In Paris, current time is 5"])
    changed(client, [*LINES, "In Rome, current time is 5"])
    assert client.prepared.notes[-1] == "In Rome, current time is 5"
