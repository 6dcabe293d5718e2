"""Keeps KV within the machine's memory: what running requests take, the store gives up. Model thread only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from start_llm.core.errors import OutOfMemory

GIB = 2**30
LEAST_STORED = 64 * 2**20


class Stored(Protocol):
    """What the guard needs of the store."""

    def estimate(self, tokens: int) -> int:
        """Bytes of KV of so many tokens; 0 while that is unknown."""
        ...

    def set_budget(self, budget_bytes: int) -> None:
        """Evicts down to it."""
        ...


class MemoryGuard:
    """Counts in tokens; bytes follow from what the store has measured, so that a better estimate counts at once.

    Rows that decode together are padded to the longest: each is counted with the length of that one.

    Args:
        total: bytes that running and stored KV may take together; 0: no limit.
        most_stored: the store's own budget, which it has while nothing runs.
    """

    def __init__(self, store: Stored, *, total: int, most_stored: int) -> None:
        self._store, self._total, self._most_stored = store, total, most_stored
        self._held: dict[str, int] = {}

    @property
    def over(self) -> bool:
        """What runs takes more than there is."""
        return bool(self._total) and self._bytes(self._held.values()) > self._total

    def admits(self, tokens: int) -> bool:
        """Whether a row of so many tokens fits beside those that run; one alone always does, see `check`."""
        return not self._held or not self._total or self._bytes((*self._held.values(), tokens)) <= self._total

    def check(self, tokens: int) -> None:
        """Raises OutOfMemory if a row of so many tokens can never fit."""
        need = self._store.estimate(tokens)
        if self._total and need > self._total:
            raise OutOfMemory(
                f"This request needs {need / GIB:.1f} GiB of KV for {tokens} tokens; "
                f"{self._total / GIB:.1f} GiB are there beside the model. Shorten the conversation, or set KV_BITS."
            )

    def most_tokens(self) -> int | None:
        """The longest row that fits alone; ``None``: there is no limit, or nobody knows."""
        state = self._store.estimate(0)
        a_million = self._store.estimate(2**20) - state
        return max(0, (self._total - state) * 2**20 // a_million) if self._total and a_million else None

    def take(self, key: str, tokens: int) -> None:
        """The request holds, or is going to hold, so many tokens: the store makes room for it."""
        if self._held.get(key) != tokens:
            self._held[key] = tokens
            self._apply()

    def holds(self, key: str) -> int:
        """What `take` said last; 0 for a request that does not run."""
        return self._held.get(key, 0)

    def give(self, key: str) -> None:
        """The request does not run any more. Unknown keys are ignored."""
        if self._held.pop(key, None) is not None:
            self._apply()

    def _bytes(self, held: Iterable[int]) -> int:
        rows = list(held)
        return len(rows) * self._store.estimate(max(rows)) if rows else 0

    def _apply(self) -> None:
        if self._total:
            left = max(LEAST_STORED, self._total - self._bytes(self._held.values()))
            self._store.set_budget(min(self._most_stored, left))
