"""A row that was interrupted goes on as it would have: sampler, penalties, budget, grammar stand where they stood."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.events import Failed, Sampled
from start_llm.core.request import Sampling
from start_llm.core.work import Constraint, ThinkingLimit
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.schedule.guarded import GuardedStore
from start_llm.engine.schedule.scheduler import Scheduler
from tests.engine.fakes import Collected, FakeStore, scheduler_on, steps_until, submit
from tests.engine.schedule.test_scheduler import drain
from tests.engine.tiny import make_model, make_tokenizer

TOKENIZER = make_tokenizer()
END = int(TOKENIZER.convert_tokens_to_ids("<|im_end|>"))
OPENS, CLOSES = (int(TOKENIZER.convert_tokens_to_ids(tag)) for tag in ("<think>", "</think>"))
GRAMMAR = '%llguidance {}\nstart: "<" /[a-z ]{20,}/ ">"'
GREEDY = Sampling(temperature=0)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "seeded": {"sampling": Sampling(temperature=1.0, seed=7)},
    "penalties": {
        "sampling": replace(
            GREEDY,
            repetition_penalty=1.5,
            repetition_context_size=6,
            presence_penalty=1.0,
            frequency_penalty=0.7,
            logit_bias=((65, 1.0),),
        )
    },
    "budget": {"sampling": GREEDY, "thinking": ThinkingLimit(9, OPENS, CLOSES, inside=True)},
    "grammar": {"sampling": Sampling(temperature=1.0, seed=3), "constraint": Constraint(GRAMMAR)},
    "grammar after reasoning": {
        "sampling": Sampling(temperature=1.0, seed=3),
        "thinking": ThinkingLimit(4, OPENS, CLOSES, inside=True),
        "constraint": Constraint(GRAMMAR, after=(CLOSES,), wait=True),
    },
    "logprobs": {"sampling": GREEDY, "logprobs": 2},
}


class NothingStored(FakeStore):
    """Nothing is kept, so that a row that goes on computes its KV again."""

    def put(self, *_: Any, **__: Any) -> None:
        pass

    def restore(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("nothing is stored")


@cache
def parts() -> tuple[Any, Grammars]:
    return make_model(len(TOKENIZER)), Grammars(TOKENIZER, [END])


def make() -> Scheduler:
    model, grammars = parts()
    store = GuardedStore(NothingStored(), lambda: make_prompt_cache(model))  # type: ignore[arg-type]
    return scheduler_on(ModelRunner(model, eos=[END], max_rows=4), store, 4, grammars=grammars, step=64)


def run(way: str, interrupt_at: int, beside: bool) -> Collected:
    scheduler = make()
    work, sink = submit("a", range(40, 90), max_tokens=24)
    scheduler.add(replace(work, **WAYS[way]))
    if beside:
        other, _ = submit("b", range(60, 100), max_tokens=24)
        scheduler.add(replace(other, sampling=GREEDY))
    if interrupt_at:
        steps_until(scheduler, lambda: len(sink.tokens) >= interrupt_at)
        scheduler.recover(RuntimeError("an interruption"))
    drain(scheduler)
    return sink


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thorough
def test_an_interrupted_row_goes_on_with_the_same_tokens(way: str) -> None:
    whole = run(way, 0, beside=False)
    assert len(whole.tokens) > 11
    for at, beside in ((1, False), (5, True), (11, False)):
        again = run(way, at, beside)
        assert again.done.tokens == whole.done.tokens and again.done.reason == whole.done.reason
        assert len(again.tokens) == len(whole.tokens)
        logprobs = [e.logprob for e in again.events if isinstance(e, Sampled)]
        assert all((logprob is not None) == (way == "logprobs") for logprob in logprobs)


def test_what_a_rows_own_processor_raises_ends_that_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("greedy", 0, beside=False)
    scheduler = make()
    bad, bad_sink = submit("bad", range(30, 60), max_tokens=24)
    good, good_sink = submit("good", range(40, 90), max_tokens=24)
    scheduler.add(replace(good, sampling=GREEDY))
    scheduler.add(replace(bad, sampling=replace(GREEDY, presence_penalty=1.0)))
    steps_until(scheduler, lambda: len(bad_sink.tokens) >= 4)
    failed = scheduler.figures()["failed_steps"]

    def fail(self: Any, tokens: mx.array, logits: mx.array) -> mx.array:
        raise OverflowError("Python int too large to convert to C int")

    monkeypatch.setattr("start_llm.engine.decode.sampling.CountPenalty.__call__", fail)
    drain(scheduler)
    assert isinstance(bad_sink.final, Failed) and "OverflowError" in bad_sink.final.error.message
    assert good_sink.done.tokens == whole.done.tokens
    assert scheduler.figures()["failed_steps"] == failed  # nobody was interrupted


@pytest.mark.parametrize("size", [2**31, 2**63 - 1, 2**200])
def test_a_penalty_may_look_back_as_far_as_it_likes(size: int) -> None:
    scheduler = make()
    work, sink = submit("a", range(40, 90), max_tokens=8)
    scheduler.add(replace(work, sampling=replace(GREEDY, repetition_penalty=1.2, repetition_context_size=size)))
    drain(scheduler)
    assert sink.done.reason in {"length", "stop"}
