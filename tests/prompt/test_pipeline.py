"""Messages to tokens: exactness, reuse of generated tokens, boundaries."""

from __future__ import annotations

import pytest

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message, ToolCall
from start_llm.prompt.guard import CUT
from tests.kinds import some
from tests.prompt.client import ECHOES, Client, pipeline, request, say, system_text
from tests.prompt.models import TEMPLATES, model

SYSTEM = Message("system", "You are a helpful coding assistant.\nBe brief.")
TOOL = Message("tool", "def add(a, b): return a - b", tool_call_id="call_read", name="read")
# Families whose template shows reasoning of turns after the last user message; the others never see it again.
SHOWS_REASONING = ("chatml", "qwen3", "qwen35", "glm4")


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_first_prompt_is_the_template_rendering(family):
    pipe = pipeline(family)
    prepared = pipe.prepare(request([SYSTEM, Message("user", "Hello there")]), thinking=True)
    text = model(family)[1].decode(prepared.prompt.tokens)
    assert "Be brief." in text and "Hello there" in text
    assert prepared.prompt.tokens == tuple(model(family)[1].encode(text))
    assert prepared.new == len(prepared.prompt.tokens)
    assert model(family)[1].decode(prepared.prompt.tokens[: prepared.prompt.generation]).count("Hello there") == 1
    assert "Hello" not in model(family)[1].decode(prepared.prompt.tokens[prepared.prompt.generation :])


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("family", some(SHOWS_REASONING, 2))
def test_a_tool_loop_reuses_every_generated_token(family, echo):
    client = Client(family, pipeline(family), ECHOES[echo])
    client.ask(SYSTEM, Message("user", "Fix the test."))
    stop = "<|observation|>" if family == "glm4" else None
    for step in range(4):
        spoken = client.answer(say(f"\n\nStep {step}.", f"Hm {step}.", read={"path": f"b{step}.py", "limit": 3}), stop)
        prepared = client.ask(Message("tool", f"result {step}", tool_call_id="call_read"))
        assert prepared.prompt.tokens[: len(spoken)] == spoken
        assert prepared.prompt.tokens[len(spoken)] in model(family)[1].special_tokens.values()
        assert prepared.new == len(prepared.prompt.tokens) - len(spoken)
    assert model(family)[1].decode(prepared.prompt.tokens).count("Hm ") == 4


@pytest.mark.parametrize("family", some(["gemma", "llama3", "mistral"]))
@pytest.mark.parametrize("echo", ECHOES)
def test_plain_turns_reuse_every_generated_token(family, echo):
    client = Client(family, pipeline(family), ECHOES[echo], tools=())
    client.ask(SYSTEM, Message("user", "Hello"))
    for step in range(4):
        spoken = client.answer(say(f"Answer {step}."))
        prepared = client.ask(Message("user", f"And then {step}?"))
        assert prepared.prompt.tokens[: len(spoken)] == spoken


@pytest.mark.parametrize("family", ["gemma", "llama3", "mistral"])
def test_tool_loops_of_families_with_odd_rules(family):
    """The conversation is fitted to the template; text of calls differs from what was generated, nothing is lost."""
    client = Client(family, pipeline(family))
    client.ask(SYSTEM, Message("user", "Fix it."))
    client.answer(say("Two reads.", read={"path": "a.py"}, bash={"command": "ls"}))
    results = [Message("tool", f"text of {name}", tool_call_id=f"call_{name}") for name in ("read", "bash")]
    client.ask(*results, Message("system", "The user is in a hurry."))
    text = client.text
    for part in ("Be brief.", "Reads a file", "Two reads.", "a.py", "ls", "text of read", "text of bash", "hurry"):
        assert part in text, part


