"""Keeps KV within the machine's memory: what running requests take, the store gives up. Model thread only."""

from __future__ import annotations

from typing import Protocol

from start_llm.core.errors import OutOfMemory

GIB = 2**30
LEAST_STORED = 64 * 2**20


class Stored(Protocol):
    """What the guard needs of the store."""

    def estimate(self, tokens: int) -> int:
        """Bytes of KV of so many tokens; 0 until some were stored."""
        ...

    def set_budget(self, budget_bytes: int) -> None:
        """Evicts down to it."""
        ...


class MemoryGuard:
    """
    Args:
        total: bytes that running and stored KV may take together; 0: no limit.
        most_stored: the store's own budget, which it has while nothing runs.
    """

    def __init__(self, store: Stored, *, total: int, most_stored: int) -> None:
        self._store, self._total, self._most_stored = store, total, most_stored
        self._live: dict[str, int] = {}

    def admits(self, tokens: int) -> bool:
        """Whether a request of so many tokens (prompt and answer) may start beside those that run.

        Raises:
            OutOfMemory: it would not fit even alone.
        """
        need = self._store.estimate(tokens)
        if not self._total or need + sum(self._live.values()) <= self._total:
            return True
        if need > self._total:
            raise OutOfMemory(
                f"This request may need {need / GIB:.1f} GiB of KV for its {tokens} tokens, answer included; "
                f"{self._total / GIB:.1f} GiB are there beside the model. Lower max_tokens, shorten the conversation, "
                "or set KV_BITS."
            )
        return not self._live

    def take(self, key: str, tokens: int) -> None:
        """The request starts: room is made for it."""
        self._live[key] = self._store.estimate(tokens)
        self._apply()

    def give(self, key: str) -> None:
        """The request has ended, however it did. Unknown keys are ignored."""
        if self._live.pop(key, None) is not None:
            self._apply()

    def _apply(self) -> None:
        if self._total:
            left = max(LEAST_STORED, self._total - sum(self._live.values()))
            self._store.set_budget(min(self._most_stored, left))
