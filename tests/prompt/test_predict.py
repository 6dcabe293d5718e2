"""Re-anchoring: the guess is what the client's next request really begins with."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from start_llm.core.messages import Message
from start_llm.prompt.predict import PATIENCE, Guesses
from start_llm.prompt.recorder import Recorder
from tests.prompt.client import CLAUDE, INTERNAL, OPENCLAW, Client, pipeline, request, say, system_text, talk
from tests.prompt.models import EOS, TEMPLATES, model


def guess_and_answer(client: Client, answer: Message):
    prepared = client.prepared
    generated = client.answer(answer)[len(prepared.prompt.tokens) :]
    end = model(client.family)[1].special_tokens[EOS[client.family][0]]
    return client.pipe.predict(prepared, answer, [*generated, end])


@pytest.mark.parametrize("family", ["chatml", "qwen35", "glm4", "qwen3"])
def test_a_transient_message_is_guessed_to_go(family):
    client = Client(family, pipeline(family))
    client.ask(Message("system", OPENCLAW), Message("user", "Go"), Message("user", INTERNAL.format("none")))
    for step in range(3):
        guess = guess_and_answer(client, say("x", "why", bash={"command": f"ls {step}"}))
        assert guess is not None and guess.transient is None
        assert INTERNAL[:20] not in model(family)[1].decode(guess.tokens)
        client.messages = [message for message in client.messages if "OPENCLAW" not in message.content]
        new = (Message("tool", f"r{step}", tool_call_id="call_bash"), Message("user", INTERNAL.format(step)))
        prompt = client.ask(*new).prompt
        assert prompt.tokens[: len(guess.tokens)] == guess.tokens
        assert len(guess.tokens) > client.prepared.prompt.tokens.index(guess.tokens[-1])
        # nothing but the result and the new transient message is left to compute
        rest = model(family)[1].decode(prompt.tokens[len(guess.tokens) :])
        assert "ls" not in rest and f"r{step}" in rest


@pytest.mark.parametrize("family", TEMPLATES)
def test_nothing_is_guessed_where_all_is_computed(family):
    client = Client(family, pipeline(family), tools=())
    client.ask(Message("system", OPENCLAW), Message("user", "Go"))
    answer = say("x", None) if family in ("qwen3", "gemma", "llama3", "mistral", "harmony") else say("x", "why")
    assert guess_and_answer(client, answer) is None


def test_two_owners_with_one_name_of_a_session_have_guesses_of_their_own():
    def prepared(owner: str, *keys: bytes) -> Any:
        chain = SimpleNamespace(keys=keys, last_key=keys[-1])
        request, prompt = SimpleNamespace(owner=owner), SimpleNamespace(tokens=(1, 9))
        return SimpleNamespace(request=request, session="main", chain=chain, prompt=prompt)

    guesses = Guesses()
    for _ in range(PATIENCE):
        assert guesses.made(prepared("ann", b"1"), (1, 2)) and guesses.made(prepared("bob", b"1"), (1, 9))
        assert guesses.seen(prepared("ann", b"1", b"2")) is False
    assert not guesses.made(prepared("ann", b"1"), (1, 2)) and guesses.made(prepared("bob", b"1"), (1, 9))
    stayed = [guesses.stays(prepared(owner, b"1"), ("a head",)) for owner in ("ann", "bob", "ann")]
    assert stayed == [False, False, True]


def test_a_client_that_proves_the_guesses_wrong_gets_none_until_one_is_right():
    client = Client("chatml", pipeline("chatml"))
    internal = Message("user", INTERNAL.format("none"))
    client.ask(Message("system", OPENCLAW), Message("user", "Go"), internal)
    outcomes = []
    for honest in (False, False, True, True):
        guess = guess_and_answer(client, say("x", "why", bash={"command": "ls"}))
        outcomes.append(guess is not None)
        client.messages = [message for message in client.messages if message != internal]
        if not honest:
            client.messages[-1] = Message("assistant", "I rewrote this.")
        client.ask(Message("tool", "r", tool_call_id="call_bash"), internal)
    assert outcomes == [True, True, False, True]


def test_a_side_request_does_not_spoil_the_guess():
    client = Client("chatml", pipeline("chatml"))
    internal = Message("user", INTERNAL.format("none"))
    client.ask(Message("system", OPENCLAW), Message("user", "Go"), internal)
    assert guess_and_answer(client, say("x", "why", bash={"command": "ls"})) is not None
    for _ in range(4):
        side = Client("chatml", client.pipe, tools=())
        side.ask(Message("system", OPENCLAW), Message("user", "Go"), Message("user", "A title, please"))
        side.answer(say("Title"))
    del client.messages[2]
    client.ask(Message("tool", "r", tool_call_id="call_bash"), internal)
    assert guess_and_answer(client, say("y", "why", bash={"command": "ls"})) is not None


def head_guessed(client: Client, system: str, reminder: str = ""):
    """A turn with this system text and a block before the first user's words: what is guessed behind it."""
    first = client.messages[1]
    words = first.content.rpartition("</system-reminder>\n")[2]
    client.messages[:2] = [Message("system", system), replace(first, content=f"{reminder}{words}")]
    client.ask(Message("user", "More"))
    return guess_and_answer(client, say("Well.", None))


