"""Grammars and drafts: the same words, and forced tokens in fewer passes."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher

from start_llm.core.request import Sampling
from start_llm.core.work import Constraint, ThinkingLimit
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.sampling import ThinkingBudget
from start_llm.engine.decode.verify import SingleRow
from tests.engine.decode.test_verify import PROMPT, Eager, Prophet, reference, said, single
from tests.engine.tiny import make_model, make_tokenizer

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
THINK, CLOSE = TOKENIZER.convert_tokens_to_ids(["<think>", "</think>"])
COUNT = 60
CALL = Constraint(
    LLMatcher.grammar_from_lark(
        'start: "{\\"name\\": \\"read\\", \\"arguments\\": {\\"path\\": \\"" /[a-z]{1,8}/ "\\"}}"'
    )
)
FREE_END = Constraint(LLMatcher.grammar_from_lark("start: /[a-z ]+/"))
AFTER_THOUGHT = Constraint(CALL.grammar, after=(CLOSE,), wait=True)
OPENS = Constraint(CALL.grammar, after=(CLOSE,), opens=(THINK,))
SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1.0, seed=4, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.1),
]


@cache
def grammars() -> Grammars:
    return Grammars(TOKENIZER, [EOS])


@cache
def model() -> Any:
    return make_model(len(TOKENIZER))


def held(constraint: Constraint, thinking: ThinkingLimit | None) -> list[Any]:
    """To its grammar, and to its budget."""
    budget: list[Any] = [] if thinking is None else [ThinkingBudget(thinking)]
    return [*budget, grammars().processor(constraint)]


def one_by_one(constraint: Constraint, sampling: Sampling, thinking: ThinkingLimit | None) -> list[int]:
    processors = held(constraint, thinking)
    return reference(model(), sampling, COUNT, frozenset([EOS]), processors=processors).tokens


def alone(constraint: Constraint, sampling: Sampling, thinking: ThinkingLimit | None) -> SingleRow:
    processors = held(constraint, thinking)
    return single(model(), sampling, COUNT, eos=frozenset([EOS]), gate=Eager(), processors=processors)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("constraint", "thinking"),
    [
        (CALL, None),
        (FREE_END, None),
        (AFTER_THOUGHT, ThinkingLimit(9, THINK, CLOSE, inside=True)),
        (OPENS, ThinkingLimit(5, THINK, CLOSE)),
    ],
    ids=["call", "may end anywhere", "after a thought", "may open a thought"],
)
@pytest.mark.thorough
def test_the_same_words_with_drafts_that_lie(
    constraint: Constraint, thinking: ThinkingLimit | None, sampling: Sampling
) -> None:
    truth = one_by_one(constraint, sampling, thinking)
    for seed in range(3):
        chance = random.Random(seed)

        def lies(most: int, chance: random.Random = chance) -> tuple[int, int | None]:
            return chance.choice([0, 2, 9, 20]), chance.choice([None, 0, 1, 3])

        row = alone(constraint, sampling, thinking)
        row.offer(Prophet([*PROMPT, *truth], len(PROMPT), lies))
        assert said(row).tokens == truth
        assert row.state.drafts.counts.accepted > 0


def test_forced_tokens_are_said_in_one_pass() -> None:
    truth = one_by_one(CALL, SAMPLINGS[0], None)
    assert TOKENIZER.decode(truth).startswith('{"name": "read", "arguments": {"path": "')
    row = alone(CALL, SAMPLINGS[0], None)
    assert said(row).tokens == truth
    assert row.state.drafts.counts.forwards < len(truth) / 2


def test_a_guide_says_what_may_follow_and_leaves_the_row_as_it_was() -> None:
    processor = grammars().processor(CALL)
    text = TOKENIZER.encode('{"name": "read", "arguments": {"path": "ab"}}')
    processor._started = True
    before = processor.save()
    assert processor.allowed(text[0], text[1:]) == len(text) - 1
    assert processor.allowed(text[0], [*text[1:3], EOS, *text[3:]]) == 2
    forced = processor.forced(text[0])
    assert len(forced) > 3 and TOKENIZER.decode(forced) in '"name": "read", "arguments": {"path": "'
    for token in text[:5]:
        processor._advance(token)
    processor.restore(before)
    assert processor.allowed(text[0], text[1:]) == len(text) - 1
