from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from start_llm.core.errors import BadRequest
from start_llm.core.request import Sampling
from start_llm.engine.decode.sampling import (
    LOWEST_LOGPROB,
    LogprobTap,
    candidates,
    check_tokens,
    make_processors,
    make_sampler,
    top_logprobs,
)
from tests.engine.tiny import Job, collect, make_model, run
from tests.kinds import some

VOCAB = 300
PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
PROMPT = [5, 17, 42, 17, 8]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(VOCAB)


def job(sampling: Sampling, prompt: Sequence[int] = PROMPT, max_tokens: int = 24) -> Job:
    return Job(prompt, make_sampler(sampling), make_processors(sampling, prompt), max_tokens)


def logprobs_of(logits: Sequence[float]) -> mx.array:
    row = mx.array([list(logits)])
    return row - mx.logsumexp(row, axis=-1, keepdims=True)


# --- samplers ---


def test_equal_settings_without_a_seed_share_one_sampler_and_seeded_rows_do_not() -> None:
    greedy = make_sampler(replace(PLAIN, temperature=0.0))
    assert greedy(logprobs_of([0.1, 3.0, 2.0])).tolist() == [1]
    assert make_sampler(replace(PLAIN, temperature=0.0, top_k=5, seed=3)) is greedy
    assert make_sampler(replace(PLAIN, top_k=1)) is greedy
    assert make_sampler(PLAIN) is make_sampler(replace(PLAIN, logit_bias=((1, 2.0),)))
    assert make_sampler(PLAIN) is not make_sampler(replace(PLAIN, temperature=0.5))
    assert make_sampler(replace(PLAIN, seed=1)) is not make_sampler(replace(PLAIN, seed=1))


@pytest.mark.parametrize("top_k", [0, 1, 7, 40, VOCAB, VOCAB + 50])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5])
def test_candidates_are_those_of_mlx_lms_chain(top_k: int, top_p: float, min_p: float) -> None:
    mx.random.seed(top_k)
    logits = mx.random.normal((3, VOCAB)) * 2
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    wanted = logprobs
    if top_p < 1:
        wanted = apply_top_p(wanted, top_p)
    if min_p > 0:
        wanted = apply_min_p(wanted, min_p)
    if 0 < top_k < VOCAB:
        wanted = apply_top_k(wanted, top_k)
    values, ids = candidates(logprobs, top_p=top_p, top_k=top_k, min_p=min_p)
    ids = mx.broadcast_to(mx.arange(VOCAB), (3, VOCAB)) if ids is None else ids
    for row in range(3):
        kept = {i: v for i, v in zip(ids[row].tolist(), values[row].tolist(), strict=True) if v > -math.inf}
        expected = {i: v for i, v in enumerate(wanted[row].tolist()) if v > -math.inf}
        assert kept == pytest.approx(expected)


@pytest.mark.parametrize("seed", some([11, None]))
def test_draws_follow_the_distribution(seed: int | None) -> None:
    mx.random.seed(4)
    sampler = make_sampler(Sampling(temperature=0.5, top_p=1.0, top_k=3, min_p=0.0, seed=seed))
    logprobs = mx.repeat(logprobs_of([2.0, 1.0, 0.0, -1.0, -9.0]), 1, axis=0)
    drawn = Counter(int(sampler(logprobs).item()) for _ in range(3000))
    wanted = np.exp(np.array([4.0, 2.0, 0.0]))
    wanted /= wanted.sum()
    assert set(drawn) <= {0, 1, 2}
    for token in range(3):
        assert drawn[token] / 3000 == pytest.approx(wanted[token], abs=0.035)


def test_a_seed_draws_the_same_tokens_alone_and_in_a_batch(model: Any) -> None:
    samplings = [
        replace(PLAIN, seed=7),
        replace(PLAIN, seed=8, top_k=40, top_p=0.9, presence_penalty=0.7),
        replace(PLAIN, seed=7, temperature=0.8, repetition_penalty=1.3),
        replace(PLAIN, temperature=0.0, frequency_penalty=0.5),
        replace(PLAIN, seed=-3, min_p=0.02, logit_bias=((9, 3.0),)),
    ]
    prompts = [PROMPT, [1, 2, 3], [*PROMPT, *PROMPT], [4], [250, 33]]
    alone = [run(model, [job(s, p)])[0][0] for s, p in zip(samplings, prompts, strict=True)]
    again = [run(model, [job(s, p)])[0][0] for s, p in zip(samplings, prompts, strict=True)]
    jobs = [job(PLAIN, [3, 1]), *(job(s, p) for s, p in zip(samplings, prompts, strict=True)), job(PLAIN, [2])]
    batch = [tokens for tokens, _ in run(model, jobs)]
    assert again == alone
    assert batch[1:-1] == alone
    assert run(model, [job(replace(PLAIN, seed=9))])[0][0] != alone[0]


# --- processors ---


