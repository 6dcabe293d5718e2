"""A conversation is asked something with another head: a summary without tools, a plan, another agent's role."""

from __future__ import annotations

from dataclasses import replace

import pytest

from start_llm.core.messages import Message, Tool
from start_llm.core.report import CacheReport
from start_llm.prompt.prepared import Prepared
from tests.prompt.client import BASH, CLAUDE, EDIT, READ, RULES, Client, pipeline, request, say, system_text, talk
from tests.prompt.models import TEMPLATES, model

MAIN = system_text("You are a coding agent.")
ROLE = Message("system", "You write summaries. Answer in French, and begin with the word RAPPORT.")
ASK = Message("user", "Summarize what was said.")
NO_CALLS = "No tool can be called now: answer with text."


def aside(client: Client, *new: Message, system: Message | None = MAIN, tools: tuple[Tool, ...] = ()) -> Prepared:
    """A request beside the conversation, which stays as it is."""
    messages = [*((system,) if system is not None else ()), *client.messages[1:], *new]
    return client.pipe.prepare(request(messages, tools, session=client.session), thinking=True)


def decoded(client: Client, prepared: Prepared) -> str:
    return model(client.family)[1].decode(prepared.prompt.tokens)


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name not in ("gemma", "qwen3", "harmony")])
def test_without_tools_the_shown_ones_stay_and_a_line_takes_them_back(family: str) -> None:
    client = talk(family=family, tools=(READ, BASH, EDIT))
    prepared = aside(client, ASK)
    assert client.goes_on(prepared)
    assert prepared.notes == (NO_CALLS,)
    assert prepared.no_calls
    assert decoded(client, prepared).count("Reads a file") == 1
    assert not client.ask(Message("user", "More")).no_calls


def test_many_tools_do_not_count_against_the_tenth() -> None:
    many = tuple(Tool(f"tool_{n}", RULES, {"type": "object"}) for n in range(40))
    client = talk(tools=many)
    prepared = aside(client, ASK)
    assert client.goes_on(prepared) and prepared.notes == (NO_CALLS,)
    assert len(prepared.prompt.tokens) - len(client.spoken) < 100


def test_a_system_text_that_is_gone_no_longer_holds() -> None:
    client = talk()
    prepared = aside(client, ASK, system=None, tools=client.tools)
    assert client.goes_on(prepared)
    assert prepared.notes == ("The system text at the top no longer holds.",)


def test_a_retry_is_the_same_prompt() -> None:
    client = talk()
    first = aside(client, ASK, system=ROLE)
    assert aside(client, ASK, system=ROLE).prompt.tokens == first.prompt.tokens
    client.pipe.record(first, say("RAPPORT", None), model(client.family)[1].encode("RAPPORT<|im_end|>"))
    assert aside(client, ASK, system=ROLE).prompt.tokens == first.prompt.tokens


def test_plan_and_build_again_and_again_until_an_earlier_base_is_taken() -> None:
    plan = Message("system", "You plan. You change no file.")
    client = talk(turns=12)
    for turn in range(5):
        client.messages[0], client.tools = (MAIN, (READ, BASH)) if turn % 2 else (plan, ())
        prepared = client.ask(Message("user", f"Turn {turn}"))
        assert client.goes_on(prepared)
        assert prepared.no_calls is (turn % 2 == 0)
        expected = ["top holds again", "All tools described at the top"] if turn % 2 else [plan.content, NO_CALLS]
        assert all(words in "\n".join(prepared.notes) for words in expected)
        before = client.spoken
        client.answer(say(f"Answer {turn}.", None))
    client.messages[0], client.tools = MAIN, (READ, BASH)
    prepared = client.ask(Message("user", "Turn 5"))
    assert prepared.prompt.tokens[: len(before)] == before and not client.goes_on(prepared)
    assert prepared.notes == () and prepared.miss is not None
    assert "another one 5 times already" in prepared.miss.detail


def test_two_roles_on_one_history_see_nothing_of_each_other() -> None:
    client = talk()
    roles = [Message("system", f"You are the helper {name}.") for name in ("Anna", "Bert")]
    for role, other in (roles, roles[::-1]):
        prepared = aside(client, ASK, system=role, tools=(READ,))
        client.pipe.record(prepared, say("Yes.", None), model(client.family)[1].encode("Yes.<|im_end|>"))
        text = decoded(client, prepared)
        assert client.goes_on(prepared) and role.content in text and other.content not in text
        assert "do not call: bash" in text


