"""A row whose drafts a head proposes says what it says without, and leaves the same KV, the head's included."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from mlx_vlm.speculative import drafters

from scripts.bench.drafting import Published
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.gate import DraftGate, DraftOption
from start_llm.engine.decode.head import HeadedModel, HiddenTail
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.quantised import Quantisation
from start_llm.engine.decode.verify import SingleRow
from start_llm.engine.vision import VisionModel
from start_llm.kvcache.kinds import leaves
from start_llm.kvcache.layers import LayerKit
from tests.engine import vision_zoo
from tests.engine.decode.test_verify import (
    PROMPT,
    SAMPLINGS,
    Prophet,
    Said,
    anywhere,
    assert_same_kv,
    check_run,
    drawing,
    in_one_pass,
    liar,
    prefilled,
    reference,
    rows_of,
    said,
    single,
)
from tests.engine.fakes import new_row
from tests.engine.headed import headed, headed_vision, new_head
from tests.engine.zoo import VOCAB, fresh
from tests.kinds import some
from tests.models.architectures import greedy

KINDS = ["qwen3_5", "llama", "small", "same"]


class Anything(DraftGate):
    """Drafts any number of tokens from any source."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(Published({1: 1.0}), head=0.0)
        self._chance = random.Random(seed)

    def choose(self, options: Sequence[DraftOption], *, carried: int, context: int) -> tuple[int, int]:
        index = self._chance.randrange(len(options))
        return index, min(options[index].most, self._chance.choice([0, 1, 2, 5, 8]))

    def hopeful(self, outlook: int, *, context: int) -> bool:
        return self._chance.random() < 0.8


def row_of(model: Any, label: str, count: int, gate: DraftGate, **more: Any) -> SingleRow:
    return single(model, SAMPLINGS[label], count, gate=gate, **more)


def assert_same(one: Said, model: HeadedModel) -> None:
    """The KV, and the head's, is that of one pass over the same tokens."""
    assert_same_kv(one, in_one_pass(model, one.held))


@pytest.mark.parametrize("label", [pytest.param("greedy", marks=pytest.mark.thorough), "seeded"])
def test_a_vision_model_says_the_same_with_copies_and_with_a_head(label: str) -> None:
    plain = VisionModel(vision_zoo.make("qwen3_5"), vision_zoo.PAD)
    expected = reference(plain, SAMPLINGS[label], 24)
    for model in (plain, headed_vision()):
        gate = Anything()
        gate.head = gate.head if isinstance(model, HeadedModel) else None
        row = row_of(model, label, 24, gate, truth=expected.tokens, lies=liar(3))
        got = said(row)
        assert got.tokens == expected.tokens
        assert row.state.drafts.counts.accepted > 0
        if isinstance(model, HeadedModel):
            assert row.state.drafts.counts.drafted > 0
            assert_same(got, model)


@pytest.mark.parametrize(("label", "name"), [*zip(("penalties", "greedy", "seeded", "penalties"), KINDS, strict=True)])
def test_the_words_are_the_same_with_a_head(name: str, label: str) -> None:
    model = headed(name)
    expected = reference(model, SAMPLINGS[label], 24)
    row = row_of(model, label, 24, Anything())
    got = said(row)
    assert (got.tokens, got.finish) == (expected.tokens, "length")
    assert_same(got, model)
    assert row.state.drafts.counts.drafted > 0


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    row = row_of(headed("same"), "greedy", 24, Anything())
    said(row)
    counts = row.state.drafts.counts
    assert counts.headed == counts.accepted == counts.drafted > 5 and counts.forwards < 20


@anywhere(*KINDS)
@settings(max_examples=60, deadline=None)
@pytest.mark.thorough
def test_copies_and_heads_by_turns_left_or_ended_anywhere(**run: Any) -> None:
    check_run(**run, make=headed, gate=Anything(run["seed"]))


@pytest.mark.parametrize("name", ["qwen3_5", "llama", "small"])
def test_the_heads_kv_is_stored_and_restored_with_the_rest(name: str) -> None:
    model = headed(name)
    kit = LayerKit(model.make_cache)
    tokens = [*PROMPT, *range(1, 20)]
    cache = model.make_cache()
    model(mx.array([tokens[:30]]), cache=cache)
    mx.eval([layer.state for layer in cache])
    runs = [kit.slice(cache, 0, 12), kit.slice(cache, 12, 30)]
    assert kit.cuttable == (name != "qwen3_5")
    point = None if kit.cuttable else kit.checkpoint(cache)
    packed = [kit.unpack(*kit.pack(piece)) for piece in (*runs, *([] if point is None else [point]))]
    restored, _ = kit.build(packed[:2], packed[2] if point is not None else None, 30)  # type: ignore[arg-type]
    model(mx.array([tokens[30:]]), cache=restored)
    if not kit.cuttable or name == "small":  # else the hidden state in front of the first new token is not kept
        assert_same(Said([], None, restored, tokens), model)
    assert len(model.propose(restored, [7], None, 3, lambda logprobs: mx.argmax(logprobs, axis=-1))) == 3