def test_harmony_turns_keep_their_end():
    """A final answer ends with another token in history than when generated; calls end with the same."""
    client = Client("harmony", pipeline("harmony"))
    tokenizer = model("harmony")[1]
    client.ask(SYSTEM, Message("user", "Fix it."))
    for step in range(3):
        spoken = client.answer(say("", f"Why {step}", read={"path": f"{step}.py"}), "<|call|>")
        prepared = client.ask(Message("tool", f"result {step}", tool_call_id="call_read"))
        assert prepared.prompt.tokens[: len(spoken)] == spoken
        assert prepared.prompt.tokens[len(spoken)] == tokenizer.special_tokens["<|call|>"]
    client = Client("harmony", pipeline("harmony"))
    client.ask(SYSTEM, Message("user", "Hello"))
    spoken = client.answer(say("Hi.", None))
    tokens = client.ask(Message("user", "More")).prompt.tokens
    assert tokens[: len(spoken)] == spoken
    assert tokenizer.decode(tokens[len(spoken) :]).startswith("<|end|><|start|>user<|message|>More")


def test_harmony_shows_text_beside_reasoning():
    talk = [Message("user", "Go"), say("Reading now.", "Thinking.", read={"path": "a"}), Message("tool", "r")]
    tokens = pipeline("harmony").prepare(request(talk), thinking=True).prompt.tokens
    text = model("harmony")[1].decode(tokens)
    assert "Thinking.\n\nReading now." in text


def test_reasoning_that_the_template_drops_costs_from_the_turn_on():
    """Qwen3 drops old reasoning once the user speaks again; everything before that turn stays."""
    client = Client("qwen3", pipeline("qwen3"))
    first = client.ask(SYSTEM, Message("user", "Hello")).prompt
    spoken = client.answer(say("Hi."))
    second = client.ask(Message("user", "And now?")).prompt
    assert second.tokens[: first.generation] == first.tokens[: first.generation]
    assert second.tokens[: len(spoken)] != spoken
    assert "Let me see" not in model("qwen3")[1].decode(second.tokens)


def test_preserve_thinking_keeps_old_reasoning():
    for preserve in (True, False):
        client = Client("qwen35", pipeline("qwen35", preserve_thinking=preserve), ECHOES["stripped"])
        client.ask(SYSTEM, Message("user", "Hello"))
        spoken = client.answer(say("Hi, " + "and so on, " * 40))
        tokens = client.ask(Message("user", "And now?")).prompt.tokens
        assert (tokens[: len(spoken)] == spoken) is preserve
        assert ("Let me see" in model("qwen35")[1].decode(tokens)) is preserve


def test_an_empty_think_block_of_the_prompt_stays():
    client = Client("qwen3", pipeline("qwen3"), thinking=False)
    prepared = client.ask(SYSTEM, Message("user", "Hello"))
    assert not prepared.rendering.in_reasoning
    spoken = client.answer(say("Hi.", None))
    assert client.ask(Message("user", "And now?")).prompt.tokens[: len(spoken)] == spoken


def test_in_reasoning_is_what_the_prompt_ends_in():
    pipe = pipeline("qwen35")
    assert pipe.prepare(request([Message("user", "x")]), thinking=True).rendering.in_reasoning
    assert not pipe.prepare(request([Message("user", "x")]), thinking=False).rendering.in_reasoning
    assert not pipeline("qwen3").prepare(request([Message("user", "x")]), thinking=True).rendering.in_reasoning


def test_an_edited_turn_is_shown_as_the_client_sent_it():
    """A changed call is never overwritten by what was generated."""
    client = Client("chatml", pipeline("chatml"))
    first = client.ask(SYSTEM, Message("user", "Go"))
    client.answer(say("Running.", bash={"command": "cd /x && git diff"}))
    edited = ToolCall("call_bash", "bash", '{"command": "git diff"}')
    client.messages[-1] = Message("assistant", "Running.", "Let me see.", (edited,))
    prepared = client.ask(Message("tool", "diff", tool_call_id="call_bash"))
    text = model("chatml")[1].decode(prepared.prompt.tokens)
    assert '"command": "git diff"' in text and "cd /x" not in text
    assert prepared.prompt.tokens[: first.prompt.generation] == first.prompt.tokens[: first.prompt.generation]