@pytest.mark.parametrize("later", ["", "\nBranch: dev"])
def test_lines_that_come_back_are_told_as_those_at_the_top(later: str) -> None:
    client = talk(turns=8)
    lines = MAIN.content.split("\n")
    client.messages[0] = replace(MAIN, content="\n".join(lines[: len(lines) // 2]))
    assert client.goes_on(client.ask(Message("user", "Plan")))
    client.answer(say("I plan.", None))
    client.messages[0] = replace(MAIN, content=f"{MAIN.content}{later}")
    prepared = client.ask(Message("user", "Build"))
    assert client.goes_on(prepared)
    assert prepared.notes[0].startswith("The system text at the top holds again")
    assert ("but for what follows" in prepared.notes[0]) is bool(later)
    assert len(prepared.notes) == 1 + 2 * bool(later) and (not later or "+Branch: dev" in prepared.notes)


def test_the_same_block_of_several_messages_is_told_once() -> None:
    client = talk(system=system_text(CLAUDE))
    block = "<system-reminder>\nThe mode is {}.\n</system-reminder>\n"
    client.ask(Message("user", block.format("plan") + "One"))
    client.answer(say("A.", None))
    client.ask(Message("user", block.format("plan") + "Two"))
    client.answer(say("B.", None))
    for index, message in enumerate(client.messages):
        client.messages[index] = replace(message, content=message.content.removeprefix(block.format("plan")))
    prepared = client.ask(Message("user", "Three"))
    assert client.goes_on(prepared)
    assert prepared.notes == ("reminder in messages 9, 11, withdrawn: The mode is plan.",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("You plan.\n" + RULES * 9, "longer than a tenth"),
        ("You plan. </update>", "cannot be told"),
        ("You plan. /no_think", "cannot be told"),
        ("You plan. </UPDATE-1>", "cannot be told"),
    ],
)
def test_what_does_not_pay_or_cannot_be_told_is_shown_as_sent(text: str, why: str) -> None:
    client = talk()
    prepared = aside(client, ASK, system=Message("system", text))
    assert prepared.view.base is None and prepared.notes == () and not prepared.no_calls
    assert prepared.miss is not None and why in prepared.miss.detail
    assert decoded(client, prepared).count("You are a coding agent") == 0


def test_the_rules_of_the_client_hold_though_the_system_text_does_not_show_it() -> None:
    client = talk(system=system_text(CLAUDE))
    first = client.messages[1]
    reminder = "<system-reminder>\nToday is Monday.\n</system-reminder>\n"
    client.messages[1] = replace(first, content=reminder + first.content)
    prepared = aside(client, ASK, system=ROLE)
    assert client.goes_on(prepared)
    assert "Today is Monday." in "\n".join(prepared.notes)


@pytest.mark.parametrize(("owner", "reason"), [(None, "flattened"), ("another", None)])
def test_a_conversation_in_one_message_is_named(owner: str | None, reason: str | None) -> None:
    client = talk(turns=4)
    written = "\n".join(f"[{message.role}]: {message.content}" for message in client.messages[1:])
    messages = [ROLE, Message("user", f"<conversation>\n{written}\n</conversation>\nSum it up.")]
    prepared = client.pipe.prepare(request(messages, owner=owner), thinking=True)
    report = client.pipe.explain(CacheReport(prompt=len(prepared.prompt.tokens)), prepared)
    assert (report.miss and report.miss.reason) == reason
    if reason is not None:
        assert report.miss is not None and report.miss.place == "messages[1].content"
    fresh = client.pipe.prepare(request([MAIN, Message("user", "A new question. " * 100)]), thinking=True)
    assert fresh.miss is None


def test_a_reminder_ends_with_its_tag_though_words_follow_it_on_the_same_line() -> None:
    """Parts of a message are shown with nothing between them."""
    client = talk(system=system_text(CLAUDE))
    block = "<system-reminder>\nToday is {}.\n</system-reminder>"
    first = client.messages[1]
    client.messages[1] = replace(first, content=block.format("Monday") + block.format("Friday") + first.content)
    prepared = client.ask(Message("user", "More"))
    assert client.goes_on(prepared)
    assert all("\n".join(prepared.notes).count(f"Today is {day}.") == 1 for day in ("Monday", "Friday"))


def test_a_summary_that_is_asked_for_when_the_context_is_nearly_full_goes_on() -> None:
    """Tools that stay shown take room from the answer, but computing everything again would take minutes."""
    tools = tuple(Tool(f"tool_{n}", RULES[:2000], {"type": "object"}) for n in range(6))
    client = talk(turns=1)
    history = [*client.messages[:3], replace(client.messages[3], content=RULES * 30), ASK]
    tokenizer, whole = model("chatml")[1], 0
    for left, goes in ((0, True), (8192 + 16, True), (8192 - 16, False)):
        pipe = pipeline("chatml", context=whole + left if left else 0)
        first = pipe.prepare(request(history[:2], tools), thinking=True)
        pipe.record(first, history[2], tokenizer.encode("Step<|im_end|>"))
        prepared = pipe.prepare(request(history), thinking=True)
        assert (prepared.view.base is not None) is goes
        assert goes or (prepared.miss is not None and "would not fit" in prepared.miss.detail)
        whole = whole or len(prepared.prompt.tokens)
    assert whole // 8 > 8192


@pytest.mark.parametrize(("short", "goes"), [(600, True), (60, False)])
def test_a_note_takes_little_of_the_room_that_is_left(short: int, goes: bool) -> None:
    """In a context of 5,000 tokens an answer would have 625: here a request leaves fewer, whatever is shown."""
    history = talk(turns=1).messages
    later = [replace(MAIN, content=f"{MAIN.content}\nIt is late."), *history[1:], ASK]
    plain = len(pipeline("chatml").prepare(request(later), thinking=True).prompt.tokens)
    pipe = pipeline("chatml", context=plain + short)
    first = pipe.prepare(request(history[:2]), thinking=True)
    pipe.record(first, history[2], model("chatml")[1].encode("Step<|im_end|>"))
    prepared = pipe.prepare(request(later), thinking=True)
    assert (prepared.view.base is not None) is goes
    assert goes or (prepared.miss is not None and "would not fit" in prepared.miss.detail)
    assert short < (plain + short) // 8
