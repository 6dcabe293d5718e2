"""Quantised KV: what mlx-lm's own loop generates with it, in batches too, and rows that change over in between."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from start_llm.core.errors import NotSupported
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.engine.decode.quantised import Quantisation
from start_llm.engine.decode.rewind import Rewinder
from start_llm.engine.vision import LanguageAlone
from tests.engine.decode.test_batch import NEVER, argmax, begin, run
from tests.kvcache import sparse
from tests.kvcache.tiny import model, random_tokens
from tests.models import vlm_types

GROUP_SIZE = 32
PROMPTS = [random_tokens(n, seed=n) for n in (60, 17, 95, 41)]


def make(name: str, start: int, *, bits: int = 8, eos: Sequence[int] = (NEVER,), rows: int = 4) -> ModelRunner:
    how = Quantisation(bits, GROUP_SIZE, start)
    return ModelRunner(model(name), eos=eos, max_rows=rows, quantisation=how)


def alone(name: str, prompt: Sequence[int], most: int, start: int, bits: int = 8) -> list[int]:
    """What mlx-lm generates one row at a time. Its own helper cannot be used: it fails on windowed layers."""
    how, cache, out = Quantisation(bits, GROUP_SIZE, start), make_prompt_cache(model(name)), []
    pieces = [*(prompt[at : min(at + 20, len(prompt) - 1)] for at in range(0, len(prompt) - 1, 20)), prompt[-1:]]
    while len(out) < most:
        for piece in pieces:
            logits = model(name)(mx.array([list(piece)]), cache=cache)
            how.apply(cache)
        out.append(int(mx.argmax(logits[0, -1]).item()))
        pieces = [out[-1:]]
    return out


@pytest.mark.parametrize("start", [0, 30, *(pytest.param(start, marks=pytest.mark.thorough) for start in (66, 1000))])
def test_the_expectation_is_what_mlx_lms_own_loop_generates(start: int) -> None:
    options = {"kv_bits": 8, "kv_group_size": GROUP_SIZE, "quantized_kv_start": start}
    for prompt in PROMPTS:
        steps = generate_step(
            mx.array(prompt), model("llama"), max_tokens=12, prefill_step_size=20, sampler=argmax, **options
        )
        assert alone("llama", prompt, 12, start) == [int(token) for token, _ in steps]


@pytest.mark.parametrize(
    ("name", "start", "bits"),
    [
        *(("llama", start, bits) for start in (0, 30, 66, 1000) for bits in (4, 8)),
        ("qwen3_next", 66, 8),  # keeps its recurrent layers as they are; 66: reached while the first row decodes
        ("gemma3_text", 66, 8),  # and this one its windows
    ],
)
@pytest.mark.thorough
def test_rows_together_generate_what_each_does_alone(name: str, start: int, bits: int) -> None:
    runner = make(name, start, bits=bits)
    uids = [begin(runner, name, prompt, 12) for prompt in PROMPTS]
    rows = run(runner, uids)
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        expected = alone(name, prompt, 12, start, bits)
        assert [row.token for row in rows[uid]] == expected
        last = rows[uid][-1]
        assert list(last.tokens or ()) == [*prompt, *expected]
        kept = (last.cache or [])[-1]
        assert (type(kept) is QuantizedKVCache) == (len(prompt) + 12 > start)
        assert kept.offset == len(prompt) + 12


def test_a_suspended_row_goes_on_as_if_nothing_had_happened() -> None:
    name, prompt, start, most = "llama", PROMPTS[0], 66, 16
    expected = alone(name, prompt, most, start)
    for after in (2, 6, 7, 12):
        runner = make(name, start)
        other = begin(runner, name, PROMPTS[2], 100)
        uid = begin(runner, name, prompt, most)
        found = list[int]()
        while len(found) < after:
            found += [row.token for row in runner.decode() if row.uid == uid]
        row = runner.suspend(uid)
        if row is None:  # it had just changed over: its first token there is not out yet
            found += [row.token for row in runner.decode() if row.uid == uid]
            row = runner.suspend(uid)
        assert row is not None
        assert row.left == most - len(found)
        uid = runner.insert(row)
        while len(found) < most:
            found += [row.token for row in runner.decode() if row.uid == uid]
        assert found == expected
        assert runner.remove(other) is not None


def test_rows_can_be_removed_before_and_after_they_changed_over_and_nothing_is_left_after_a_clear() -> None:
    runner = make("llama", 66)
    for after in (3, 12):
        uid = begin(runner, "llama", PROMPTS[0], 50)
        found: list[int] = []
        while len(found) < after:
            found += [row.token for row in runner.decode()]
        removed = runner.remove(uid)
        assert removed is not None
        cache, tokens = removed
        assert list(tokens) == [*PROMPTS[0], *found]
        assert cache[0].offset == len(tokens)
        assert (runner.decode(), runner.remove(uid), runner.suspend(uid)) == ([], None, None)
    uids = [begin(runner, "llama", prompt, 50) for prompt in PROMPTS]
    runner.decode()
    runner.clear()
    assert (runner.decode(), [runner.remove(uid) for uid in uids]) == ([], [None] * 4)
    uid = begin(runner, "llama", PROMPTS[0], 12)
    assert [row.token for row in run(runner, [uid])[uid]] == alone("llama", PROMPTS[0], 12, 66)


@pytest.mark.parametrize(
    ("name", "group_size", "reason"),
    [("gpt_oss", 32, "sinks"), ("llama", 64, "group size"), ("lfm2", 64, "group size")],
)
def test_a_model_that_cannot_is_refused_with_the_reason(name: str, group_size: int, reason: str) -> None:
    with pytest.raises(NotSupported, match=f"KV_BITS=8.*{reason}"):
        Quantisation(8, group_size, 0).check(model(name))


def test_rows_of_an_index_are_quantised_and_drafts_are_taken_back() -> None:
    """Qwen3.8-Flash-Next's, with its sparse attention on: near the plain row, and the same with and without a draft."""
    made, how = sparse.model("qwen4_exp"), Quantisation(8, GROUP_SIZE, 30)
    assert not how.check(made), "there is no batch of them"
    text, found = sparse.text(80), []
    for start, wrong in ((30, 0), (30, 3), (1000, 0)):
        how, cache, answer = Quantisation(8, GROUP_SIZE, start), made.make_cache(), list[mx.array]()
        for at in range(0, 80, 20):
            sparse.feed(made, text[at : at + 20], cache)
            how.apply(cache)
        assert how.holds(cache) == (start == 30)
        for token in (7, 8, 9):
            if wrong:
                rewinder = Rewinder(cache)
                saved = rewinder.save()
                sparse.feed(made, [11, 12, 13], cache)
                rewinder.restore(saved, 3)
            answer.append(mx.softmax(made(mx.array([[token]]), cache=cache)[0, -1]))
        found.append(mx.stack(answer))
    assert mx.array_equal(found[0], found[1])
    assert 0 < mx.abs(found[0] - found[2]).sum().item() / 6 < 0.01


def test_a_model_that_is_given_positions_has_no_batch_of_quantised_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5's: its layer of positions stays plain. In a batch of mlx-vlm's attention short rows said other tokens."""
    rope = {"type": "default", "mrope_section": [8, 4, 4], "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    monkeypatch.setitem(vlm_types.CONFIGS, "qwen3_5_text", {"head_dim": 64, "rope_parameters": rope})
    made, how = LanguageAlone(vlm_types.make("qwen3_5_text").language_model), Quantisation(8, GROUP_SIZE, 30)
    assert not how.check(made)
    cache = made.make_cache()
    sparse.feed(made, sparse.text(40), cache)
    assert how.apply(cache) and how.holds(cache) and type(cache[-1]) is KVCache
    sparse.feed(made, [7], cache)
    assert cache[-1].offset == 41
