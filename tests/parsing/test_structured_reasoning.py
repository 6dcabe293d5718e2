"""What a grammar leaves free before an answer: reasoning in tags, and the channels of gpt-oss."""

from __future__ import annotations

from typing import Any

from start_llm.core.request import ToolChoice
from start_llm.core.work import Constraint
from tests.parsing.vocabulary import BYTES, GOOD, OBJECT, PING, STRICT, TOKENS, WEATHER, Vocabulary, constraint

THINK = {"reasoning": "think_tag"}


def test_reasoning_tags_that_are_tokens_become_token_ids() -> None:
    opening, closing = (TOKENS.special[tag] for tag in ("<think>", "</think>"))
    for fields, expected in (
        ({"in_reasoning": True}, ((closing,), True, ())),
        ({}, ((closing,), False, (opening,))),
        ({"may_reason": False}, ((), False, ())),
    ):
        each: Any = constraint(TOKENS, **THINK, response_format=OBJECT, **fields)
        assert (each.after, each.wait, each.opens) == expected
        assert TOKENS.accepts(each, "\n\n{}") and not TOKENS.begins(each, "hm")


def test_tags_of_several_tokens() -> None:
    words = Vocabulary("<|channel>", "<channel|>", "<|open|>", "<|close|>", "<|sep|>")
    for ident, opening, closing in (
        ("gemma4", "<|channel>", ["<channel|>"]),
        ("kimi_k3", "<|open|>", ["<|close|>", *"think", "<|sep|>"]),
    ):
        after = tuple(words.backend.encode("".join(closing)).ids)
        assert len(after) == len(closing)
        inside: Any = constraint(words, reasoning=ident, response_format=OBJECT, in_reasoning=True)
        may: Any = constraint(words, reasoning=ident, response_format=OBJECT)
        assert (inside.after, inside.wait, inside.opens) == (after, True, ())
        assert (may.after, may.wait, may.opens) == (after, False, (words.special[opening],))


def test_a_model_whose_tags_are_text_may_not_begin_with_one() -> None:
    """Allowed to write the tag or JSON, weak models begin the tag and never come to the JSON."""
    for may_reason in (True, False):
        wanted = constraint(BYTES, **THINK, response_format=OBJECT, may_reason=may_reason)
        assert BYTES.accepts(wanted, "{}")
        assert not BYTES.begins(wanted, "<")
        forced = constraint(BYTES, **THINK, tools=(PING,), tool_choice=ToolChoice("required"), may_reason=may_reason)
        assert not BYTES.begins(forced, "<thi")


def test_a_block_that_the_prompt_opened_with_a_tag_of_text_is_free_up_to_its_end() -> None:
    for ident, closing in (("think_tag", "</think>"), ("reasoning_tag", "</reasoning>")):
        inside: Any = constraint(BYTES, reasoning=ident, response_format=OBJECT, in_reasoning=True)
        assert inside.after == ()
        assert BYTES.accepts(inside, f"hm, {{}} no\n{closing}\n\n{{}}")
        assert not BYTES.accepts(inside, "{}")


def test_reasoning_before_free_text_with_strict_tools() -> None:
    wanted = constraint(BYTES, **THINK, tools=(STRICT,), in_reasoning=True)
    assert BYTES.accepts(wanted, "maybe <tool_call> x</think>" + GOOD["hermes_json"])
    assert not BYTES.begins(wanted, "hm</think><tool_call>x")


# --- gpt-oss ---

HARMONY = Vocabulary("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
THOUGHT = "<|channel|>analysis<|message|>Hm, {} <b>?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
WEATHER_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}'


def harmony(**fields: Any) -> Constraint | None:
    return constraint(HARMONY, "harmony", "harmony", **fields)


def test_harmony_json_is_the_final_message() -> None:
    wanted = harmony(response_format=OBJECT)
    assert wanted is not None and not wanted.after and not wanted.opens
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for before in ("", THOUGHT, THOUGHT + THOUGHT, THOUGHT + preamble):
        assert HARMONY.accepts(wanted, before + FINAL + '{"a": 1}')
        assert not HARMONY.begins(wanted, before + FINAL + "Sure")
        assert not HARMONY.begins(wanted, before + WEATHER_CALL)
    assert not HARMONY.accepts(wanted, THOUGHT)
    assert not HARMONY.begins(wanted, '{"a": 1}')
    assert not HARMONY.begins(wanted, THOUGHT * 9)


def test_harmony_calls() -> None:
    for choice in (ToolChoice("required"), ToolChoice("named", "get_weather")):
        forced = harmony(tools=(WEATHER, PING), tool_choice=choice)
        assert HARMONY.accepts(forced, WEATHER_CALL)
        assert HARMONY.accepts(forced, THOUGHT + WEATHER_CALL)
        assert not HARMONY.begins(forced, FINAL)
        assert not HARMONY.begins(forced, WEATHER_CALL.replace('"Ulm"', "1"))
        ping = WEATHER_CALL.replace("get_weather", "ping")[: -len('{"city": "Ulm"}')] + "{}"
        assert HARMONY.accepts(forced, ping) == (choice.name is None)
    strict = harmony(tools=(STRICT, PING))
    for good in (WEATHER_CALL, FINAL + "Any text, {.", THOUGHT + FINAL + "x"):
        assert HARMONY.accepts(strict, good)
    assert not HARMONY.begins(strict, WEATHER_CALL.replace("city", "town"))
    either = harmony(tools=(WEATHER,), response_format=OBJECT)
    assert HARMONY.accepts(either, WEATHER_CALL) and HARMONY.accepts(either, FINAL + "{}")
    assert not HARMONY.begins(either, FINAL + "x")
    assert harmony(tools=(WEATHER,)) is None
