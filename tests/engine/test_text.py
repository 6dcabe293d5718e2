"""The runners on tiny random models: what mlx-lm's own loop generates, alone and beside other rows.

These also fail when mlx-lm changes what we build on: a reported token lies in the KV already, a finished row hands over
its KV and tokens, and `remove` of a running row returns both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from start_llm.engine.runner import Row, Runner
from start_llm.engine.text import BatchRunner, SequentialRunner
from tests.kvcache.tiny import greedy, model, random_tokens

NEVER = 10**6  # no such token
NAMES = ["llama", "qwen3_next", "gemma3_text", "nemotron_h"]


def argmax(logprobs: Any) -> Any:
    return mx.argmax(logprobs, axis=-1)


def begin(runner: Runner, name: str, prompt: Sequence[int], most: int, chunk: int = 20) -> int:
    cache = make_prompt_cache(model(name))
    for at in range(0, len(prompt) - 1, chunk):
        runner.prefill(cache, prompt[at : min(at + chunk, len(prompt) - 1)])
    return runner.insert(prompt, cache, max_tokens=most, sampler=argmax, processors=[])


def run(runner: Runner, uids: Sequence[int], most: int = 200) -> dict[int, list[Row]]:
    rows: dict[int, list[Row]] = {uid: [] for uid in uids}
    for _ in range(most):
        for row in runner.decode():
            rows[row.uid].append(row)
        if all(found and found[-1].finish for found in rows.values()):
            return rows
    raise AssertionError("it does not end")


@pytest.mark.parametrize("name", NAMES)
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


def test_a_finished_rows_kv_goes_on_where_it_ended() -> None:
    name, prompt = "llama", random_tokens(40)
    runner = BatchRunner(model(name), eos=[NEVER], max_rows=2)
    (rows,) = run(runner, [begin(runner, name, prompt, 6)]).values()
    more = [*(rows[-1].tokens or ()), *random_tokens(9, seed=3)]
    assert rows[-1].cache is not None
    cache = rows[-1].cache
    runner.prefill(cache, more[len(rows[-1].tokens or ()) : -1])
    uid = runner.insert(more, cache, max_tokens=8, sampler=argmax, processors=[])
    found = [row.token for row in run(runner, [uid])[uid]]
    assert found == greedy(name, more, make_prompt_cache(model(name)), 8)


def test_a_removed_row_hands_over_what_is_in_its_kv() -> None:
    name, prompt = "llama", random_tokens(40)
    runner = BatchRunner(model(name), eos=[NEVER], max_rows=2)
    uid = begin(runner, name, prompt, 100)
    seen: list[int] = []
    while len(seen) < 5:
        seen += [row.token for row in runner.decode()]
    removed = runner.remove(uid)
    assert removed is not None
    cache, tokens = removed
    assert list(tokens) == [*prompt, *seen]
    assert cache[0].offset == len(tokens)
    assert runner.remove(uid) is None


def test_an_end_token_ends_a_row_and_lies_in_its_kv() -> None:
    name, prompt = "llama", random_tokens(40)
    third = greedy(name, prompt, make_prompt_cache(model(name)), 3)[2]
    runner = BatchRunner(model(name), eos=[third], max_rows=2)
    (rows,) = run(runner, [begin(runner, name, prompt, 100)]).values()
    assert rows[-1].finish == "stop"
    assert rows[-1].token == third
    assert rows[-1].cache is not None
    assert rows[-1].cache[0].offset == len(rows[-1].tokens or ())


@pytest.mark.parametrize("start", [0, 30, 1000])
def test_quantised_kv_generates_what_mlx_lm_does(start: int) -> None:
    name, prompt = "llama", random_tokens(60)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    runner = SequentialRunner(model(name), eos=[NEVER], **options)
    uid = begin(runner, name, prompt, 10, chunk=20)
    rows = run(runner, [uid])[uid]
    steps = generate_step(mx.array(prompt), model(name), max_tokens=10, prefill_step_size=20, sampler=argmax, **options)
    assert [row.token for row in rows] == [int(token) for token, _ in steps]
    assert rows[-1].cache is not None
    assert rows[-1].cache[0].offset == len(rows[-1].tokens or ())


def test_quantised_kv_takes_one_row_at_a_time() -> None:
    runner = SequentialRunner(model("llama"), eos=[NEVER], kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    begin(runner, "llama", random_tokens(20), 10)
    with pytest.raises(RuntimeError, match="one request at a time"):
        begin(runner, "llama", random_tokens(20), 10)
