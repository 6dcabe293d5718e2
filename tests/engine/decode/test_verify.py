"""A row that verifies drafts says what `BatchGenerator` says, and leaves the same KV."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from scripts.bench.drafting import Published
from start_llm.core.request import Sampling
from start_llm.engine.decode.batch import BatchRunner
from start_llm.engine.decode.draft import LEAST_MATCH, Proposal
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.head import HiddenTail
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.quantised import Quantisation
from start_llm.engine.decode.rewind import Rewinder
from start_llm.engine.decode.sampling import make_processors, make_sampler
from start_llm.engine.decode.verify import SingleRow
from start_llm.kvcache.kinds import leaves
from tests.engine.fakes import new_row
from tests.engine.zoo import NAMES, VOCAB, make
from tests.kinds import rounds, some

PROMPT = [3, 9, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
ALIKE = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe_lite", "lfm2")
"""Architectures whose layers another one has, too."""
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "seeded": Sampling(temperature=0.9, seed=7, top_p=0.95, top_k=30),
    "penalties": Sampling(
        temperature=0.7,
        seed=3,
        repetition_penalty=1.2,
        repetition_context_size=12,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((5, 3.0), (7, -50.0)),
    ),
}


class Eager(DraftGate):
    """Drafts whatever is proposed."""

    def __init__(self, carries: bool = False) -> None:
        super().__init__(Published({1: 1.0}), carries)

    def length(self, match: int, most: int, *, carried: int, context: int) -> int:
        return most

    def hopeful(self, outlook: int, *, context: int) -> bool:
        return True


class Prophet:
    """Knows what will be said, and lies at places that `lies` chooses: a draft's index, or ``None``."""

    def __init__(self, truth: Sequence[int], known: int, lies: Callable[[int], tuple[int, int | None]]) -> None:
        self._truth, self.known, self._lies = truth, known, lies

    def append(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            assert self._truth[self.known] == token
            self.known += 1

    def propose(self, most: int) -> Proposal | None:
        length, lie = self._lies(most)
        tokens = list(self._truth[self.known : self.known + min(most, length)])
        tokens += [11] * (min(most, length) - len(tokens))
        if lie is not None and lie < len(tokens):
            tokens[lie] = (tokens[lie] + 1) % VOCAB
        return Proposal(tokens, 32) if tokens else None

    def outlook(self) -> int:
        return 33


def liar(seed: int) -> Callable[[int], tuple[int, int | None]]:
    chance = random.Random(seed)
    return lambda most: (chance.choice([0, 1, 2, 5, 20]), chance.choice([None, 0, 1, 2, 4, 9]))


def eight(lie: int, most: int) -> tuple[int, int | None]:
    return 8, lie


@dataclass
class Said:
    tokens: list[int]
    finish: str | None
    kv: list[Any]
    held: Sequence[int]


_PREFILLED: dict[int, tuple[Any, list[Any]]] = {}  # a model is kept with its KV, so that no other one gets its id


def prefilled(model: Any) -> list[Any]:
    if id(model) not in _PREFILLED:
        caches = make_prompt_cache(model)
        model(mx.array([PROMPT[:-1]]), cache=caches)
        mx.eval([layer.state for layer in caches])
        _PREFILLED[id(model)] = model, caches
    return copy.deepcopy(_PREFILLED[id(model)][1])


def drawing(sampling: Sampling) -> tuple[Any, list[Any]]:
    return make_sampler(sampling), make_processors(sampling, PROMPT)


def reference(
    model: Any,
    sampling: Sampling,
    count: int,
    eos: frozenset[int] = frozenset(),
    *,
    runner: Any = None,
    processors: Sequence[Any] = (),
) -> Said:
    """What `BatchGenerator` says. `processors`: behind those of `sampling`."""
    runner = runner or BatchRunner(model, eos=eos, max_rows=2)
    sampler, own = drawing(sampling)
    uid = runner.insert(new_row(PROMPT, prefilled(model), count, sampler, [*own, *processors]))
    tokens: list[int] = []
    while True:
        for row in [row for row in runner.decode() if row.uid == uid]:
            tokens.append(row.token)
            if row.finish is not None:
                return Said(tokens, row.finish, row.cache, row.tokens)


def single(
    model: Any,
    sampling: Sampling,
    count: int,
    *,
    truth: Sequence[int] = (),
    lies: Callable[[int], tuple[int, int | None]] | None = None,
    eos: frozenset[int] = frozenset(),
    gate: DraftGate | None = None,
    processors: Sequence[Any] = (),
    **more: Any,
) -> SingleRow:
    sampler, own = drawing(sampling)
    state = new_row(PROMPT, prefilled(model), count, sampler, [*own, *processors])
    row = SingleRow(1, model, state, eos=eos, gate=Eager() if gate is None and lies is not None else gate, **more)
    if lies is not None:
        row.offer(Prophet([*PROMPT, *truth], len(PROMPT), lies))
    return row


def said(row: SingleRow, steps: int = 1000) -> Said:
    tokens: list[int] = []
    for _ in range(steps):
        for one in row.step():
            tokens.append(one.token)
            if one.finish is not None:
                assert one.cache is not None and one.tokens is not None
                return Said(tokens, one.finish, one.cache, one.tokens)
    state = row.leave()
    return Said(tokens, None, state.cache, state.tokens)


def rows_of(leaf: Any) -> list[mx.array]:
    """What a layer remembers, in order."""
    if isinstance(leaf, KVCache):
        return [leaf.keys[..., : leaf.offset, :], leaf.values[..., : leaf.offset, :]]
    if isinstance(leaf, QuantizedKVCache):
        return [a[..., : leaf.offset, :] for a in (*leaf.keys, *leaf.values)]
    if isinstance(leaf, RotatingKVCache):
        held = min(leaf.max_size, leaf.offset)
        return [leaf._temporal_order(a)[..., -held:, :] for a in (leaf.keys, leaf.values)]
    return [a for a in (leaf.state[0] if isinstance(leaf, HiddenTail) else leaf.cache) if a is not None]


def in_one_pass(model: Any, tokens: Sequence[int]) -> Said:
    """The KV of these tokens."""
    cache = make_prompt_cache(model)
    model(mx.array([list(tokens)]), cache=cache)
    return Said([], None, cache, tokens)


def assert_same_kv(one: Said, other: Said, tolerance: float = 2e-4) -> None:
    assert list(one.held) == list(other.held)
    for a, b in zip(leaves(one.kv), leaves(other.kv), strict=True):
        assert type(a) is type(b) and getattr(a, "offset", 0) == getattr(b, "offset", 0)
        for x, y in zip(rows_of(a), rows_of(b), strict=True):
            np.testing.assert_allclose(np.array(x), np.array(y), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in ALIKE else []) for name in NAMES]
)
def test_every_architecture_says_the_same_with_drafts(name: str) -> None:
    model = make(name)
    for label in ("greedy", "penalties"):
        expected = reference(model, SAMPLINGS[label], 24)
        row = single(model, SAMPLINGS[label], 24, truth=expected.tokens, lies=liar(1))
        got = said(row)
        assert (got.tokens, got.finish) == (expected.tokens, "length"), label
        assert_same_kv(got, expected)
        assert 0 < row.state.drafts.counts.accepted < row.state.drafts.counts.drafted
        assert row.state.drafts.counts.forwards < 24


