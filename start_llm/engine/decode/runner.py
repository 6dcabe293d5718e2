"""What the scheduler needs from a model. `text` implements it on mlx-lm; tests fake it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from start_llm.core.prompt import ImageSpan
from start_llm.engine.decode.draft import RowDrafts

Cache = list[Any]
Sampler = Callable[[Any], Any]
Processors = Sequence[Callable[[Any, Any], Any]]


@dataclass(slots=True)
class DecodeRow:
    """One decoding sequence's result of a step.

    Attributes:
        token: the token that was fed to the model in this step; the KV holds it.
        logprobs: natural-log probabilities over the vocabulary, a lazy array [vocab]; ``None`` in the first step
            after `DecodeRunner.resume`.
        finish: set on the last row of a sequence; then `cache` and `tokens` hold its whole KV and what lies in it.
    """

    uid: int
    token: int
    logprobs: Any = None
    finish: Literal["stop", "length"] | None = None
    cache: Cache | None = None
    tokens: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Suspended:
    """A sequence that left the batch in the middle of its answer.

    Attributes:
        cache: holds exactly `tokens`, evaluated.
        tokens: the prompt and everything that was reported.
        token: drawn behind them. It is in no KV and was not reported: the first row after `resume` does that.
    """

    cache: Cache
    tokens: Sequence[int]
    token: int


class DecodeRunner(Protocol):
    """Owned by the model thread. Caches are lists of mlx-lm cache layers, one row each."""

    max_rows: int

    def sample(self) -> tuple[int, Cache]:
        """A row of a few tokens, and how many, in the form that long rows are held in: what does a token take?"""
        ...

    def prefill(self, cache: Cache, tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> int:
        """Runs `tokens` through the model and evaluates the cache.

        Args:
            images: those among the tokens, each of them whole; their starts count from the first token.

        Returns:
            The most bytes that were allocated meanwhile, less what was allocated before.
        """
        ...

    def insert(
        self,
        tokens: Sequence[int],
        cache: Cache,
        *,
        max_tokens: int,
        sampler: Sampler,
        processors: Processors,
        drafts: RowDrafts | None = None,
    ) -> int:
        """Starts decoding; `cache` holds all of `tokens` but the last. Returns the row's uid.

        A runner that knows no drafts leaves `drafts` alone.
        """
        ...

    def decode(self) -> list[DecodeRow]:
        """One step of every row, which may yield several tokens of it, in order.

        A row that was just inserted may yield its first token a step later.
        """
        ...

    def suspend(self, uid: int) -> Suspended | None:
        """Takes a row out so that `resume` can go on as if nothing had happened.

        Its sampler and processors keep their state and go into `resume` again. ``None``: the row stays where it is,
        because it has not begun or ends with its next token.
        """
        ...

    def resume(
        self,
        row: Suspended,
        *,
        max_tokens: int,
        sampler: Sampler,
        processors: Processors,
        drafts: RowDrafts | None = None,
    ) -> int:
        """Goes on with a suspended row; `max_tokens` counts what it may still report, `row.token` included."""
        ...

    def remove(self, uid: int) -> tuple[Cache, Sequence[int]] | None:
        """Takes a row out and returns its KV and the tokens in it."""
        ...

    def clear(self) -> None:
        """Drops all rows, in whatever state a failed step has left them."""
        ...

    def close(self) -> None: ...
