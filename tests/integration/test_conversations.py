"""Whole conversations: a turn computes what is new, and the model sees exactly what it should."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.integration.live import TOOLS, Live, echoed
from tests.kinds import some
from tests.oracle import expected_truth, make_tokenizer, script
from tests.together import together
from tests.unique import unique

KINDS = ["plain", "hybrid", "windowed"]
TURNS = 4
TOKENIZER = make_tokenizer()
READ_IT = "I read it. " + " ".join(f"line {i} says so," for i in range(15)) + " done."


def long_text(tag: str, words: int = 150) -> str:
    return " ".join(f"{tag} fact {i} of the file" for i in range(words // 5))


def raw_answer(turn: int, tool_loop: bool, reasoning: bool) -> str:
    think = f"<think>\nlet me think about step {turn}, carefully\n</think>\n\n" if reasoning else ""
    if tool_loop:
        call = json.dumps({"name": "read", "arguments": {"path": f"src/file{turn}.py", "line": turn}})
        return f"{think}{READ_IT}\n<tool_call>\n{call}\n</tool_call>"
    # Long enough to be known again without its thoughts (`match.PROOF_TOKENS`).
    return f"{think}Answer number {turn}: {{truth}} " + " ".join(f"word{i}" for i in range(40))


def converse(server: Live, *, how: str, tool_loop: bool, reasoning: bool) -> tuple[int, int, list[dict[str, Any]]]:
    """Some turns; (tokens computed inside the model, tokens that were new, answers)."""
    salt = unique()
    answers_cue = script(*(raw_answer(i, tool_loop, reasoning) for i in range(TURNS)))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are agent {salt}. {long_text('system')}"},
        {"role": "user", "content": f"{answers_cue} {long_text('first')}"},
    ]
    before, new, known, answers = server.work(), 0, 0, []
    for turn in range(TURNS):
        answer = server.chat(messages, tools=TOOLS)
        answers.append(answer)
        prompt = server.prompt_of(answer)
        new += len(prompt) - known
        known = len(prompt) + answer["body"]["usage"]["start_llm"]["generated"]
        check(answer, prompt, turn, tool_loop, reasoning)
        messages.append(echoed(answer["message"], how))
        if tool_loop:
            call = messages[-1]["tool_calls"][0]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": long_text(f"result {turn}", 60)})
        else:
            messages.append({"role": "user", "content": f"go on, {turn}. {long_text('more', 60)}"})
    return server.work() - before, new, answers


def check(answer: dict[str, Any], prompt: tuple[int, ...], turn: int, tool_loop: bool, reasoning: bool) -> None:
    message = answer["message"]
    if tool_loop:
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"path": f"src/file{turn}.py", "line": turn}
        assert message["content"] == READ_IT
    else:
        assert message["content"].startswith(f"Answer number {turn}: {expected_truth(prompt)} ")
    if reasoning:
        assert message["reasoning_content"].strip() == f"let me think about step {turn}, carefully"


WAYS = {
    "append": ("keep", False, False),
    "reasoning-stripped": ("strip", False, True),
    "reasoning-echoed": ("keep", False, True),
    "both-echoed": ("both", False, True),
    "tool-loop": ("keep", True, True),
    "tool-loop-retyped": ("retyped", True, True),
}
EVERYWHERE = {"append", "reasoning-stripped", "tool-loop-retyped"}
"""Each way is tried with a state that cannot be cut, and these with every kind, too."""
QUICK = {("windowed", "append"), ("hybrid", "reasoning-stripped"), ("hybrid", "tool-loop-retyped")}
THOROUGH, SLOW = [pytest.mark.thorough], [pytest.mark.slow]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(
            kind, way, marks=[] if (kind, way) in QUICK else THOROUGH if kind == "hybrid" or way in EVERYWHERE else SLOW
        )
        for kind in KINDS
        for way in WAYS
    ],
)
def test_a_turn_costs_what_is_new_in_it(servers: Callable[..., Live], kind: str, way: str) -> None:
    how, tool_loop, reasoning = WAYS[way]
    computed, new, answers = converse(servers(kind), how=how, tool_loop=tool_loop, reasoning=reasoning)
    assert computed <= 1.15 * new, [a["report"] for a in answers]
    for answer in answers[1:]:
        report = answer["report"]
        assert report["reused"] + report["computed"] == report["prompt"]
        assert report["computed"] <= report["new"] + 64 or "miss" in report


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "turns"), [(4, 2), pytest.param(8, 3, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_conversations_at_once_answer_as_alone(servers: Callable[..., Live], kind: str, count: int, turns: int) -> None:
    server = servers(kind)
    salts = [unique() for _ in range(count)]

    def talk(salt: str) -> list[str]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"{long_text('shared')} {salt}"}]
        for turn in range(turns):
            server.turn(messages, f"turn {turn} {long_text('x', 40)} ")
        return [message["content"] for message in messages if message["role"] == "assistant"]

    assert together(partial(talk, salt) for salt in salts) == [talk(salt) for salt in salts]


@pytest.mark.parametrize("kind", some(reversed(KINDS)))
def test_a_regenerated_answer_costs_only_its_end(servers: Callable[..., Live], kind: str) -> None:
    server = servers(kind)
    messages = [{"role": "user", "content": f"{unique()} {long_text('again', 400)} [[truth]]"}]
    first = server.chat(messages)
    before = server.work()
    second = server.chat(messages)
    assert second["message"]["content"] == first["message"]["content"]
    assert server.work() - before <= 8


@pytest.mark.parametrize("kind", some(["hybrid", "windowed", "plain"]))
def test_a_system_text_that_changes_on_the_way_costs_the_change(servers: Callable[..., Live], kind: str) -> None:
    """An agent that goes from planning to doing and back; the model sees which of them it is now."""
    server = servers(kind)
    rules = "\n".join(f"Rule {n} of {unique()}: {long_text('rule', 25)}" for n in range(20))
    messages: list[dict[str, Any]] = [{"role": "system", "content": ""}]
    costs, name = [], unique()
    for turn in range(6):
        mode = ("Plan only, write nothing.", "You may write files now.")[turn // 2 % 2]
        messages[0] = {"role": "system", "content": f"You are an agent.\n{mode}\n{rules}"}
        cues = f"[[find: {mode}]] [[truth]] [[long 40]]"  # long enough to be known again, see `raw_answer`
        messages.append({"role": "user", "content": f"Turn {turn}. {long_text('more', 40)} {cues}"})
        before = server.work()
        answer = server.chat(messages, session_id=name)
        costs.append(server.work() - before)
        fingerprint, found, _ = answer["message"]["content"].split("\n")
        assert fingerprint == expected_truth(server.prompt_of(answer))
        times, last = (int(number) for number in found.removeprefix("find: ").split("@"))
        # Where it has changed, the newest message tells it; else it stands where it was told.
        assert times >= 1 and (last == 2 * turn + 1) == (turn in (2, 4)), found
        messages.append(echoed(answer["message"], "keep"))
    assert costs[0] > 1000
    # The note: its frame, the old line and the new one.
    assert max(costs[1:]) <= min(costs[1:]) + 60, costs


def test_a_call_that_its_client_rewrites_is_computed_from_there_on(servers: Callable[..., Live]) -> None:
    """A client cuts the same words off each call: the call is computed again, and nothing in front of it."""
    server = servers("hybrid")
    calls = [json.dumps({"name": "run", "arguments": {"path": f"cd /demo && test {n}"}}) for n in range(TURNS)]
    raw = [
        f"<think>\nstep {n}, carefully\n</think>\n\n<tool_call>\n{call}\n</tool_call>" for n, call in enumerate(calls)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"{unique()} {script(*raw, 'Done.')} {long_text('first')}"}
    ]
    tokens, again = list[int](), []
    for turn in range(TURNS + 1):
        answer = server.chat(messages, tools=TOOLS)
        prompt = server.prompt_of(answer)
        shared = next((i for i, (x, y) in enumerate(zip(tokens, prompt, strict=False)) if x != y), 0)
        again.append(shared - answer["report"]["reused"])
        if turn == TURNS:
            break
        tokens = [*prompt, *TOKENIZER.encode(raw[turn], add_special_tokens=False).ids]
        message = echoed(answer["message"], "keep")
        (call,) = message["tool_calls"]
        call["function"]["arguments"] = call["function"]["arguments"].replace("cd /demo && ", "")
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    assert answer["message"]["content"] == "Done."
    assert all(8 <= tokens < 20 for tokens in again[1:]), "the call begins there"
