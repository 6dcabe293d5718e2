"""Measures what a forward pass costs by its width, when a model has been loaded. Model thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from start_llm.engine.decode.costs import WIDTHS
from start_llm.engine.decode.rewind import held_tokens, leaves
from start_llm.engine.decode.row import Cache

SHORT, LONG = 64, 4096
_WARMING = 16  # tokens a pass before anything is measured
_MOST_BYTES = 512 << 20  # of made-up KV
_FAR_APART = (1, 8, 32)  # what is measured first: they say most about the rest
_ORDER = (*_FAR_APART, 4, 2, 16, 3, 6, 12, 5, 24)
_ROUNDS = 3

Observe = Callable[[int, int, float], object]  # is told width, context and seconds of a pass


class _Passes:
    """`seconds`: that passes have taken, without what others did between them."""

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        self._model, self._clock = model, clock
        self.seconds = 0.0

    def run(self, cache: Cache, width: int) -> float:
        """Seconds that it took."""
        began = self._clock()
        logits = self._model(mx.zeros((1, width), dtype=mx.int32), cache=cache)
        mx.eval(mx.argmax(logits[:, -1, :], axis=-1), [leaf.state for leaf in cache])
        took = self._clock() - began
        self.seconds += took
        return took


def measuring(
    model: Any,
    make_cache: Callable[[], Cache],
    observe: Observe,
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[float]:
    """Tells `observe` the quickest of a few passes for each width, at a short and a longer context.

    Pauses after each pass. A slow model is measured at few widths; the rest is learnt from what it serves. What the
    passes that warm up take is told, too.

    `seconds`: about how long it may take after the passes that warm up.
    """
    assert set(_ORDER) == set(WIDTHS)
    passes = _Passes(model, clock)
    passes.run(make_cache(), 1)  # reads weights that were not read yet
    yield 0.0
    cache = make_cache()
    for _ in range(SHORT // _WARMING):
        held = held_tokens(cache)
        took = passes.run(cache, _WARMING)
        if held:  # the very first one prepares what all others use
            observe(_WARMING, held, took)
        yield 0.0
    began, measured = passes.seconds, set[int]()
    for wanted, until in ((SHORT, began + seconds / 2), (LONG, began + seconds)):
        length = yield from _stretch(cache, wanted)
        if length in measured or (measured and passes.seconds >= until):
            break  # no layer's cost depends on the context, or there is no memory or no time for a longer one
        measured.add(length)
        found = yield from _widths(passes, cache, until, until + seconds / 2)
        for width, took in found.items():
            observe(width, length, took)
    mx.clear_cache()


def _widths(passes: _Passes, cache: Cache, until: float, latest: float) -> Generator[float, None, dict[int, float]]:
    """Every width once, then again, until passes have taken `until` seconds; those that say most may take `latest`."""
    offsets = [(leaf, leaf.offset) for leaf in leaves(cache) if isinstance(leaf, KVCache)]
    found: dict[int, float] = {}
    for width in _ORDER * _ROUNDS:
        first = width in _FAR_APART and width not in found
        if found and passes.seconds + _guess(found, width) > (latest if first else until):
            break
        took = passes.run(cache, width)
        for leaf, offset in offsets:
            leaf.offset = offset
        found[width] = min(took, found.get(width, took))
        yield 0.0
    return found


def _guess(found: dict[int, float], width: int) -> float:
    """Seconds that a pass may take: a wider one is cheaper by the token."""
    nearest = min(found, key=lambda known: abs(known - width))
    return found[nearest] * max(1.0, width / nearest / 2)


def _stretch(cache: Cache, length: int) -> Generator[float, None, int]:
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
        mx.eval(leaf.state)
        yield 0.0
    return length
