"""Takes the newest tokens out of a row's caches again. Model thread only.

How depends on what the layer holds (`kvcache.kinds`). Columns: rows behind the offset are overwritten. A window: its
buffer still holds what the pass pushed out, so its end is cut off. Any other state cannot be cut: what a pass changes
is kept by reference before it, and put back. Uses of mlx-lm's internals: `RotatingKVCache._idx`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache

from start_llm.engine.decode.head import HiddenTail
from start_llm.kvcache.kinds import kind_of, leaves

SavedStates = list[tuple[Any, dict[str, Any]]]


class Rewinder:
    """For the caches of one row, whichever objects they are at the moment.

    `possible`: every layer is of a kind that is known. `carries`: a layer cannot be cut: `restore` takes the whole pass
    back.
    """

    def __init__(self, cache: Sequence[Any]) -> None:
        self.possible = all(kind_of(leaf).described for leaf in leaves(cache))
        states = [leaf for leaf in leaves(cache) if kind_of(leaf).state and not kind_of(leaf).windowed]
        self.carries = not all(isinstance(leaf, HiddenTail) for leaf in states)
        self._cache = cache

    def save(self) -> SavedStates:
        """To be called before a pass over several tokens, and given to `restore` if it has to be taken back."""
        with_state = [leaf for leaf in leaves(self._cache) if kind_of(leaf).state]
        return [(leaf, kind_of(leaf).kept(leaf)) for leaf in with_state] if self.carries else []

    def states(self) -> list[Any] | None:
        """The layers with the states that they hold now and without rows; later passes do not change them. ``None``: no
        layer has one, or one is written in place."""
        found = list(leaves(self._cache))
        if not self.carries or any(kind_of(leaf).state and not isinstance(leaf, ArraysCache) for leaf in found):
            return None
        return [_state_alone(leaf) for leaf in found]

    def cut(self, tokens: int) -> None:
        """Takes out the last tokens of the newest pass, which computed more than these. Not for layers that carry."""
        for leaf in leaves(self._cache):
            if kind_of(leaf).windowed:
                held = leaf.keys.shape[2] - tokens
                leaf.keys, leaf.values = leaf.keys[..., :held, :], leaf.values[..., :held, :]
                leaf.offset -= tokens
                leaf._idx = held
            elif isinstance(leaf, HiddenTail):
                leaf.cut(tokens)
            else:
                leaf.trim(tokens)

    def restore(self, saved: SavedStates, tokens: int) -> None:
        """Takes out the whole newest pass, which computed so many tokens, two at least."""
        for leaf in leaves(self._cache):
            if not kind_of(leaf).state:
                leaf.trim(tokens)
        for leaf, kept in saved:
            kind_of(leaf).put_back(leaf, kept)


def _state_alone(leaf: Any) -> Any:
    """A layer with the state of this one and no rows."""
    made = copy.copy(leaf)
    if kind_of(leaf).state:
        kind_of(leaf).put_back(made, kind_of(leaf).kept(leaf))
    else:
        kind_of(leaf).clear(made)
    return made
