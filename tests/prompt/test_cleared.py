"""Old tool results that a client takes out of its history to save context."""

from __future__ import annotations

from dataclasses import replace

import pytest

from start_llm.core.messages import Message
from start_llm.prompt.turndb import TurnDB
from tests.prompt.client import CLEARED, OPENCODE, Client, numbered, pipeline, say

SYSTEM = Message("system", OPENCODE)


def result(number: int) -> Message:
    return Message("tool", f"result {number}: {'long ' * 20}", tool_call_id=numbered(number))


def conversation(client: Client, turns: int = 3) -> tuple[int, ...]:
    client.ask(SYSTEM, Message("user", "Go"))
    for number in range(turns):
        client.answer(say(f"Step {number}.", number=number, read={"path": f"{number}.py"}))
        client.ask(result(number))
    return client.answer(say("Done."))


def clear(client: Client, *numbers: int) -> None:
    for index, message in enumerate(client.messages):
        if any(message.content.startswith(f"result {number}:") for number in numbers):
            client.messages[index] = Message("tool", CLEARED, tool_call_id=message.tool_call_id)


@pytest.mark.parametrize("family", ["chatml", "qwen35", "glm4"])
def test_the_model_still_sees_them_and_nothing_is_computed_again(family):
    client = Client(family, pipeline(family), owner="ann")
    spoken = conversation(client)
    clear(client, 0, 1)
    assert client.ask(Message("user", "More")).prompt.tokens[: len(spoken)] == spoken
    assert CLEARED not in client.text and "result 0" in client.text
    spoken = client.answer(say("Yes."))
    clear(client, 2)
    assert client.ask(Message("user", "And more")).prompt.tokens[: len(spoken)] == spoken


def test_when_context_runs_short_they_go():
    length = len(conversation(Client("chatml", pipeline("chatml"))))
    client = Client("chatml", pipeline("chatml", context=2 * length))
    conversation(client)
    clear(client, 0)
    client.ask(Message("user", "More, please, and say it in many words: " + "words " * 20))
    assert "result 0" not in client.text and "result 1" in client.text and CLEARED in client.text
    spoken = client.answer(say("Yes."))
    # The shorter history is what the conversation goes on with.
    assert client.ask(Message("user", "On")).prompt.tokens[: len(spoken)] == spoken


def test_what_comes_back_is_shown():
    """A cleared result that was shown as cleared never stands for one that is there."""
    client = Client("chatml", pipeline("chatml"))
    conversation(client, turns=1)
    history = list(client.messages)
    other = Client("chatml", client.pipe, messages=[*history[:2], say("Another.", number=0, read={"path": "b"})])
    other.ask(Message("tool", CLEARED, tool_call_id=numbered(0)))
    assert CLEARED in other.text and "result 0" not in other.text
    other.answer(say("Hm."))
    other.messages[3] = result(7)
    other.ask(Message("user", "Look again"))
    assert "result 7" in other.text and CLEARED not in other.text


def test_other_words_in_its_place_are_other_words():
    client = Client("chatml", pipeline("chatml"))
    spoken = conversation(client)
    client.messages[3] = Message("tool", "[removed by the user]", tool_call_id=numbered(0))
    assert client.ask(Message("user", "More")).prompt.tokens[: len(spoken)] != spoken
    assert "result 0" not in client.text


def test_the_result_of_another_conversation_is_not_taken_for_it():
    """Both began with the same words and the same call."""
    pipe = pipeline("chatml")
    clients = [Client("chatml", pipe), Client("chatml", pipe)]
    for number, client in enumerate(clients):
        client.ask(SYSTEM, Message("user", "Go"))
        client.answer(say("Step.", number=number, read={"path": "a.py"}))
        client.ask(Message("tool", f"what conversation {number} read", tool_call_id=numbered(number)))
        client.answer(say("Done."))
    clients[0].messages[3] = Message("tool", CLEARED, tool_call_id=numbered(0))
    clients[0].ask(Message("user", "More"))
    assert "conversation 0" in clients[0].text and "conversation 1" not in clients[0].text
    clients[1].messages[3] = Message("tool", CLEARED, tool_call_id=numbered(2))
    clients[1].ask(Message("user", "More"))
    assert CLEARED in clients[1].text and "what conversation" not in clients[1].text


def test_of_two_results_of_one_call_none_is_taken_for_it():
    client = Client("chatml", pipeline("chatml"))
    conversation(client, turns=1)
    client.messages[3:] = [replace(result(5), tool_call_id=numbered(0))]
    client.ask()
    client.answer(say("Done again."))
    client.messages[3] = Message("tool", CLEARED, tool_call_id=numbered(0))
    client.ask(Message("user", "More"))
    assert CLEARED in client.text and "result" not in client.text.replace(CLEARED, "")


def test_what_strict_showed_as_cleared_is_not_taken_for_the_result_later(tmp_path):
    path = tmp_path / "turns.sqlite"
    client = Client("chatml", pipeline("chatml", store=TurnDB(path), cache_drift_policy="strict"))
    conversation(client)
    history = list(client.messages)
    clear(client, 0, 1)
    client.ask(Message("user", "More"))
    client.answer(say("Yes."))
    client.pipe.close()
    client.pipe, client.messages = pipeline("chatml", store=TurnDB(path)), [*history, *client.messages[len(history) :]]
    client.ask(Message("user", "And now?"))
    assert CLEARED not in client.text and "result 0" in client.text
    client.pipe.close()
