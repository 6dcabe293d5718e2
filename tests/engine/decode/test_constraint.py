from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, models

from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.core.request import ChatRequest, ResponseFormat, Sampling
from start_llm.core.work import Constraint
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.sampling import make_processors, make_sampler
from start_llm.parsing.structured import ModelText, make_constraint, model_text, special_tokens
from tests.engine.tiny import PLAIN, SPECIAL, Job, make_model, make_tokenizer, run
from tests.together import together

TOKENIZER = make_tokenizer()
SPARE = 40  # rows of the model's head that the tokenizer does not know
VOCAB = len(TOKENIZER) + SPARE
EOS = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
END = TOKENIZER.convert_tokens_to_ids("<|im_start|>")  # a second end token
HOT = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
PROMPT = TOKENIZER.encode("Answer.")
NO_REASONING = ModelText("hermes_json", special_tokens(TOKENIZER))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(VOCAB)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, [EOS, END])


def lark(text: str, **fields: Any) -> Constraint:
    return Constraint(LLMatcher.grammar_from_lark(text), **fields)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)  # type: ignore[no-any-return]


def job(grammars: Grammars, constraint: Constraint | None, sampling: Sampling, max_tokens: int = 400) -> Job:
    processors = make_processors(sampling, PROMPT)
    if constraint is not None:
        processors.append(grammars.processor(constraint))
    return Job(PROMPT, make_sampler(sampling), processors, max_tokens)


def text_of(tokens: Sequence[int]) -> str:
    """The answer without the token that ended it."""
    return TOKENIZER.decode(tokens[:-1], skip_special_tokens=False)  # type: ignore[no-any-return]


def asked(**fields: Any) -> ChatRequest:
    return ChatRequest(id="x", dialect="chat", model="m", **fields)


# --- rows beside each other ---


def test_grammars_of_different_rows_do_not_disturb_each_other(model: Any, grammars: Grammars) -> None:
    words = [lark('start: "alpha" | "ant"'), lark('start: "beta"'), None, lark('start: "gamma" /[0-9]{3}/')]
    rows = [job(grammars, word, replace(HOT, seed=i), 12) for i, word in enumerate(words)]
    outputs = run(model, rows, [EOS, END])
    assert text_of(outputs[0][0]) in ("alpha", "ant")
    assert text_of(outputs[1][0]) == "beta"
    assert text_of(outputs[3][0]).startswith("gamma")
    free = run(model, [job(grammars, None, replace(HOT, seed=2), 12)], [EOS, END])[0]
    assert outputs[2] == free


def test_bias_penalties_and_seed_work_with_a_grammar_and_cannot_undo_it(model: Any, grammars: Grammars) -> None:
    digit = lark("start: /[0-9]{6}/")
    nine, letter = ids("9")[0], ids("q")[0]
    favoured = replace(HOT, seed=1, top_k=40, logit_bias=((nine, 50.0), (letter, 100.0), (EOS, 100.0)))
    assert text_of(run(model, [job(grammars, digit, favoured)], [EOS])[0][0]) == "999999"
    varied = replace(favoured, frequency_penalty=2.0, presence_penalty=60.0, repetition_penalty=1.5)
    text = text_of(run(model, [job(grammars, digit, varied)], [EOS])[0][0])
    assert text.isdigit()
    assert len(text) == 6
    assert text[0] == "9"
    assert text[1] != "9"


def test_end_tokens_are_allowed_where_a_grammar_may_end_and_nothing_else_behind_it(grammars: Grammars) -> None:
    a = ids("a")[0]
    complete, opened = grammars.processor(lark('start: "a"')), grammars.processor(lark("start: /a+/"))
    assert not {EOS, END} & allowed(step(complete, [0])) and not {EOS, END} & allowed(step(opened, [0]))
    assert allowed(step(complete, [0, a])) == {EOS, END}
    assert {a, EOS, END} <= allowed(step(opened, [0, a]))


def step(processor: Any, tokens: Sequence[int]) -> mx.array:
    return processor(mx.array(list(tokens), dtype=mx.int32), mx.zeros((1, VOCAB)))  # type: ignore[no-any-return]


def allowed(logits: mx.array) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.array(logits)[0])).tolist())


def test_tokens_beyond_the_tokenizer_are_never_allowed(grammars: Grammars) -> None:
    assert max(allowed(step(grammars.processor(lark("start: /(?s:.*)/")), [0]))) < len(TOKENIZER)


def test_half_precision_logits_stay_half_precision(grammars: Grammars) -> None:
    processor = grammars.processor(lark('start: "a"'))
    logits = mx.zeros((1, VOCAB), dtype=mx.bfloat16)
    assert processor(mx.array([0]), logits).dtype == mx.bfloat16


# --- reasoning ---

THINK, UNTHINK = (TOKENIZER.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))


def test_reasoning_is_free_until_its_end_and_an_answer_must_follow(grammars: Grammars) -> None:
    processor = grammars.processor(lark('start: "yes"', after=(UNTHINK,), wait=True))
    tokens = [0]
    free = set(range(VOCAB)) - {EOS, END}
    assert allowed(step(processor, tokens)) == free
    for token in ids("hm, no"):
        tokens.append(token)
        assert allowed(step(processor, tokens)) == free
    tokens.append(UNTHINK)
    assert allowed(step(processor, tokens)) == {ids("y")[0]}


