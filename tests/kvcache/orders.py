"""Requests in a random order on a store: they begin, go on, are read beside each other and end, and calls fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore
from start_llm.kvcache.types import StoredEnd

CALLS = (
    *("slice", "checkpoint", "part", "parts", "build", "adopt", "take_buffers", "make_room", "buffers", "unpack"),
    *("packed", "packed_rows"),
)
"""Of the layer kit, below the store."""


class Fault(Exception):
    """What one of these calls raises."""


class Requests:
    """
    Attributes:
        rows: tokens and caches of the requests that run.
        said: what was stored once.
        restored: how many tokens came from stored KV.
    """

    store: KVStore

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows: list[tuple[list[int], list[Any]]] = []
        self.said: list[list[int]] = []
        self.restored = 0
        self.raise_in = -1  # calls until one raises

    # --- what the caches are: for whoever derives ----------------------------------------

    def fresh(self) -> list[Any]:
        raise NotImplementedError

    def read(self, cache: list[Any]) -> list[int]:
        """The tokens that it is of."""
        raise NotImplementedError

    def feed(self, cache: list[Any], new: list[int]) -> None:
        """A pass over these tokens."""
        raise NotImplementedError

    # --- what may happen --------------------------------------------------------------------

    def failing(self, kit: LayerKit) -> LayerKit:
        for name in CALLS:
            setattr(kit, name, self._wrapped(name, getattr(kit, name)))
        return kit

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.raise_in -= 1
            if self.raise_in == 0:
                raise Fault(name)
            return method(*args, **kwargs)

        return call

    def text(self, most: int) -> list[int]:
        return [self.random.randint(1, 2) for _ in range(self.random.randint(1, most))]

    def begin(self) -> None:
        """A request that goes on from another one, or leaves it anywhere, or is new."""
        tokens = self.text(40)
        known = [*self.said[-8:], *(running for running, _ in self.rows)]
        if known and self.random.random() < 0.7:
            base = self.random.choice(known)
            tokens = base[: self.random.choice([len(base), self.random.randint(0, len(base))])] + tokens
        try:
            cache = self.store.restore(tokens, self.store.lookup(tokens)).cache
        except Fault:
            cache = self.fresh()
        held = self.read(cache)
        assert held == tokens[: len(held)]
        self.restored += len(held)
        if len(held) < len(tokens):
            self.feed(cache, tokens[len(held) :])
        self.rows.append((tokens, cache))

    def put(self) -> None:
        tokens, cache = self.random.choice(self.rows)
        about = StoredEnd(session=str(len(tokens) % 3), checkpoint=self.random.random() < 0.7)
        self.store.put(list(tokens), cache, about)
        self.said.append(list(tokens))

    def look(self) -> None:
        tokens = list(self.random.choice(self.rows)[0]) if self.rows else self.text(30)
        got = self.store.restore(tokens, self.store.lookup(tokens, self.random.randint(0, len(tokens))))
        assert self.read(got.cache) == tokens[: got.length]
        self.store.take_back(got.cache)

    def end(self) -> None:
        tokens, cache = self.rows.pop(self.random.randrange(len(self.rows)))
        try:
            if self.random.random() < 0.6:  # else it was cancelled
                self.store.put(list(tokens), cache)
                self.said.append(list(tokens))
        finally:
            self.store.take_back(cache, valid=self.random.random() < 0.9)

    def step(self, kinds: list[Callable[[], None]], faults: float) -> None:
        """One of these, in which a call fails in so many of all cases."""
        if self.random.random() < faults:
            self.raise_in = self.random.randint(1, 12)
        with suppress(Fault):
            self.random.choice([self.end] if len(self.rows) > 3 else kinds)()
        self.raise_in = -1
