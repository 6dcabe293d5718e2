"""What the settings put together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from start_llm.core.errors import NotSupported
from start_llm.core.settings import load_settings
from start_llm.engine.runtime import landmarks_of, make_runner
from start_llm.models.capabilities import DecodingCheck
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


def test_kv_bits_quantise_and_still_batch() -> None:
    plain = make_runner(load_settings(None), loaded("llama"))
    assert plain.max_rows == 8 and type(plain.sample()[1][0]) is KVCache
    quantised = make_runner(load_settings(None, kv_bits=4, kv_group_size=32), loaded("llama"))
    assert quantised.max_rows == 8 and type(quantised.sample()[1][0]) is QuantizedKVCache
    with pytest.raises(NotSupported, match="sinks"):
        make_runner(load_settings(None, kv_bits=4, kv_group_size=32), loaded("gpt_oss"))