def test_the_clients_other_reasoning_stands():
    client = Client("chatml", pipeline("chatml"))
    client.ask(Message("user", "Go"))
    client.answer(say("Done."))
    client.messages[-1] = Message("assistant", "Done.", "I was told to say so.")
    client.ask(Message("user", "Why?"))
    assert "I was told to say so." in client.text and "Let me see." not in client.text


def test_regenerating_keeps_every_answer():
    """Two answers to one prompt; the client goes on from the first, then from the second."""
    client = Client("chatml", pipeline("chatml"))
    prompt = client.ask(SYSTEM, Message("user", "Go")).prompt.tokens
    one = client.answer(say("First."))
    again = Client("chatml", client.pipe)
    assert again.ask(SYSTEM, Message("user", "Go")).prompt.tokens == prompt
    two = again.answer(say("Second."))
    assert client.ask(Message("user", "More")).prompt.tokens[: len(one)] == one
    client.answer(say("Third."))
    assert again.ask(Message("user", "Else")).prompt.tokens[: len(two)] == two


def test_equal_turns_heal_to_their_own_reasoning():
    client = Client("chatml", pipeline("chatml"), ECHOES["stripped"])
    client.ask(SYSTEM, Message("user", "Go"))
    for thought in ("once", "twice", "thrice"):
        client.answer(say("", thought, bash={"command": "ls"}))
        prepared = client.ask(Message("tool", "nothing", tool_call_id="call_bash"))
    text = model("chatml")[1].decode(prepared.prompt.tokens)
    assert [text.count(word) for word in ("once", "twice", "thrice")] == [1, 1, 1]


def test_a_stop_string_leaves_the_generated_tokens_out():
    """The client was told less than what was generated; the rest must not come back."""
    client = Client("chatml", pipeline("chatml"))
    prepared = client.ask(Message("user", "Go"))
    tokens = model("chatml")[1].encode("One.STOP and more")
    client.pipe.record(prepared, Message("assistant", "One."), tokens)
    client.messages.append(Message("assistant", "One."))
    text = model("chatml")[1].decode(client.ask(Message("user", "Next")).prompt.tokens)
    assert "STOP" not in text and "One.<|im_end|>" in text


@pytest.mark.parametrize("family", TEMPLATES)
def test_boundaries_are_message_starts(family):
    client = Client(family, pipeline(family), tools=())
    client.ask(SYSTEM, Message("user", "Hello"))
    client.answer(say("Hi.", None))
    prompt = client.ask(Message("user", "And now?")).prompt
    tokenizer = model(family)[1]
    assert list(prompt.boundaries) == sorted(set(prompt.boundaries)) and 0 not in prompt.boundaries
    before = [tokenizer.decode(prompt.tokens[:boundary]) for boundary in prompt.boundaries]
    assert any("Hi." in text and "And now" not in text for text in before), before
    assert not any(text.endswith(("H", "Hi", "And", "You")) for text in before)
    if family != "gemma":  # its system text is part of the first user message
        head = tokenizer.decode(prompt.tokens[: prompt.system_end])
        assert "Hello" not in head and ("Be brief." in head or family == "mistral")
    assert "And now?" in tokenizer.decode(prompt.tokens[: prompt.generation])


def test_an_insertion_is_all_that_is_new():
    """What follows the inserted message was sent before; it may have to be computed, but it is not new."""
    client = Client("chatml", pipeline("chatml"), tools=())
    client.ask(SYSTEM, Message("user", "First question"))
    for step in range(3):
        client.answer(say(f"A long answer with many words, number {step}.", None))
        prepared = client.ask(Message("user", f"A question of some length, number {step}"))
    client.messages.insert(4, Message("user", "(inserted)"))
    inserted = client.pipe.prepare(request(client.messages), thinking=True)
    rest = model("chatml")[1].decode(inserted.prompt.tokens).split("(inserted)")[1]
    assert rest.count("number") == 4
    # the inserted message and the last question, which no finished request carried
    assert 0 < inserted.new < len(prepared.prompt.tokens) // 2
    assert inserted.new < len(model("chatml")[1].encode(rest)) - 60


