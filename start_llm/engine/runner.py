"""What the scheduler needs from a model. `text` implements it on mlx-lm; tests fake it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Cache = list[Any]


@dataclass(slots=True)
class Row:
    """One decoding sequence's result of a step.

    Attributes:
        token: the token that was fed to the model in this step; the KV holds it.
        logprobs: natural-log probabilities over the vocabulary, a lazy array [vocab].
        finish: set on the last row of a sequence; then `cache` and `tokens` hold its whole KV and what lies in it.
    """

    uid: int
    token: int
    logprobs: Any = None
    finish: Literal["stop", "length"] | None = None
    cache: Cache | None = None
    tokens: Sequence[int] | None = None


class Runner(Protocol):
    """Owned by the model thread. Caches are lists of mlx-lm cache layers, one row each."""

    max_rows: int

    def prefill(self, cache: Cache, tokens: Sequence[int]) -> None:
        """Runs `tokens` through the model and evaluates the cache."""
        ...

    def insert(
        self,
        tokens: Sequence[int],
        cache: Cache,
        *,
        max_tokens: int,
        sampler: Callable[[Any], Any],
        processors: Sequence[Callable[[Any, Any], Any]],
    ) -> int:
        """Starts decoding; `cache` holds all of `tokens` but the last. Returns the row's uid."""
        ...

    def decode(self) -> list[Row]:
        """One step of every row; a row that was just inserted may yield its first token a step later."""
        ...

    def remove(self, uid: int) -> tuple[Cache, Sequence[int]] | None:
        """Takes a row out and returns its KV and the tokens in it."""
        ...

    def clear(self) -> None:
        """Drops all rows, in whatever state a failed step has left them."""
        ...

    def close(self) -> None: ...
