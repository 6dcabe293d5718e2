"""Measures what a forward pass costs by its width, when a model has been loaded. Model thread only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from start_llm.engine.costs import WIDTHS
from start_llm.engine.rewind import leaves
from start_llm.engine.runner import Cache

SHORT, LONG = 64, 4096
_MOST_BYTES = 512 << 20  # of made-up KV
_ORDER = (1, 2, 4, 8, 16, 32, 3, 5, 12, 6, 24)  # what is known first says most about the rest
_ROUNDS = 3

Measured = dict[int, dict[int, float]]
"""Seconds by context length and width."""


def measure_passes(
    model: Any, make_cache: Callable[[], Cache], seconds: float = 1.0, clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """The quickest of a few passes for each width, at a short and a longer context.

    Args:
        seconds: about how long it may take after a first pass. On a machine that is too slow for that, passes that
            were not measured are taken to cost as much a token as the widest that was.
    """
    assert set(_ORDER) == set(WIDTHS)
    measured: Measured = {}
    _pass(model, make_cache(), 1)  # reads weights that were not read yet
    end = clock() + seconds
    for wanted in (SHORT, LONG):
        cache = make_cache()
        _pass(model, cache, SHORT)
        length = _stretch(cache, wanted)
        if length in measured or (measured and clock() >= end):
            break  # no layer's cost depends on the context, or there is no memory or no time for a longer one
        until = end if measured else clock() + (end - clock()) / 2
        measured[length] = _widths(model, cache, until, clock)
    mx.clear_cache()
    return measured


def _widths(model: Any, cache: Cache, until: float, clock: Callable[[], float]) -> dict[int, float]:
    offsets = [(leaf, leaf.offset) for leaf in leaves(cache) if isinstance(leaf, KVCache)]
    found: dict[int, float] = {}
    for width in _ORDER:
        if found and clock() + found[max(found)] * max(1, width / max(found)) > until:
            break
        for turn in range(_ROUNDS):
            began = clock()
            _pass(model, cache, width)
            took = clock() - began
            for leaf, offset in offsets:
                leaf.offset = offset
            found[width] = took if turn == 0 else min(found[width], took)
            if clock() + took > until:
                break
    widest = max(found)
    return {WIDTHS[-1]: found[widest] * WIDTHS[-1] / widest, **found}


def _pass(model: Any, cache: Cache, width: int) -> None:
    logits = model(mx.zeros((1, width), dtype=mx.int32), cache=cache)
    mx.eval(mx.argmax(logits[:, -1, :], axis=-1), [leaf.state for leaf in cache])


def _stretch(cache: Cache, length: int) -> int:
    """Makes the KV look as if it held so many tokens, or fewer if that takes too much memory. Returns how many."""
    plain = [leaf for leaf in leaves(cache) if isinstance(leaf, KVCache) and leaf.keys is not None]
    each = sum(a.nbytes // a.shape[2] for leaf in plain for a in (leaf.keys, leaf.values))
    length = min(length, _MOST_BYTES // each) if each else SHORT
    if length <= SHORT:
        return SHORT
    for leaf in plain:
        room = (*leaf.keys.shape[:2], length + WIDTHS[-1])
        leaf.keys = mx.zeros((*room, leaf.keys.shape[3]), dtype=leaf.keys.dtype)
        leaf.values = mx.zeros((*room, leaf.values.shape[3]), dtype=leaf.values.dtype)
        leaf.offset = length
    mx.eval([leaf.state for leaf in cache])
    return length
