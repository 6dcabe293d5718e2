"""What the settings put together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from start_llm.core.errors import NotSupported
from start_llm.core.settings import load_settings
from start_llm.engine.ranks.interface import Ranks
from start_llm.engine.runtime import bound_freed_buffers, call_openers_of, landmarks_of, make_runner
from start_llm.models.capabilities import DecodingCheck
from start_llm.models.device import PREFILL_BYTES
from start_llm.parsing.registry import output_style
from tests.kvcache.tiny import model


def loaded(name: str) -> Any:
    capabilities = SimpleNamespace(decoding=DecodingCheck())
    make_cache = lambda: make_prompt_cache(model(name))  # noqa: E731
    tokenizer = SimpleNamespace(get_added_vocab=lambda: {"<tool_call>": 5, "</think>": 6, "</tool_call>": 7})
    return SimpleNamespace(
        model=model(name),
        make_cache=make_cache,
        eos=frozenset({1}),
        capabilities=capabilities,
        tokenizer=tokenizer,
        style=output_style(tool_parser="hermes_json", reasoning_parser="think_tag"),
    )


def test_landmarks_are_tokens_that_end_reasoning_or_begin_a_call() -> None:
    assert landmarks_of(loaded("llama")) == {5, 6}
    assert call_openers_of(loaded("llama")) == {5}


def test_whether_a_llama_model_has_called_is_not_known_by_tokens() -> None:
    """It begins most of its calls with plain JSON."""
    tokenizer = SimpleNamespace(get_added_vocab=lambda: {"<|python_tag|>": 5})
    model = SimpleNamespace(
        **vars(loaded("llama")) | {"tokenizer": tokenizer, "style": output_style(tool_parser="llama")}
    )
    assert landmarks_of(model) == {5}
    assert make_runner(load_settings(None), model, None, Ranks()).calls([5, 9]) is None
    hermes = make_runner(load_settings(None), loaded("llama"), None, Ranks())
    assert (hermes.calls([5, 9]), hermes.calls([9])) == (True, False)


def test_kv_bits_quantise_and_still_batch() -> None:
    plain = make_runner(load_settings(None), loaded("llama"), None, Ranks())
    assert plain.max_rows == 8 and type(plain.sample()[1][0]) is KVCache
    quantised = make_runner(load_settings(None, kv_bits=4, kv_group_size=32), loaded("llama"), None, Ranks())
    assert quantised.max_rows == 8 and type(quantised.sample()[1][0]) is QuantizedKVCache
    with pytest.raises(NotSupported, match="sinks"):
        make_runner(load_settings(None, kv_bits=4, kv_group_size=32), loaded("gpt_oss"), None, Ranks())


@pytest.mark.parametrize(("before", "after"), [(64 * PREFILL_BYTES, PREFILL_BYTES), (2**25, 2**25)])
def test_what_mlx_keeps_of_freed_buffers_is_bounded(before: int, after: int) -> None:
    own = mx.set_cache_limit(before)
    try:
        bound_freed_buffers()
        assert mx.set_cache_limit(own) == after
    finally:
        mx.set_cache_limit(own)
