"""Totals that the metrics show."""

from __future__ import annotations

import pytest

from start_llm.core.messages import Message, ToolCall
from tests.prompt.client import ECHOES, Client, pipeline, say
from tests.prompt.models import TEMPLATES

KEY = "exact_key_rejected_by_model_lcp"


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("echo", ["kept", "stripped and reserialised", "in content"])
def test_clean_traffic_rejects_no_key(family, echo):
    client = Client(family, pipeline(family), ECHOES[echo])
    client.ask(Message("system", "You help.\nCurrent time is 1"), Message("user", "Go"))
    for step in range(3):
        client.answer(say("", "why", bash={"command": f"ls {step}"}))
        client.messages[0] = Message("system", f"You help.\nCurrent time is {step + 2}")
        client.ask(Message("tool", f"r{step}", tool_call_id="call_bash"))
    client.answer(say("Done.", "all done"))
    client.ask(Message("user", "And?"))
    client.answer(say("No.", "why not"))
    counters = client.pipe.counters()
    assert counters[KEY] == 0
    assert counters["notes"] == 3 and counters["records"] == 1


def test_bytes_that_the_canonical_form_hides_are_counted_where_they_are_shown():
    client = Client("chatml", pipeline("chatml", cache_drift_policy="strict"))
    client.ask(Message("system", "You help.\nCurrent time is 1"), Message("user", "Go"))
    client.answer(say("", None, bash={"command": "ls"}))
    client.ask(Message("tool", "r", tool_call_id="call_bash"))
    client.answer(say("", None, bash={"command": "ls"}))
    assert client.pipe.counters()[KEY] == 0
    client.messages[0] = Message("system", "You help.\nCurrent time is 2")
    client.ask(Message("tool", "r", tool_call_id="call_bash"))
    assert client.pipe.counters()[KEY] == 0
    client.answer(say("Done.", None))
    assert client.pipe.counters()[KEY] == 1


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
        assert client.prepared is not None
        answer = say(f"Step {step}.", "why")
        prepared = client.prepared
        client.answer(answer)
        client.pipe.predict(prepared, answer, [5, 6, 7])
        if step == 2:
            client.messages[-1] = Message("assistant", "Edited.", None, (ToolCall("c", "bash", "{}"),))
        client.ask(Message("user", f"And {step}?"))
    counters = client.pipe.counters()
    assert (counters["guesses_right"], counters["guesses_wrong"]) == (2, 1)
