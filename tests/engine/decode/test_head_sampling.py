"""At a temperature over 0: what is drawn with a head's drafts is distributed as without them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from scripts.bench.drafting import Published
from start_llm.core.request import Sampling
from start_llm.engine.decode.costs import PassCosts
from start_llm.engine.decode.draft import HEAD_MATCH, Acceptance
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.head import HeadedModel, SmallModel
from start_llm.engine.decode.row import RowState
from start_llm.engine.decode.sampling import make_sampler
from start_llm.engine.decode.verify import SingleRow

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


class Always(DraftGate):
    """Takes two of the head's tokens every time."""

    def __init__(self) -> None:
        super().__init__(Published({1: 1.0}), head=PassCosts())

    def choose(self, acceptance: Acceptance, options: Any, *, carried: int, context: int) -> tuple[int, int]:
        assert options[-1].match == HEAD_MATCH
        return len(options) - 1, min(2, options[-1].most)

    def hopeful(self, acceptance: Acceptance, outlook: int, *, context: int) -> bool:
        return True


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
        row = SingleRow(1, model, state, eos=frozenset(), gate=Always())
        said = [0]
        while len(said) <= A_RUN:
            said += [one.token for one in row.step()]
        np.add.at(followed, (said[:-1], said[1:]), 1)
        passes, tokens = passes + state.drafts.counts.forwards, tokens + A_RUN
    return followed, passes, tokens


def check(temperature: float, count: int) -> None:
    followed, passes, tokens = draw(Sampling(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0), count)
    chances = np.array(mx.softmax(tables()[0] / temperature, axis=-1))
    expected = followed.sum(axis=1, keepdims=True) * chances
    chi_square = float(((followed - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    print(f"temperature {temperature}: chi-square {chi_square:.1f} over {tokens} tokens, {tokens / passes:.2f} a pass")
    assert chi_square < WORST
    assert tokens / passes > 1.7


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_what_is_drawn_is_distributed_as_without_a_head(temperature: float) -> None:
    check(temperature, 2 * A_RUN)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_fifty_thousand_drawn_tokens_are_distributed_as_without_a_head(temperature: float) -> None:
    check(temperature, 50_000)


def test_without_a_seed_each_row_has_noise_of_its_own() -> None:
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    flat = mx.zeros((1, 1000)) - float(np.log(1000))
    one, other = make_sampler(sampling, own_noise=True), make_sampler(sampling, own_noise=True)
    assert [one(flat).item() for _ in range(4)] != [other(flat).item() for _ in range(4)]
    assert make_sampler(sampling) is make_sampler(sampling)
