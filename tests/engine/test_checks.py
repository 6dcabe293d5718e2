"""A model that computes something else in a batch, or from stored KV, is found out; a sound one is not suspected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from start_llm.engine.checks import MOST_LENGTH, check_decoding
from start_llm.engine.decode.model_runner import ModelRunner
from start_llm.models.background import at_once
from start_llm.models.capabilities import DecodingCheck
from tests.engine.decode.test_batch import argmax, run
from tests.engine.fakes import new_row
from tests.kinds import some
from tests.models.architectures import make
from tests.models.decode_everywhere import ANSWER, PROMPT, truth


def checked(model: Any, make_cache: Any = None) -> DecodingCheck | None:
    return at_once(check_decoding(model, make_cache or (lambda: list(make_prompt_cache(model))), PROMPT))


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("nemotron_h", "gemma3_text"))]
)
@pytest.mark.parametrize("dtype", [pytest.param(mx.float32, marks=pytest.mark.thorough), mx.bfloat16])
def test_a_sound_model_may_do_everything(name: str, dtype: Any) -> None:
    model = make(name)
    model.set_dtype(dtype)
    assert checked(model) == DecodingCheck()


@pytest.mark.parametrize(
    ("name", "reason"),
    some(
        [
            ("afm7", "predictions differ by"),
            ("gemma2", "Cannot reshape"),
            ("deepseek_v41", "does not yet support batching"),
            ("minimax_m3_vl", "predictions differ by"),  # it shows in texts of which sparse attention leaves parts out
        ]
    ),
)
def test_a_model_that_is_wrong_in_a_batch(name: str, reason: str) -> None:
    found = checked(make(name))
    assert found is not None and reason in found.batches
    assert found.report()[0].startswith("requests are decoded one by one, not in batches: ")


class Forgetful(KVCache):
    """Comes back with the first token's rows in every place."""

    @property
    def state(self) -> Any:
        return super().state

    @state.setter
    def state(self, value: Any) -> None:
        KVCache.state.fset(self, value)  # type: ignore[attr-defined]
        self.keys = mx.repeat(self.keys[..., :1, :], self.keys.shape[2], axis=2)


class Stuck(KVCache):
    @property
    def state(self) -> Any:
        return super().state


@pytest.mark.parametrize(("kind", "reason"), [(Forgetful, "predictions differ by"), (Stuck, "has no setter")])
def test_a_cache_that_cannot_be_restored(kind: type[KVCache], reason: str) -> None:
    model = make("llama")
    found = checked(model, lambda: [kind() for _ in model.layers])
    assert found is not None and reason in found.reuse
    assert found.report()[-1].startswith("stored KV is not used: ")


def test_a_model_that_does_not_compute_is_not_judged() -> None:
    def broken(tokens: Any, cache: Any) -> Any:
        raise KeyError("layer")

    assert checked(broken, lambda: [KVCache()]) is None


def test_the_texts_are_bounded_whatever_a_model_says_of_itself() -> None:
    model, seen = make("llama"), [0]

    class Sparse:
        index_topk = 10**9

        def modules(self) -> Iterator[Any]:
            yield self

        def __call__(self, tokens: Any, cache: Any) -> Any:
            seen[0] += tokens.shape[1]
            return model(tokens[:, :1], cache=cache)

    at_once(check_decoding(Sparse(), lambda: list(make_prompt_cache(model)), PROMPT))
    assert MOST_LENGTH < seen[0] < 3 * MOST_LENGTH


def test_rows_that_are_not_batched_are_decoded_each_as_alone() -> None:
    model = make("afm7")
    runner = ModelRunner(model, eos=(), max_rows=4, batches=False)
    prompts = {}
    for prompt in (PROMPT[:7], PROMPT, PROMPT[3:20]):
        cache = list(make_prompt_cache(model))
        runner.prefill(cache, prompt[:-1])
        prompts[runner.insert(new_row(prompt, cache, ANSWER, argmax))] = prompt
    said = {uid: [row.token for row in rows] for uid, rows in run(runner, list(prompts)).items()}
    runner.close()
    assert said == {uid: truth(model, prompt) for uid, prompt in prompts.items()}