def apply(sampling: Sampling, prompt: Sequence[int], generated: Sequence[int], logits: Sequence[float]) -> list[float]:
    """The logits after `generated`, called the way `BatchGenerator` calls."""
    processors = make_processors(sampling, prompt)
    row = mx.array([list(logits)])
    for end in range(len(generated) + 1):
        tokens = mx.array([*prompt, *generated[:end]], dtype=mx.int32)
        row = mx.array([list(logits)])
        for processor in processors:
            row = processor(tokens, row)
    return row[0].tolist()  # type: ignore[no-any-return, index]


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    sampling = replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.25)
    assert apply(sampling, [0, 0, 1], [], [1.0] * 4) == [1.0] * 4
    assert apply(sampling, [0, 0, 1], [2, 3, 2, 2], [1.0] * 4) == pytest.approx([1.0, 1.0, -0.25, 0.25])
    many = [2] * 50  # further back than mlx-lm's default window of 20
    assert apply(sampling, [0], many, [0.0] * 4)[2] == pytest.approx(-0.5 - 0.25 * 50)
    assert apply(replace(PLAIN, presence_penalty=-1.0), [0], [1], [0.0, 0.0]) == [0.0, 1.0]
    assert make_processors(PLAIN, PROMPT) == []


def test_repetition_penalty_looks_back_n_tokens_prompt_included() -> None:
    sampling = replace(PLAIN, repetition_penalty=2.0, repetition_context_size=3)
    logits = [4.0, 4.0, -4.0, 4.0, 4.0]
    assert apply(sampling, [0, 1, 2], [], logits) == [2.0, 2.0, -8.0, 4.0, 4.0]
    assert apply(sampling, [0, 1, 2], [3, 3], logits) == [4.0, 4.0, -8.0, 2.0, 4.0]
    assert apply(replace(sampling, repetition_context_size=0), [0, 1], [2], logits) == logits
    (penalty,) = make_processors(replace(sampling, repetition_context_size=9), [0, 1, 2])
    came_with_its_kv = penalty(mx.array([2], dtype=mx.int32), mx.array([[4.0] * 4]))
    assert came_with_its_kv[0].tolist() == [2.0, 2.0, 2.0, 4.0]


def test_logit_bias_bans_and_forces(model: Any) -> None:
    free = run(model, [job(replace(PLAIN, temperature=0.0))])[0][0]
    banned = replace(PLAIN, temperature=0.0, logit_bias=((free[0], -100.0),))
    forced = replace(PLAIN, temperature=0.0, logit_bias=((77, 100.0),))
    assert free[0] not in run(model, [job(banned)])[0][0]
    assert set(run(model, [job(forced)])[0][0]) == {77}


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    check_tokens("logit_bias", (), VOCAB)
    check_tokens("logit_bias", (0, VOCAB - 1), VOCAB)
    for token in (-1, VOCAB, 10**9):
        with pytest.raises(BadRequest, match=f"^prompt names token {token}; .* 0 to 299") as caught:
            check_tokens("prompt", (1, token, 2), VOCAB, code="invalid_value")
        assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")


# --- logprobs ---


def test_top_logprobs_are_sorted_and_cut() -> None:
    row = logprobs_of([0.0, 2.0, 1.0, -math.inf])[0]
    found = top_logprobs(row, 0, 2)
    assert [i for i, _ in found.top] == [1, 2]
    assert found.logprob == pytest.approx(row[0].item())
    assert found.top[0][1] == pytest.approx(row[1].item())
    assert top_logprobs(row, 1, 0).top == ()
    assert len(top_logprobs(row, 1, 20).top) == 3  # the impossible one is left out
    assert top_logprobs(row, 3, 1).logprob == LOWEST_LOGPROB


def test_the_tap_gives_the_models_own_distribution_for_every_reported_token(model: Any) -> None:
    sampling = replace(PLAIN, seed=2, repetition_penalty=1.5, logit_bias=((30, 4.0),), presence_penalty=1.0)
    other = replace(PLAIN, seed=3)
    taps = [LogprobTap(), LogprobTap()]
    generator = BatchGenerator(model)
    uids = generator.insert(
        [PROMPT, [1, 2]],
        max_tokens=[12, 9],
        samplers=[make_sampler(sampling), make_sampler(other)],
        logits_processors=[[taps[0], *make_processors(sampling, PROMPT)], [taps[1]]],
    )
    seen: list[list[Any]] = [[], []]

    def take(response: Any) -> None:
        row = uids.index(response.uid)
        seen[row].append(top_logprobs(taps[row].take(), response.token, 3))

    outputs = collect(generator, uids, take)
    for row, prompt in enumerate((PROMPT, [1, 2])):
        tokens = outputs[row][0]
        logits = model(mx.array([[*prompt, *tokens]]))[0]
        own = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        assert len(seen[row]) == len(tokens)
        for step, found in enumerate(seen[row]):
            expected = top_logprobs(own[len(prompt) - 1 + step], tokens[step], 3)
            assert found.token == tokens[step]
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
            assert [v for _, v in found.top] == pytest.approx([v for _, v in expected.top], abs=1e-3)