@pytest.mark.parametrize("lies", some([liar(1), None, liar(7)]))
@pytest.mark.parametrize(
    "places", [(4, 30), (4, 7)], ids=["two landmarks", "reasoning ends, and a call begins behind it"]
)
def test_a_state_is_kept_behind_each_landmark(
    places: tuple[int, int], lies: Callable[[int], tuple[int, int | None]] | None
) -> None:
    model, sampling = make("qwen3_5"), SAMPLINGS["greedy"]
    tokens = reference(model, sampling, 40).tokens
    landmarks = frozenset({tokens[place] for place in places})
    row = single(model, sampling, 40, truth=tokens, lies=lies, landmarks=landmarks)
    assert said(row).tokens == tokens
    if places == (4, 7):
        assert not landmarks & {*tokens[5:7], *tokens[8:21]}
        assert tuple(length - len(PROMPT) - 1 for length, _ in row.state.states[:2]) == places
    assert len(row.state.states) >= 2
    for length, layers in row.state.states:
        spoken = length - len(PROMPT)
        assert tokens[spoken - 1] in landmarks
        after = reference(model, sampling, spoken)
        for kept, layer in zip(layers, after.kv, strict=True):
            assert type(kept) is type(layer)
            if isinstance(layer, ArraysCache):
                for x, y in zip(rows_of(kept), rows_of(layer), strict=True):
                    np.testing.assert_allclose(np.array(x), np.array(y), rtol=2e-4, atol=2e-4)


