"""Totals that the metrics show."""

from __future__ import annotations

from start_llm.core.messages import Message, ToolCall
from tests.prompt.client import ECHOES, Client, pipeline, say, system_text


def test_notes_and_answers_are_counted():
    client = Client("chatml", pipeline("chatml"))
    client.ask(system_text("You help.", "Current time is 0"), Message("user", "Go"))
    for step in range(3):
        client.answer(say("", "why", bash={"command": f"ls {step}"}))
        client.messages[0] = system_text("You help.", f"Current time is {step + 1}")
        client.ask(Message("tool", f"r{step}", tool_call_id="call_bash"))
    client.answer(say("Done.", "all done"))
    counters = client.pipe.counters()
    assert (counters["notes"], counters["records"], counters["shown_as_sent"]) == (3, 4, 0)


def test_a_history_made_elsewhere_is_counted_as_shown_as_sent():
    client = Client("chatml", pipeline("chatml"), messages=[Message("user", "Go"), say("Done.")])
    client.ask(Message("user", "More"))
    client.answer(say("Yes."))
    assert client.pipe.counters()["shown_as_sent"] == 1


def test_healed_turns_are_counted_when_they_come_back_first():
    client = Client("chatml", pipeline("chatml"), ECHOES["stripped"])
    client.ask(Message("user", "Go"))
    for step in range(3):
        client.answer(say("", f"why {step}", bash={"command": "ls"}))
        client.ask(Message("tool", f"r{step}", tool_call_id="call_bash"))
    client.answer(say("Done.", None))
    assert client.pipe.counters()["healed_turns"] == 3
    kept = Client("chatml", pipeline("chatml"))
    kept.ask(Message("user", "Go"))
    kept.answer(say("x"))
    kept.ask(Message("user", "More"))
    kept.answer(say("y"))
    assert kept.pipe.counters()["healed_turns"] == 0


def test_guesses_are_counted_right_and_wrong():
    client = Client("qwen3", pipeline("qwen3"))
    client.ask(Message("user", "Go"))
    for step in range(4):
        answer = say(f"Step {step}.", "why")
        prepared = client.prepared
        client.answer(answer)
        client.pipe.predict(prepared, answer, [5, 6, 7])
        if step == 2:
            client.messages[-1] = Message("assistant", "Edited.", None, (ToolCall("c", "bash", "{}"),))
        client.ask(Message("user", f"And {step}?"))
    counters = client.pipe.counters()
    assert (counters["guesses_right"], counters["guesses_wrong"]) == (2, 1)
