"""Takes the newest tokens out of a row's caches again. Model thread only.

How depends on the layer. Uses of mlx-lm's internals: `RotatingKVCache._idx`, `ArraysCache.cache`.

- `KVCache`, `QuantizedKVCache`: rows behind the offset are simply overwritten.
- `RotatingKVCache`: after a pass over several tokens its buffer is in order and still holds what those tokens pushed
  out of the window, so its end is cut off and what is left is what a shorter pass would have left.
- `HiddenTail`: what a pass has left there is cut, or put back.
- `ArraysCache`: cannot be cut. Its arrays are replaced by each pass and never written into, so the state before the
  pass is kept by reference and put back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from start_llm.engine.decode.head import HiddenTail
from start_llm.kvcache.layers import leaves

Mark = list[tuple[Any, tuple[Any, ...]]]


class Rewinder:
    """For the caches of one row, whichever objects they are at the moment.

    `possible`: every layer is of a kind that is known here. `carries`: a layer cannot be cut: `restore` takes the whole
    pass back.
    """

    def __init__(self, cache: Sequence[Any]) -> None:
        found = list(leaves(cache))
        known = (KVCache, QuantizedKVCache, RotatingKVCache)
        self.possible = all(type(leaf) in known or isinstance(leaf, ArraysCache) for leaf in found)
        self.carries = any(isinstance(leaf, ArraysCache) and not isinstance(leaf, HiddenTail) for leaf in found)
        self._cache = cache

    def mark(self) -> Mark:
        """To be called before a pass over several tokens, and given to `restore` if it has to be taken back."""
        if not self.carries:
            return []
        kept: Mark = []
        for leaf in leaves(self._cache):
            if isinstance(leaf, ArraysCache):
                kept.append((leaf, tuple(leaf.cache)))
            elif isinstance(leaf, RotatingKVCache):
                kept.append((leaf, (leaf.keys, leaf.values, leaf.offset, leaf._idx)))
        return kept

    def states(self) -> list[Any] | None:
        """The layers with the states that they hold now and without rows; later passes do not change them. ``None``: no
        layer has one, or one is written in place."""
        if not self.carries or any(isinstance(leaf, RotatingKVCache) for leaf in leaves(self._cache)):
            return None
        found: list[Any] = []
        for leaf in leaves(self._cache):
            kept = copy.copy(leaf) if isinstance(leaf, ArraysCache) else KVCache()
            if isinstance(leaf, ArraysCache):
                kept.cache = list(leaf.cache)
            found.append(kept)
        return found

    def cut(self, tokens: int) -> None:
        """Takes out the last tokens of the newest pass, which computed more than these. Not for layers that carry."""
        for leaf in leaves(self._cache):
            if isinstance(leaf, RotatingKVCache):
                held = leaf.keys.shape[2] - tokens
                leaf.keys, leaf.values = leaf.keys[..., :held, :], leaf.values[..., :held, :]
                leaf.offset -= tokens
                leaf._idx = held
            elif isinstance(leaf, HiddenTail):
                leaf.cut(tokens)
            else:
                leaf.trim(tokens)

    def restore(self, mark: Mark, tokens: int) -> None:
        """Takes out the whole newest pass, which computed so many tokens, two at least."""
        for leaf in leaves(self._cache):
            if isinstance(leaf, KVCache | QuantizedKVCache):
                leaf.trim(tokens)
        for leaf, state in mark:
            if isinstance(leaf, ArraysCache):
                leaf.cache = list(state)
            else:
                leaf.keys, leaf.values, leaf.offset, leaf._idx = state