def test_prepare_is_deterministic_and_leaves_no_trace():
    client = Client("qwen35", pipeline("qwen35"))
    client.ask(SYSTEM, Message("user", "Hello"))
    client.answer(say("Hi."))
    first = client.ask(Message("user", "Next"))
    second = client.pipe.prepare(request(client.messages, client.tools), thinking=True)
    assert first == second


def test_a_raw_prompt_is_encoded_as_it_is():
    pipe = pipeline("chatml")
    assert pipe.prepare(request([], prompt="Once upon"), thinking=False).prompt.tokens == tuple(
        model("chatml")[1].encode("Once upon")
    )
    assert pipe.prepare(request([], prompt=(5, 6)), thinking=False).prompt.tokens == (5, 6)
    with pytest.raises(BadRequest, match="prompt is empty"):
        pipe.prepare(request([], prompt=""), thinking=False)


def test_no_messages_is_a_bad_request():
    with pytest.raises(BadRequest, match="messages is empty") as caught:
        pipeline("chatml").prepare(request([]), thinking=False)
    assert caught.value.param == "messages"


def test_side_requests_and_sessions():
    pipe = pipeline("chatml")
    client = Client("chatml", pipe)
    first = client.ask(SYSTEM, Message("user", "Hello"))
    client.answer(say("Hi."))
    second = client.ask(Message("user", "Next"))
    assert first.session == second.session and not first.one_shot
    title = pipe.prepare(request([SYSTEM, Message("user", "Title?")]), thinking=False)
    assert title.one_shot and title.session != first.session
    assert pipe.prepare(request([SYSTEM, Message("user", "Hello")], session="mine"), thinking=False).session == "mine"


def test_an_unknown_conversation_read_from_a_file_is_shown_as_it_is():
    words = [Message("user", "Do it  \n"), Message("assistant", "A\n"), Message("assistant", "B\n")]
    prepared = pipeline("chatml").prepare(request([*words, Message("user", "Go on")]), thinking=False)
    text = model("chatml")[1].decode(prepared.prompt.tokens)
    assert "Do it  \n" in text and text.index("A\n") < text.index("B\n")


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.thorough
def test_strict_is_the_template_applied_to_the_clients_messages(family, echo):
    pipe = pipeline(family, cache_drift_policy="strict")
    client = Client(family, pipe, ECHOES[echo])
    tokenizer = model(family)[1]
    client.ask(SYSTEM, Message("user", "Fix the test."))
    for step in range(3):
        client.answer(say("" if family == "harmony" else f"Step {step}.", "Hm.", read={"path": f"b{step}.py"}))
        tokens = client.ask(Message("tool", f"result {step}", tool_call_id="call_read")).prompt.tokens
        fresh = pipeline(family, cache_drift_policy="strict")
        assert tokens == fresh.prepare(request(client.messages, client.tools), thinking=True).prompt.tokens
        assert tokens == tuple(tokenizer.encode(tokenizer.decode(tokens)))


BEGUN, REST = "The file holds:", " one function, and no more than that."


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_frame_of_a_begun_answer_is_that_of_an_answer(family: str) -> None:
    pipe, tokenizer = pipeline(family), model(family)[1]
    asked = [Message("user", "Say what stands in this file.")]
    prepared = pipe.prepare(request([*asked, Message("assistant", BEGUN)]), thinking=False)
    text = prepared.rendering.text.replace(CUT, "")
    if family == "harmony":
        assert text.endswith(f"<|start|>assistant<|channel|>final<|message|>{BEGUN}")
    end = min(tokenizer.eos_ids)
    generated = tokenizer.encode(REST)
    pipe.record(prepared, Message("assistant", REST), [*generated, end])
    talk = [*asked, Message("assistant", BEGUN + REST), Message("user", "And then?")]
    tokens = pipe.prepare(request(talk), thinking=False).prompt.tokens
    known = (*prepared.prompt.tokens, *generated)
    assert tokens[: len(known)] == known


# --- totals that the metrics show ---


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
