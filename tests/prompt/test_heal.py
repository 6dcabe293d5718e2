"""Healing: what comes back unchanged is given back whole; what a client changed is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from start_llm.core.messages import Message, ToolCall
from start_llm.prompt.heal import HealingStore, split_embedded
from tests.prompt.client import ECHOES, Client, pipeline, say
from tests.prompt.models import model

PARENT = b"parent"
ANSWER = say("\n\nLook:\n", "First this.\nThen that.", read={"path": "a.py", "limit": 3}, bash={"command": "ls"})


@pytest.fixture
def store() -> HealingStore:
    made = HealingStore()
    made.put(PARENT, ANSWER)
    return made


@pytest.mark.parametrize("echo", ECHOES)
def test_every_way_of_writing_it_down_heals(store, echo):
    healed = store.heal(PARENT, ECHOES[echo](ANSWER))
    assert (healed.content, healed.reasoning) == (ANSWER.content, ANSWER.reasoning)
    assert [call.arguments for call in healed.tool_calls] == [call.arguments for call in ANSWER.tool_calls]


def test_the_clients_ids_stay(store):
    calls = tuple(ToolCall("other", call.name, call.arguments) for call in ANSWER.tool_calls)
    assert store.heal(PARENT, Message("assistant", ANSWER.content, None, calls)).tool_calls == calls


@pytest.mark.parametrize(
    "changed",
    [
        Message("assistant", "Look there:", None, ANSWER.tool_calls),
        Message("assistant", ANSWER.content, None, ANSWER.tool_calls[:1]),
        Message("assistant", ANSWER.content, None, ANSWER.tool_calls[::-1]),
        Message("assistant", ANSWER.content, None, (ToolCall("1", "read", '{"path": "b.py", "limit": 3}'),)),
        Message("user", ANSWER.content),
    ],
)
def test_a_changed_turn_stays_as_it_came(store, changed):
    assert store.heal(PARENT, changed) == changed


def test_other_reasoning_stands(store):
    healed = store.heal(PARENT, Message("assistant", ANSWER.content, "Mine.", ANSWER.tool_calls))
    assert healed.reasoning == "Mine."
    embedded = Message("assistant", f"<think>\nMine.\n</think>\n\n{ANSWER.content}", None, ANSWER.tool_calls)
    assert store.heal(PARENT, embedded) == embedded


def test_reasoning_that_the_content_carries_is_taken_once():
    content = "<think>\nSame.\n</think>\n\nUnknown turn."
    message = Message("assistant", content, "Same.")
    assert HealingStore().heal(PARENT, message) == Message("assistant", content)
    different = Message("assistant", content, "Other.")
    assert HealingStore().heal(PARENT, different) == different


def test_another_conversation_heals_where_only_one_thing_was_thought(store):
    assert store.heal(b"third", ECHOES["stripped"](ANSWER)).reasoning == ANSWER.reasoning
    store.put(b"elsewhere", Message("assistant", ANSWER.content, "Later thought.", ANSWER.tool_calls))
    stripped = ECHOES["stripped"](ANSWER)
    assert store.heal(PARENT, stripped).reasoning == ANSWER.reasoning
    assert store.heal(b"third", stripped) == stripped
    store.put(b"elsewhere", ANSWER)
    assert store.heal(b"third", stripped).reasoning == ANSWER.reasoning


def test_thoughts_do_not_come_from_another_conversation():
    """A new system text makes every answer's place another one."""
    pipe = pipeline("qwen35")
    clients = [Client("qwen35", pipe, echo=ECHOES["stripped"]) for _ in range(2)]
    for number, client in enumerate(clients):
        client.ask(Message("system", "You help."), Message("user", f"Question {number}"))
        client.answer(say("Done.", f"Thought {number}."))
    clients[0].messages[0] = Message("system", "You help in another way.")
    clients[0].ask(Message("user", "More"))
    assert "Thought 1." not in model("qwen35")[1].decode(clients[0].prepared.prompt.tokens)


def test_empty_turns_are_not_remembered():
    store = HealingStore()
    assert store.put(PARENT, Message("assistant", " \n", "Only thoughts.")) is None
    assert store.heal(PARENT, Message("assistant", "")).reasoning is None


def test_the_least_recently_used_goes_first():
    store = HealingStore(capacity=3)
    for name in ("a", "b", "c"):
        store.put(PARENT, Message("assistant", name, f"why {name}"))
    store.heal(PARENT, Message("assistant", "a"))
    store.put(PARENT, Message("assistant", "d", "why d"))
    assert len(store) == 3
    assert [store.heal(PARENT, Message("assistant", n)).reasoning for n in "abcd"] == ["why a", None, "why c", "why d"]