def test_a_head_that_is_sent_otherwise_than_shown_is_guessed_when_it_stays() -> None:
    client = talk(1, system=system_text(CLAUDE))
    head, block = f"{client.messages[0].content}\nBranch: dev", "<system-reminder>\nIt is Monday.\n</system-reminder>\n"
    assert head_guessed(client, head, block) is None
    guess = head_guessed(client, head, block)
    text = model(client.family)[1].decode(guess.tokens)
    assert "Branch: dev" in text and "It is Monday." in text and "Go." not in text
    assert guess.system_end < len(guess.tokens)
    # Behind a summary all of it is there.
    summary = [Message("system", head), Message("user", f"{block}What was said: much.")]
    asked = client.pipe.prepare(request(summary, client.tools), thinking=True)
    assert asked.prompt.tokens[: len(guess.tokens)] == guess.tokens
    assert len(asked.prompt.tokens) - len(guess.tokens) < 40
    assert head_guessed(client, head, block) is None, "it was told once"


def test_a_head_that_changes_each_time_is_not_guessed() -> None:
    client = talk(1, system=system_text(CLAUDE))
    head = client.messages[0].content
    assert all(head_guessed(client, f"{head}\nTime: 10:0{minute}") is None for minute in range(6))


def test_a_head_that_is_shown_is_not_guessed() -> None:
    client = talk(1, system=system_text(CLAUDE))
    assert all(head_guessed(client, client.messages[0].content) is None for _ in range(3))


# --- the recorder: whose guesses are, and what becomes of one while it is closed ---

WAIT = 60.0


class Held:
    def __init__(self) -> None:
        self.guessing, self.go_on = threading.Event(), threading.Event()

    def record(self, *job: Any) -> None:
        """Nothing is kept."""

    def predict(self, *job: Any) -> str:
        self.guessing.set()
        assert self.go_on.wait(WAIT)
        return "a guess"


def test_a_recorder_that_is_closed_while_it_guesses(caplog: pytest.LogCaptureFixture) -> None:
    pipeline, taken = Held(), []
    recorder = Recorder(pipeline, lambda guess, *whose: taken.append(guess))  # type: ignore[arg-type]
    recorder.finish(SimpleNamespace(session="s"), None, ())  # type: ignore[arg-type]
    assert pipeline.guessing.wait(WAIT)
    closing = threading.Thread(target=recorder.close)
    closing.start()
    while recorder._anchor is not None:
        closing.join(0.01)
    pipeline.go_on.set()
    closing.join(WAIT)
    assert not caplog.records and taken == []


def test_a_guess_is_of_the_conversation_and_of_its_owner() -> None:
    pipeline, taken = Held(), []
    pipeline.go_on.set()
    recorder = Recorder(pipeline, lambda *guess: taken.append(guess))  # type: ignore[arg-type]
    prepared = SimpleNamespace(session="s", request=SimpleNamespace(owner="ann"))
    recorder.finish(prepared, None, ())  # type: ignore[arg-type]
    recorder.flush()
    recorder.close()
    assert taken == [("a guess", "s", "ann")]
