"""The plain tokens of a turn are what a router makes of the client's next request."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from start_llm.core.messages import Message
from start_llm.prompt.plain import PlainTokens
from tests.prompt.client import ECHOES, READ, Client, pipeline, say
from tests.prompt.models import model

FAMILIES = ("qwen3", "qwen35", "chatml", "llama3", "glm4")
QUESTIONS = ("Fix calc.py", "And the test?", "Once more.")


def routers_tokens(family: str, messages: list[Message]) -> list[int]:
    template, tokenizer = model(family)
    made = [{"role": each.role, "content": each.content} for each in messages]
    return tokenizer.encode(template.render(made, [READ.as_function()], True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("echo", ["stripped", "kept"])
def test_plain_tokens_begin_the_next_request_of_a_client(family: str, echo: str) -> None:
    """Two turns of text; what the model was shown has its reasoning, and tokens that no tokenizer chooses."""
    client = Client(family, pipeline(family), tools=(READ,), echo=ECHOES[echo])
    client.messages.append(Message("system", "You are an agent. It is 10:05."))
    for number, question in enumerate(QUESTIONS):
        prepared = client.ask(Message("user", question))
        answer = say(f"Done {number}.", None if echo == "kept" else "Let me see.")
        generated = client.answer(answer)[len(prepared.prompt.tokens) :]
        plain, *_ = client.pipe.plain(prepared, answer, generated)
        following = routers_tokens(family, [*client.messages, Message("user", "Next.")])
        assert list(plain) == following[: len(plain)]
        assert len(following) - len(plain) < 40, "the answer is a part of it"


@pytest.mark.parametrize("echo", ["stripped", "kept"])
def test_reasoning_in_front_of_a_call_may_come_back_or_not(echo: str) -> None:
    """Qwen's template shows it until the user says something. Which clients give it back is not known in advance."""
    client = Client("qwen3", pipeline("qwen3"), tools=(READ,), echo=ECHOES[echo])
    prepared = client.ask(Message("user", "Fix calc.py"))
    answer = say("", "Let me see.", read={"path": "calc.py"})
    generated = client.answer(answer)[len(prepared.prompt.tokens) :]
    without, with_it = client.pipe.plain(prepared, answer, generated)
    template, tokenizer = model("qwen3")
    call = {"type": "function", "function": {"name": "read", "arguments": {"path": "calc.py"}}}
    sent: list[dict[str, object]] = [{"role": "user", "content": "Fix calc.py"}]
    sent.append({"role": "assistant", "content": "", "tool_calls": [call]})
    sent[-1] |= {"reasoning_content": "Let me see."} if echo == "kept" else {}
    sent.append({"role": "tool", "content": "a = 1"})
    following = tokenizer.encode(template.render(sent, [READ.as_function()], True))
    plain = with_it if echo == "kept" else without
    assert list(plain) == following[: len(plain)] and len(following) - len(plain) < 40


def test_only_what_is_new_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("qwen3", pipeline("qwen3"), tools=(READ,))
    coder = client.pipe._composer.coder
    encode = Mock(wraps=coder.encode)
    prepared = client.ask(Message("user", "word " * 2000))
    client.answer(say("Done."))
    made = PlainTokens(client.pipe._composer.renderer, coder)
    monkeypatch.setattr(coder, "encode", encode)
    (first,) = made.of(prepared, say("Done."))
    (again,) = made.of(prepared, replace(say("Done."), content="Done, and more."))
    sizes = [len(call.args[0]) for call in encode.call_args_list]
    assert sizes[0] > 10_000 and sizes[1] < 1_000
    assert again[: len(first) - 10] == first[: len(first) - 10]
