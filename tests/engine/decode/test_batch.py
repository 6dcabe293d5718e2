"""The runners on tiny random models: what mlx-lm's own loop generates, alone and beside other rows.

These also fail when mlx-lm changes what we build on: a reported token lies in the KV already, a finished row hands over
its KV and tokens, and `remove` of a running row returns both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.request import Sampling
from start_llm.engine.decode.batch import BatchRunner
from start_llm.engine.decode.row import DecodeRow
from start_llm.engine.decode.sampling import LogprobTap, make_processors, make_sampler
from tests.engine.fakes import new_row
from tests.kinds import some
from tests.kvcache.tiny import greedy, model, random_tokens

NEVER = 10**6  # no such token
NAMES = ["llama", "qwen3_next", "gemma3_text", "nemotron_h"]


def argmax(logprobs: Any) -> Any:
    return mx.argmax(logprobs, axis=-1)


def begin(runner: Any, name: str, prompt: Sequence[int], most: int, chunk: int = 20) -> int:
    cache = make_prompt_cache(model(name))
    for at in range(0, len(prompt) - 1, chunk):
        runner.prefill(cache, prompt[at : min(at + chunk, len(prompt) - 1)])
    return int(runner.insert(new_row(prompt, cache, most, argmax)))


def run(runner: Any, uids: Sequence[int], most: int = 200) -> dict[int, list[DecodeRow]]:
    rows: dict[int, list[DecodeRow]] = {uid: [] for uid in uids}
    for _ in range(most):
        for row in runner.decode():
            rows[row.uid].append(row)
        if all(found and found[-1].finish for found in rows.values()):
            return rows
    raise AssertionError("it does not end")


@pytest.mark.parametrize("name", some(NAMES, 2))
def test_rows_of_different_lengths_generate_what_they_do_alone(name: str) -> None:
    prompts = [random_tokens(n, seed=n) for n in (50, 7, 93, 31)]
    runner = BatchRunner(model(name), eos=[NEVER], max_rows=4)
    uids = [begin(runner, name, prompt, 12) for prompt in prompts]
    rows = run(runner, uids)
    for uid, prompt in zip(uids, prompts, strict=True):
        alone = greedy(name, prompt, make_prompt_cache(model(name)), 12)
        assert [row.token for row in rows[uid]] == alone
        last = rows[uid][-1]
        assert last.finish == "length"
        assert list(last.tokens or ()) == [*prompt, *alone]


@pytest.mark.parametrize("leaves", ["ends", "is removed"])
def test_who_wants_to_know_is_told_where_a_rows_kv_is(leaves: str) -> None:
    name, prompt = "llama", random_tokens(40)
    runner = BatchRunner(model(name), eos=[NEVER], max_rows=2)
    cache = make_prompt_cache(model(name))
    runner.prefill(cache, prompt[:-1])
    readers: list[Any] = []
    uid = runner.insert(replace(new_row(prompt, cache, 5, argmax), on_move=readers.append))
    while not any(row.finish for row in runner.decode()):
        assert len(readers) == 1 and readers[0](0)[0].size() >= len(prompt)
        if leaves == "is removed":
            runner.remove(uid)
            break
    assert readers[1:] == [None] and cache[0].offset >= len(prompt)


def test_a_row_that_ends_with_its_next_token_is_not_suspended() -> None:
    name, prompt = "llama", random_tokens(40)
    third = greedy(name, prompt, make_prompt_cache(model(name)), 3)[2]
    runner = BatchRunner(model(name), eos=[third], max_rows=2)
    uid = begin(runner, name, prompt, 100)
    assert runner.suspend(uid) is None  # it has not begun
    rows: list[DecodeRow] = []
    while len(rows) < 2:
        rows += runner.decode()
    assert runner.suspend(uid) is None
    (last,) = runner.decode()
    assert (last.token, last.finish) == (third, "stop")
    assert last.cache is not None and last.cache[0].offset == len(last.tokens or ()) == 43, "the end is in its KV"
    assert runner.suspend(uid) is None  # it is gone


def test_samplers_and_processors_do_not_notice_a_suspension() -> None:
    name, prompt = "llama", random_tokens(40)
    sampling = replace(
        Sampling(), temperature=0.9, seed=11, repetition_penalty=1.3, repetition_context_size=20, presence_penalty=0.5
    )

    def answer(*suspend_at: int) -> tuple[list[int], list[float]]:
        runner = BatchRunner(model(name), eos=[NEVER], max_rows=2)
        sampler, tap = make_sampler(sampling), LogprobTap()
        processors = [tap, *make_processors(sampling, prompt)]
        cache = make_prompt_cache(model(name))
        runner.prefill(cache, prompt[:-1])
        uid = runner.insert(new_row(prompt, cache, 20, sampler, processors))
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < 20:
            for one in runner.decode():
                tokens.append(one.token)
                logprobs.append(float(tap.take()[one.token].item()))
            if len(tokens) == 19:
                assert runner.suspend(uid) is None, "its next token is its last"
            if len(tokens) in suspend_at:
                row = runner.suspend(uid)
                assert row is not None and row.left == 20 - len(tokens) and runner.remove(uid) is None
                uid = runner.insert(row)
                assert runner.suspend(uid) is None, "it has not begun"
        return tokens, logprobs

    tokens, logprobs = answer()
    again, again_logprobs = answer(1, 2, 7, 15)
    assert again == tokens
    assert again_logprobs == pytest.approx(logprobs, abs=1e-3)