def test_broken_arguments_heal_by_their_text():
    store = HealingStore()
    store.put(PARENT, Message("assistant", "", "why", (ToolCall("1", "f", '{"a": '),)))
    assert store.heal(PARENT, Message("assistant", "", None, (ToolCall("2", "f", '{"a":'),))).reasoning == "why"


def test_only_a_leading_block_is_embedded_thinking():
    assert split_embedded("<think>\na\n</think>\n\nb") == ("a", "b")
    assert split_embedded("b <think>a</think>") == (None, "b <think>a</think>")
    assert split_embedded("<think>never closed") == (None, "<think>never closed")


def sent(read: str, bash: str = '{"command": "ls"}') -> Message:
    calls = (ToolCall("1", "read", read), ToolCall("2", "bash", bash))
    return Message("assistant", ANSWER.content, None, calls)


@pytest.mark.parametrize(
    "read",
    [
        '{"path": "a.py", "limit": 3, "all": false}',
        '{"limit": 3, "note": null, "path": "a.py", "more": "", "some": [], "rest": {}}',
    ],
)
def test_arguments_that_say_nothing_may_come_and_go(store, read):
    healed = store.heal(PARENT, sent(read))
    assert [call.arguments for call in healed.tool_calls] == [call.arguments for call in ANSWER.tool_calls]
    assert healed.reasoning == ANSWER.reasoning
    # The place counts for more than the very words elsewhere.
    store.put(b"other", sent(read))
    assert store.heal(b"other", replace(ANSWER, reasoning=None)).tool_calls[0].arguments == read


@pytest.mark.parametrize(
    "message",
    [
        sent('{"path": "a.py", "limit": 3, "all": true}'),
        sent('{"path": "a.py", "limit": 3, "offset": 0}'),
        sent('{"path": "", "limit": 3}'),
        sent('{"path": "a.py", "limit": 3.0, "all": false}'),
        sent('{"path": "a.py", "limit": 3, "all": false'),
        sent('["a.py", 3]'),
        replace(sent('{"path": "a.py", "limit": 3, "all": false}'), content="Other words"),
        replace(ANSWER, tool_calls=sent('{"path": "a.py", "limit": 3, "all": false}').tool_calls[:1]),
    ],
)
def test_arguments_that_say_something_are_the_clients(store, message):
    assert store.heal(PARENT, message) == message
    assert store.heal(b"elsewhere", sent('{"path": "a.py", "limit": 3, "all": false}')).reasoning is None


FILED = say("Here.\n\n# Title\n\n> quoted\ntext", "It\nsubtracts.")
MARK = "thinking-content-7bbeb8e1441453ad999a0bbba8a46d4b"
KEPT = f"\n<{MARK}>\n\n{{}}\n\n</{MARK}>\n\nHere.\n\n"


def test_an_answer_in_aiders_history_file_is_known_in_its_own_conversation():
    store = HealingStore(capacity=2)
    store.put(PARENT, FILED)
    turn = store.from_file(PARENT, [KEPT.format("It\nsubtracts."), "text\n\n"])
    assert turn is not None and (turn.content, turn.reasoning) == (FILED.content, FILED.reasoning)
    assert store.from_file(PARENT, ["Here.\n\ntext  \n"]) == turn
    assert store.from_file(PARENT, [KEPT.format("It adds."), "text"]) is None
    assert store.from_file(PARENT, ["Here.\n", "other text"]) is None
    assert store.from_file(b"another", ["Here.\n\ntext\n"]) is None
    for number in range(2):
        store.put(PARENT, say(f"More {number}"))
    assert store.from_file(PARENT, ["Here.\n\ntext\n"]) is None


def test_a_message_with_volatile_fields_is_not_one_from_a_history_file():
    client = Client("chatml", pipeline("chatml"))
    client.ask(Message("user", "Current time is 08:20  \nHello  \n"))
    client.answer(say("Hi."))
    client.ask(Message("user", "And now?"))
    client.answer(say("Well."))
    client.messages[0] = Message("user", "Current time is 08:21  \nHello  \n")
    client.messages.insert(2, Message("user", "<system-reminder>  \nBe quick.  \n</system-reminder>  \n"))
    client.ask(Message("user", "More"))
    prompt = model("chatml")[1].decode(client.prepared.prompt.tokens)
    assert "08:21" in prompt and "Be quick." in prompt


def test_calls_and_thoughts_never_come_from_a_history_file():
    client = Client("chatml", pipeline("chatml"))
    client.ask(Message("user", "Go  \n"))
    client.answer(say("I look."))
    client.messages[1] = say("I look.", None, read={"path": "found.py"})
    client.ask(Message("tool", "its text", tool_call_id="call_read"))
    assert "found.py" in model("chatml")[1].decode(client.prepared.prompt.tokens)