def test_few_states_are_kept_and_of_those_that_end_alike_none_near_to_each_other() -> None:
    model, sampling = make("qwen3_5"), SAMPLINGS["penalties"]
    tokens = reference(model, sampling, 80).tokens
    near = next(t for i, t in enumerate(tokens) if t in tokens[max(0, i - 8) : i])
    for landmarks in (frozenset({near}), frozenset(range(VOCAB))):
        row = single(model, sampling, 80, landmarks=landmarks)
        assert said(row).tokens == tokens
        read = [*PROMPT[-1:], *tokens]
        possible = [place for place, token in enumerate(read[:-1]) if token in landmarks]
        kept: list[int] = []
        for place in possible:
            if len(kept) < 4 and all(place - other >= 16 for other in kept if read[other] == read[place]):
                kept.append(place)
        assert [length - len(PROMPT) for length, _ in row.state.states] == kept
        assert len(possible) > len(kept) > 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_no_state_is_kept_where_none_is_needed_or_it_is_written_in_place(name: str) -> None:
    model = make(name)
    row = single(model, SAMPLINGS["greedy"], 20, landmarks=frozenset(range(VOCAB)))
    said(row)
    assert row.state.states == []


@pytest.mark.parametrize("name", some(["qwen3_5", "llama", "gemma3_text"]))
def test_a_rejection_at_every_place_of_a_block_or_no_draft_at_all(name: str) -> None:
    model = make(name)
    expected = reference(model, SAMPLINGS["greedy"], 20)
    for place in (None, *range(8)):
        lies = None if place is None else partial(eight, place)
        got = said(single(model, SAMPLINGS["greedy"], 20, truth=expected.tokens, lies=lies))
        assert (got.tokens, got.finish) == (expected.tokens, "length")
        assert_same_kv(got, expected)


@cache
def truth_of(make: Callable[[str], Any], name: str, label: str) -> Said:
    return reference(make(name), SAMPLINGS[label], 21)


def anywhere(*names: str) -> Any:
    """What `check_run` is given, of these models."""
    return given(
        name=st.sampled_from(names),
        label=st.sampled_from(sorted(SAMPLINGS)),
        seed=st.integers(0, 10**6),
        steps=st.integers(1, 25),
        count=st.integers(1, 20),
        ends=st.none() | st.integers(0, 19),
    )


