"""Small models with random float32 weights, and caches whose content is known."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from tests.models import architectures

VOCAB = 512


@functools.cache
def model(name: str) -> Any:
    """A model of this type with few layers, whose keys can be quantised in groups of 32."""
    return architectures.make(name, vocab_size=VOCAB, head_dim=32)


def prompt_cache(name: str) -> list[Any]:
    return list(make_prompt_cache(model(name)))


def prefill(name: str, tokens: Sequence[int], cache: list[Any], chunk: int = 24) -> None:
    for at in range(0, len(tokens), chunk):
        model(name)(mx.array([list(tokens[at : at + chunk])]), cache=cache)
        mx.eval([entry.state for entry in cache])


def greedy(name: str, tokens: Sequence[int], cache: list[Any], count: int) -> list[int]:
    """Prefills `tokens` behind `cache`, then decodes."""
    prefill(name, tokens[:-1], cache)
    token, out = int(tokens[-1]), []
    for _ in range(count):
        logits = model(name)(mx.array([[token]]), cache=cache)
        token = int(mx.argmax(logits[0, -1]).item())
        out.append(token)
    return out


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, count)]


# --- caches that hold their own tokens ----------------------------------------


WINDOW = 5


def known_cache(tokens: Sequence[int], hybrid: bool = False) -> list[Any]:
    """Keys hold the tokens, values their negatives.

    The hybrid one also has a state of (sum, count) and a windowed layer of the last tokens.
    """
    row = mx.array(np.asarray(tokens, dtype=np.float32).reshape(1, 1, -1, 1))
    layer = KVCache()
    if len(tokens):
        layer.update_and_fetch(row, -row)
    cache: list[Any] = [layer]
    if hybrid:
        state = ArraysCache(2)
        if len(tokens):
            state[0] = mx.array([[float(sum(tokens))]])
            state[1] = mx.array([[len(tokens)]])
        window = RotatingKVCache(max_size=WINDOW)
        if len(tokens):
            window.update_and_fetch(row, -row)
        cache += [state, window]
    return cache


def read_known(cache: list[Any]) -> list[int]:
    """The tokens in a `known_cache`; fails if its parts disagree."""
    layer = cache[0]
    if layer.keys is None:
        return []
    keys = np.array(layer.keys[0, 0, : layer.offset, 0])
    values = np.array(layer.values[0, 0, : layer.offset, 0])
    assert (keys == -values).all()
    if len(cache) > 1:
        assert float(cache[1][0].item()) == float(keys.sum())
        assert int(cache[1][1].item()) == len(keys)
        window = cache[2]
        rows = np.array(window._temporal_order(window.keys)[0, 0, :, 0])
        assert window.offset == len(keys) and (rows == keys[-len(rows) :]).all() and len(rows) == min(len(keys), WINDOW)
        assert (np.array(window._temporal_order(window.values)[0, 0, :, 0]) == -rows).all()
    return [int(k) for k in keys]
