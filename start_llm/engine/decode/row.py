"""A row: one sequence that decodes, between two steps of whoever decodes it. Knows no MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from start_llm.engine.decode.draft import RowDrafts

Cache = list[Any]
"""A row's KV: mlx-lm's cache layers, one row each."""
Sampler = Callable[[Any], Any]
Processors = Sequence[Callable[[Any, Any], Any]]


class Remembering:
    """A sampler or processor that can be put back; all others give the same for the same input.

    Its attributes are replaced by its calls, never changed in place.
    """

    def save(self) -> Any:
        """Its state; later calls do not change what was returned."""
        return self.__dict__.copy()

    def restore(self, state: Any) -> None:
        self.__dict__.update(state)


@dataclass(slots=True)
class RowState:
    """A row between two passes: it begins to decode, or has left its runner in the middle of its answer.

    Attributes:
        tokens: what lies in the KV.
        newest: the token behind them, which is in no KV yet. In the loop of one row it is an array of one.
        left: tokens that may still be reported, `newest` included.
        fresh: `newest` ends the prompt, so it is not reported.
        sampler, processors: what draws the row's tokens, or a wrapper with it as `inner`. Processors look at the
            newest token only.
    """

    cache: Cache
    tokens: list[int]
    newest: Any
    left: int
    sampler: Sampler
    processors: Processors = ()
    fresh: bool = True
    drafts: RowDrafts = field(default_factory=RowDrafts)


@dataclass(slots=True)
class DecodeRow:
    """One row's result of a step.

    Attributes:
        token: the token that was fed to the model in this step; the KV holds it.
        logprobs: natural-log probabilities over the vocabulary, a lazy array [vocab]; ``None`` where drafts may be, and
            in the first step of a row that goes on.
        finish: set on the last result of a row; then `cache` and `tokens` hold its whole KV and what lies in it.
    """

    uid: int
    token: int
    logprobs: Any = None
    finish: Literal["stop", "length"] | None = None
    cache: Cache | None = None
    tokens: Sequence[int] | None = None
