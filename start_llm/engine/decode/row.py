"""A row: one sequence that decodes, between two steps of whoever decodes it. Knows no MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from start_llm.engine.decode.draft import RowDrafts
from start_llm.kvcache.types import KVReader

Cache = list[Any]  # a row's KV: mlx-lm's cache layers, one row each
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
    """A row between two passes: it begins to decode, or has left its runner in the middle of its answer."""

    cache: Cache  # the same list from first to last; empty layers while the row is in a batch
    tokens: list[int]  # what lies in the KV
    newest: Any  # the token behind them, in no KV yet; in the loop of one row an array of one
    left: int  # tokens that may still be reported, `newest` included
    sampler: Sampler  # or a wrapper with it as `inner`
    processors: Processors = ()  # these, too; they look at the newest token only
    fresh: bool = True  # `newest` ends the prompt, so it is not reported
    drafts: RowDrafts = field(default_factory=RowDrafts)
    # Called when its KV moves into a batch, with what reads it there, and when it is in `cache` again.
    on_move: Callable[[KVReader | None], None] = lambda reader: None
    # (tokens, layers): what the layers that cannot be cut held at landmarks of the answer, see `SingleRow`
    states: list[tuple[int, Cache]] = field(default_factory=list)


@dataclass(slots=True)
class DecodeRow:
    """One row's result of a step. The last one of a row has `finish`, its whole KV, and the tokens in it."""

    uid: int
    token: int  # was fed to the model in this step; the KV holds it
    logprobs: Any = None  # natural, lazy, [vocab]; not of a row that is alone, nor in the first step after `suspend`
    finish: Literal["stop", "length"] | None = None
    cache: Cache | None = None
    tokens: Sequence[int] | None = None
