"""At a temperature over 0: what is drawn with a head's drafts is distributed as without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from scripts.bench.drafting import Published
from start_llm.core.request import Sampling
from start_llm.engine.decode.draft import HEAD_MATCH, SuffixIndex
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.head import HeadedModel, SmallModel
from start_llm.engine.decode.row import RowState
from start_llm.engine.decode.sampling import make_sampler
from start_llm.engine.decode.verify import SingleRow
from tests.engine.lookups import learnt, lookups

WORDS = 6
A_RUN = 2000  # tokens; a new row, and so new noise, after each
# Of 30 degrees of freedom (6 states, 6 words); a right sampler is above this once in a million runs.
WORST = 86.0


class Table:
    """A model whose next token depends on the last one only. `logits`: [words, words]."""

    def __init__(self, logits: mx.array) -> None:
        self._logits = logits

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        if cache is not None:
            rows = mx.zeros((1, 1, tokens.shape[1], 1))
            cache[0].update_and_fetch(rows, rows)
        return self._logits[tokens]


class Takes(DraftGate):
    """So many tokens of every draft. `head`: the drafts are a head's, else copies."""

    def __init__(self, most: int, head: float | None) -> None:
        super().__init__(Published({1: 1.0}), head=head)
        self._most = most

    def choose(self, options: Any, *, carried: int, context: int) -> tuple[int, int]:
        assert (options[0].match == HEAD_MATCH) == (self.head is not None)
        return 0, min(self._most, options[0].most)

    def hopeful(self, outlook: int, *, context: int) -> bool:
        return True


two_of_a_head, seven_copies = partial(Takes, 2, 0.0), partial(Takes, 7, None)


def tables() -> tuple[mx.array, mx.array]:
    """The model's logits, and those of a head that is about right."""
    mx.random.seed(3)
    logits = mx.random.normal((WORDS, WORDS)) * 1.5
    return logits, logits + mx.random.normal((WORDS, WORDS)) * 0.7


def draw(sampling: Sampling, count: int) -> tuple[np.ndarray[Any, Any], int, int]:
    """How often each word followed each word; passes, and tokens."""
    large, small = tables()
    model = HeadedModel(Table(large), SmallModel(Table(small), WORDS), None)
    followed = np.zeros((WORDS, WORDS))
    passes = tokens = 0
    for _ in range(count // A_RUN):
        state = RowState(model.make_cache(), [], 0, A_RUN, make_sampler(sampling, own_noise=True))
        row = SingleRow(1, model, state, eos=frozenset(), gate=two_of_a_head())
        said = [0]
        while len(said) <= A_RUN:
            said += [one.token for one in row.step()]
        np.add.at(followed, (said[:-1], said[1:]), 1)
        passes, tokens = passes + state.drafts.counts.forwards, tokens + A_RUN
    return followed, passes, tokens


GREEDY, MAKERS = Sampling(temperature=0.0), Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0)


def tokens_a_pass(model: Any, gate: DraftGate, prompts: list[list[int]], said: int, sampling: Sampling) -> float:
    """Of so many tokens behind each of these prompts."""
    forwards = 0
    for prompt in prompts:
        cache = model.make_cache()
        if prompt[:-1]:
            model(mx.array([prompt[:-1]]), cache=cache)
        sampler = make_sampler(sampling, own_noise=gate.head is not None)
        state = RowState(cache, prompt[:-1], prompt[-1], said, sampler)
        row = SingleRow(1, model, state, eos=frozenset(), gate=gate)
        if gate.head is None:
            row.offer(SuffixIndex(prompt[:-1]))
        while not any(one.finish for one in row.step()):
            pass
        forwards += state.drafts.counts.forwards
    return said * len(prompts) / forwards


def kept(model: Any, gate: DraftGate, prompts: list[list[int]], said: int) -> float:
    """Tokens a pass with what makers recommend, as a share of what they are without chance."""
    mx.random.seed(9)
    greedy, makers = (tokens_a_pass(model, gate, prompts, said, one) for one in (GREEDY, MAKERS))
    print(f"{greedy:.3f} tokens a pass without chance, {makers:.3f} at 0.6 / 0.95 / 20: {makers / greedy:.3f}")
    assert greedy > 1.3, "nothing to keep"
    return makers / greedy


@pytest.mark.thorough
def test_a_head_keeps_most_of_its_gain_where_many_tokens_are_likely() -> None:
    """Freer than most text: the likeliest token has a third of the chances. The head is wrong by half a nat."""
    words = 200
    mx.random.seed(4)
    logits = mx.random.normal((words, words)) * 2.4
    model = HeadedModel(Table(logits), SmallModel(Table(logits + mx.random.normal(logits.shape) * 0.5), words), None)
    assert kept(model, two_of_a_head(), [[first] for first in range(0, words, 2)], 10) > 0.85


@pytest.mark.thorough
@pytest.mark.parametrize("gate", [two_of_a_head, seven_copies], ids=["of a head", "copies"])
def test_most_of_the_gain_is_kept_at_the_makers_temperature(gate: Callable[[], DraftGate]) -> None:
    """A draft is as likely to be right as the model is to say it, so the model must be sure: this one is, mostly."""
    prompts = lookups(mx.random.key(78), 30, 24).tolist()
    assert kept(learnt(), gate(), prompts, 16) > 0.85


@pytest.mark.parametrize(
    "count", [pytest.param(2 * A_RUN, marks=pytest.mark.thorough), pytest.param(50_000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_what_is_drawn_is_distributed_as_without_a_head(temperature: float, count: int) -> None:
    followed, passes, tokens = draw(Sampling(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0), count)
    chances = np.array(mx.softmax(tables()[0] / temperature, axis=-1))
    expected = followed.sum(axis=1, keepdims=True) * chances
    chi_square = float(((followed - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    print(f"temperature {temperature}: chi-square {chi_square:.1f} over {tokens} tokens, {tokens / passes:.2f} a pass")
    assert chi_square < WORST
    assert tokens / passes > 1.7


def test_without_a_seed_each_row_has_noise_of_its_own() -> None:
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    flat = mx.zeros((1, 1000)) - float(np.log(1000))
    one, other = make_sampler(sampling, own_noise=True), make_sampler(sampling, own_noise=True)
    assert [one(flat).item() for _ in range(4)] != [other(flat).item() for _ in range(4)]
    assert make_sampler(sampling) is make_sampler(sampling)