def check_run(
    name: str,
    label: str,
    seed: int,
    steps: int,
    count: int,
    ends: int | None,
    *,
    make: Callable[[str], Any] = make,
    gate: DraftGate | None = None,
) -> None:
    """A run with lies at places that `seed` chooses, left after so many steps, or ended by a token that is said."""
    model, truth = make(name), truth_of(make, name, label)
    eos = frozenset() if ends is None else frozenset([truth.tokens[ends]])
    row = single(model, SAMPLINGS[label], count, truth=truth.tokens, lies=liar(seed), eos=eos, gate=gate)
    got = said(row, steps)
    first_end = next((i for i, token in enumerate(truth.tokens) if token in eos), len(truth.tokens))
    whole = truth.tokens[: min(count, first_end + 1)]
    assert got.tokens == whole[: len(got.tokens)]
    if got.finish is not None:
        assert got.tokens == whole and (got.finish == "stop") == (whole[-1] in eos)
    assert list(got.held) == [*PROMPT, *got.tokens]
    assert_same_kv(got, in_one_pass(model, got.held))


ANYWHERE = anywhere("llama", "qwen3_5", "gemma3_text", "gpt_oss", "lfm2")


@ANYWHERE
@settings(max_examples=rounds(120), deadline=None)
@pytest.mark.thorough
def test_runs_with_rejections_stops_and_cancels_anywhere(**run: Any) -> None:
    check_run(**run)


@pytest.mark.slow
@ANYWHERE
@settings(max_examples=rounds(300), deadline=None)
def test_many_runs_with_rejections_stops_and_cancels_anywhere(**run: Any) -> None:
    check_run(**run)


@pytest.mark.parametrize(("bits", "start"), [*some([(8, len(PROMPT) + 9), (4, 0), (8, 0), (4, len(PROMPT) + 9)])])
def test_quantised_kv_becomes_so_at_the_same_token(bits: int, start: int) -> None:
    model = make("qwen3_5")
    how = Quantisation(bits, 32, start)
    runner = ModelRunner(model, eos=(), max_rows=2, quantisation=how)
    runner.insert(new_row(PROMPT, prefilled(model), 80, *drawing(SAMPLINGS["greedy"])))  # so that both are in a batch
    expected = reference(model, SAMPLINGS["penalties"], 40, runner=runner)
    row = single(model, SAMPLINGS["penalties"], 40, truth=expected.tokens, lies=liar(4), quantisation=how)
    got = said(row)
    assert got.tokens == expected.tokens and row.state.drafts.counts.accepted > 5
    assert any(isinstance(leaf, QuantizedKVCache) for leaf in got.kv)
    assert_same_kv(got, expected, tolerance=5e-3)


def test_how_often_a_known_pair_becomes_a_match_is_learnt_from_every_token() -> None:
    class Pairs(Prophet):
        def outlook(self) -> int:
            return LEAST_MATCH

    model = make("llama")
    truth = reference(model, SAMPLINGS["greedy"], 30).tokens
    chances = []
    for length in (0, 4):
        row = single(model, SAMPLINGS["greedy"], 30, truth=truth, lies=partial(eight, 0))
        row.offer(Pairs([*PROMPT, *truth], len(PROMPT), lambda most, length=length: (length, None)))
        said(row)
        chances.append(row._gate.acceptance.chance(LEAST_MATCH - 1))
    assert chances[0] < 0.2 < 0.6 < chances[1]


def test_a_drafter_may_come_late() -> None:
    class Watching(Eager):
        def hopeful(self, outlook: int, *, context: int) -> bool:
            return outlook >= LEAST_MATCH

    model = make("qwen3_5")
    expected = reference(model, SAMPLINGS["greedy"], 30)
    row = single(model, SAMPLINGS["greedy"], 30, gate=Watching())
    tokens = [one.token for _ in range(6) for one in row.step()]
    prophet = Prophet([*PROMPT, *expected.tokens], len(PROMPT), lambda most: (8, 5))
    row.offer(prophet)
    assert prophet.known == len(PROMPT) + len(tokens)
    first = [one.token for one in row.step()]
    assert len(first) > 1, "the pass that comes next has a draft"
    assert [*tokens, *first, *said(row).tokens] == expected.tokens


def test_layers_that_are_unknown_are_never_asked_to_give_tokens_back() -> None:
    class Strange:
        offset = 0

    assert not Rewinder([KVCache(), Strange()]).possible