def test_a_head_reads_the_state_in_front_of_each_token() -> None:
    tail = HiddenTail()
    assert tail.before(mx.array([[[1.0], [2.0]]])).flatten().tolist() == [0.0, 1.0]
    tail.keep(mx.array([[[1.0], [2.0]]]))
    assert tail.before(mx.array([[[3.0], [4.0]]])).flatten().tolist() == [2.0, 3.0]


def test_proposing_leaves_everything_as_it_was() -> None:
    model = headed("qwen3_5")
    sampler, _ = drawing(SAMPLINGS["seeded"])
    cache = prefilled(model)
    before = [np.array(a) for leaf in leaves(cache) for a in rows_of(leaf)]
    first, again = (model.propose(cache, [PROMPT[-1]], None, 4, sampler) for _ in range(2))
    assert first == again and all(0 <= token < VOCAB for token in first)
    after = [np.array(a) for leaf in leaves(cache) for a in rows_of(leaf)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_quantised_kv_takes_in_the_heads_own() -> None:
    model, quantisation = headed("qwen3_5"), Quantisation(8, 32, 30)
    quantisation.check(model)
    runner = ModelRunner(model, eos=[], max_rows=2, quantisation=quantisation)
    expected = reference(model, SAMPLINGS["greedy"], 20, runner=runner)
    row = row_of(model, "greedy", 20, Anything(), quantisation=quantisation)
    assert said(row).tokens == expected.tokens and row.state.drafts.counts.drafted > 0


@pytest.mark.parametrize("name", ["qwen3_5", "small"])
def test_rows_with_a_head_decode_together_and_alone_again(name: str) -> None:
    model = headed(name)
    gate = Anything()
    runner = ModelRunner(model, eos=[], max_rows=2, gate=gate)
    expected = reference(model, SAMPLINGS["greedy"], 20).tokens
    drafts = RowDrafts(lambda: None)
    first = runner.insert(replace(new_row(PROMPT, prefilled(model), 20, *drawing(SAMPLINGS["greedy"])), drafts=drafts))
    heard: dict[int, list[int]] = {first: []}
    for step in range(60):
        if step == 3:
            heard[runner.insert(new_row(PROMPT, prefilled(model), 6, *drawing(SAMPLINGS["greedy"])))] = []
        for one in runner.decode():
            heard[one.uid].append(one.token)
            if one.finish is not None and one.uid == first:
                assert_same(Said([], None, one.cache, one.tokens), model)  # type: ignore[arg-type]
    assert heard.pop(first) == expected and list(heard.values()) == [expected[:6]]


class TakesAll(Anything):
    """Of rows that decode together the whole of each draft."""

    def together(self, options: Sequence[DraftOption], *, context: int) -> int:
        return 1 + max(option.most for option in options)


@pytest.mark.parametrize("name", some(["llama", "small"]))
def test_rows_of_a_model_with_a_head_verify_copies_together(name: str) -> None:
    """Of prompts that are not equally long; one ends before the other, which goes on alone."""
    model, runner = headed(name), ModelRunner(headed(name), eos=[], max_rows=2, gate=TakesAll())
    expected, heard, counts = dict[int, list[int]](), dict[int, list[int]](), []
    for prompt, most in ((PROMPT, 24), (PROMPT[:20], 30)):
        truth, cache = greedy(model, prompt, most), model.make_cache()
        runner.prefill(cache, prompt[:-1])
        prophet = Prophet([*prompt, *truth], len(prompt), liar(most))
        drafts = RowDrafts(lambda prophet=prophet: prophet)  # type: ignore[misc]
        counts.append(drafts.counts)
        uid = runner.insert(new_row(prompt, cache, most, *drawing(SAMPLINGS["greedy"]), drafts=drafts))
        expected[uid], heard[uid] = truth, []
    ended = 0
    while ended < 2:
        both = ended == 0
        for row in runner.decode():
            heard[row.uid].append(row.token)
            if row.finish is not None:
                ended += 1
                assert_same(Said([], None, row.cache, row.tokens), model)  # type: ignore[arg-type]
        if both:
            right_together = sum(each.accepted for each in counts)
    assert heard == expected and right_together > 5


def test_what_is_used_of_upstream_is_there() -> None:
    """Internals of mlx-vlm's heads, and that a model's inside returns what the output projection is given."""
    head, model = new_head(), fresh("qwen3_5")
    parameters = ["token_embed", "hidden", "cache", "position_ids"]
    assert list(inspect.signature(head._forward_hidden).parameters) == parameters
    head.bind(model.language_model)
    assert head._input_embed is model.language_model.model.embed_tokens and head._input_embed_scale == 1.0
    state = model.language_model.model(mx.array([[1, 2]]))
    assert mx.allclose(head._lm_head_fn(state), model(mx.array([[1, 2]])))
    assert [type(layer).__name__ for layer in head.make_cache()] == ["KVCache"]
    assert hasattr(drafters, "load_drafter")
