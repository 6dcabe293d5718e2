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
_FAR_APART = (1, 8, 32)  # what is measured first: they say most about the rest
_ORDER = (*_FAR_APART, 4, 2, 16, 3, 6, 12, 5, 24)
_ROUNDS = 3

Measured = dict[int, dict[int, float]]
"""Seconds by context length and width."""


def measure_passes(
    model: Any, make_cache: Callable[[], Cache], seconds: float = 1.0, clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """The quickest of a few passes for each width, at a short and a longer context.

    Args:
        seconds: about how long it may take after two passes that warm up; the widths that say most may take half as
            long again. What was not measured lies on a straight line between its neighbours, and beyond the widest that
            was measured each token is taken to cost as much as there.
    """
    assert set(_ORDER) == set(WIDTHS)
    measured: Measured = {}
    _pass(model, make_cache(), 1)  # reads weights that were not read yet
    cache = make_cache()
    _pass(model, cache, SHORT)
    began = clock()
    end, latest = began + seconds, began + 1.5 * seconds
    for wanted, until in ((SHORT, began + seconds / 2), (LONG, end)):
        length = _stretch(cache, wanted)
        if length in measured or (measured and clock() >= end):
            break  # no layer's cost depends on the context, or there is no memory or no time for a longer one
        found = _widths(model, cache, until, latest, clock)
        if not measured or found.keys() >= set(_FAR_APART):  # else a longer context is taken to cost the same
            widest = max(found)
            measured[length] = {WIDTHS[-1]: found[widest] * WIDTHS[-1] / widest, **found}
    mx.clear_cache()
    return measured


def _widths(model: Any, cache: Cache, until: float, latest: float, clock: Callable[[], float]) -> dict[int, float]:
    """Every width once, then again, up to `until`; those that say most may take until `latest`."""
    offsets = [(leaf, leaf.offset) for leaf in leaves(cache) if isinstance(leaf, KVCache)]
    found: dict[int, float] = {}
    for width in _ORDER * _ROUNDS:
        first = width in _FAR_APART and width not in found
        if found and clock() + _guess(found, width) > (latest if first else until):
            break
        began = clock()
        _pass(model, cache, width)
        took = clock() - began
        for leaf, offset in offsets:
            leaf.offset = offset
        found[width] = min(took, found.get(width, took))
    return found


def _guess(found: dict[int, float], width: int) -> float:
    """Seconds that a pass may take: a wider one is cheaper by the token."""
    nearest = min(found, key=lambda known: abs(known - width))
    return found[nearest] * max(1.0, width / nearest / 2)


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