def test_the_model_may_open_reasoning_itself_but_only_first(grammars: Grammars) -> None:
    constraint = lark("start: /[ab]+/", after=(UNTHINK,), opens=(THINK,))
    a, b = ids("a")[0], ids("b")[0]
    straight = grammars.processor(constraint)
    assert allowed(step(straight, [0])) == {a, b, THINK}
    assert allowed(step(straight, [0, a])) == {a, b, EOS, END}
    thinking = grammars.processor(constraint)
    step(thinking, [0])
    assert ids("z")[0] in allowed(step(thinking, [0, THINK]))
    assert allowed(step(thinking, [0, THINK, UNTHINK])) == {a, b}


def test_the_start_of_an_answer_may_be_several_tokens(grammars: Grammars) -> None:
    first, second = ids("fi")
    processor = grammars.processor(lark('start: "a"', after=(first, second), wait=True))
    step(processor, [0])
    for token in (second, second, first, first):
        assert len(allowed(step(processor, [0, token]))) > 1
    assert allowed(step(processor, [0, second])) == {ids("a")[0]}


def test_constrained_answer_after_reasoning_end_to_end(model: Any, grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    wanted = asked(response_format=ResponseFormat("json_schema", schema))
    text = model_text("hermes_json", REASONING_STYLES["think_tag"], TOKENIZER)
    constraint = make_constraint(wanted, text, in_reasoning=True)
    sampling = replace(HOT, seed=3, logit_bias=((UNTHINK, 6.0),))
    tokens, reason = run(model, [job(grammars, constraint, sampling)], [EOS, END])[0]
    assert reason == "stop"
    jsonschema.validate(json.loads(text_of(tokens[tokens.index(UNTHINK) + 1 :])), schema)


# --- errors and threads ---


def test_a_row_whose_matcher_gives_up_ends_at_once_and_says_so(grammars: Grammars) -> None:
    processor = grammars.processor(lark('start: "ab"'))
    step(processor, [0])
    out = step(processor, [0, ids("z")[0]])  # cannot happen under the mask: stands for a limit that is hit
    assert allowed(out) == {EOS, END}
    assert isinstance(processor.error, NotSupported)  # 501: SDKs would send it again after a 500
    assert "grammar" in processor.error.message
    assert "\n" not in processor.error.message
    assert allowed(step(processor, [0, ids("z")[0], EOS])) == {EOS, END}


def test_a_grammar_that_cannot_be_compiled_is_refused(grammars: Grammars) -> None:
    for text in ("start: nowhere", "start: /[/", "start: <[99999]>"):
        with pytest.raises(BadRequest):
            grammars.prepare(lark(text))


def test_the_vocabulary_is_made_once_and_is_what_llguidance_reads() -> None:
    grammars = Grammars(TOKENIZER, [EOS])
    made, read = grammars.make_vocabulary(), LLTokenizer(TOKENIZER.backend_tokenizer.to_str(), eos_token=[EOS])
    assert grammars.make_vocabulary() is made
    for token in range(read.vocab_size):
        assert made.decode_bytes([token]) == read.decode_bytes([token])


def test_a_tokenizer_that_cuts_texts_is_not_used_as_it_is_and_not_changed() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert len(Grammars(tokenizer, [EOS]).make_vocabulary().tokenize_str("ab a a a a")) > 2
    assert tokenizer.backend_tokenizer.truncation is not None


def test_a_tokenizer_that_is_slow_or_cannot_be_read_is_refused_each_time_with_the_reason() -> None:
    broken = make_tokenizer()
    broken._tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a"))
    for tokenizer in (object(), broken):
        grammars = Grammars(tokenizer, [1])
        for _ in range(2):
            with pytest.raises(NotSupported, match="tokenizer"):
                grammars.make_vocabulary()


def test_a_vocabulary_that_llguidance_gives_up_on_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As pyo3's, which nobody can import."""

    monkeypatch.setattr(
        "start_llm.engine.decode.constraint.LLTokenizer", Mock(side_effect=PanicException("assertion failed"))
    )
    with pytest.raises(NotSupported, match="assertion failed"):
        Grammars(make_tokenizer(), [1]).make_vocabulary()


def test_prepare_in_many_threads_and_use_in_one(grammars: Grammars) -> None:
    constraints = [lark(f'start: "{chr(97 + i % 5)}" /[0-9]+/') for i in range(40)]
    together(partial(grammars.prepare, constraint) for constraint in constraints)
    for i, constraint in enumerate(constraints):
        assert allowed(step(grammars.processor(constraint), [0])) == {ids(chr(97 + i % 5))[0]}


def test_what_was_prepared_is_not_compiled_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row begins on the model thread, which everybody waits for."""
    prepared = grammars.prepare(lark('start: "ab"'))
    for i in range(100):
        grammars.prepare(lark(f'start: "{i}"'))
    monkeypatch.setattr(grammars, "_matcher", None)
    one, two = grammars.processor(prepared), grammars.processor(prepared, generated=ids("a"))
    assert allowed(step(one, [0])) == {ids("a")[0]}
    assert allowed(step(two, [0])) == {ids("b")[0]}


def test_special_tokens_are_those_that_llguidance_does_not_match_as_text() -> None:
    """Fails when upstream changes what it takes for special; `special_tokens` must follow."""
    known = special_tokens(TOKENIZER)
    assert set(known) == {*SPECIAL, *(t for t in PLAIN if t.startswith("<"))}
    tokenizer = LLTokenizer(TOKENIZER.backend_tokenizer.to_str(), eos_token=[EOS])
    for token, added in TOKENIZER.added_tokens_decoder.items():
        assert tokenizer.is_special_token(token) == (added.content in known), added.content
