"""Which loop decodes: a row that is alone verifies drafts, several rows are decoded in a batch. Model thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.core.vision import ImageSpan
from start_llm.engine.decode.costs import DraftGate
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.runner import Cache, DecodeRow, DecodeRunner, Processors, Sampler, Suspended
from start_llm.engine.decode.text import eval_cache
from start_llm.engine.decode.verify import RowState, SingleRow

_CLEAR_EVERY = 512  # steps after which memory that MLX keeps for later use is given back, as `BatchGenerator` does it


@dataclass(slots=True)
class _Entry:
    """A row. It waits (`state`), is alone (`single`), or is in the batch (`batched`, its uid there).

    Attributes:
        left: tokens that it may still report; only kept up to date while it is in the batch.
    """

    uid: int
    sampler: Sampler
    processors: Processors
    drafts: RowDrafts
    state: RowState | None = None
    single: SingleRow | None = None
    batched: int | None = None
    left: int = 0


class AloneRunner:
    """Implements `DecodeRunner` on another one, which gets the rows that are not alone.

    A row that is alone is decoded on the very cache that it came with. If another one comes, both go into the batch;
    if the last but one leaves, the row that stays comes back. A row changes over between two of its tokens.

    Attributes:
        batch: decodes several rows.

    Args:
        gate: decides about drafts; ``None``: there are none.
        quantise: is called with a cache after each pass, and acts from `quantised_from` tokens on.
    """

    def __init__(
        self,
        model: Any,
        batch: DecodeRunner,
        *,
        eos: Iterable[int],
        gate: DraftGate | None = None,
        quantise: Callable[[Cache], object] | None = None,
        quantised_from: int = 0,
    ) -> None:
        self.max_rows = batch.max_rows
        self.batch = batch
        self._model, self._eos, self._gate = model, frozenset(eos), gate
        self._quantise, self._quantised_from = quantise, quantised_from
        self._entries: dict[int, _Entry] = {}
        self._uid = self._steps = 0

    def sample(self) -> tuple[int, Cache]:
        return self.batch.sample()

    def prefill(self, cache: Cache, tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> int:
        return self.batch.prefill(cache, tokens, images)

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
        entry = self._enter(sampler, processors, drafts)
        state = RowState(cache, list(tokens[:-1]), tokens[-1], max_tokens, sampler, processors)
        entry.state = self._counted(state, entry)
        return entry.uid

    def resume(
        self,
        row: Suspended,
        *,
        max_tokens: int,
        sampler: Sampler,
        processors: Processors,
        drafts: RowDrafts | None = None,
    ) -> int:
        entry = self._enter(sampler, processors, drafts)
        entry.state = self._suspended(row, max_tokens, entry)
        return entry.uid

    def decode(self) -> list[DecodeRow]:
        if not self._entries:
            return []
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()
        first = next(iter(self._entries.values()))
        rows = self._several() if len(self._entries) > 1 else self._alone(first)
        for row in rows:
            if row.finish is not None:
                del self._entries[row.uid]
        return rows

    def suspend(self, uid: int) -> Suspended | None:
        entry = self._entries.get(uid)
        if entry is None:
            return None
        if entry.batched is not None:
            row = self.batch.suspend(entry.batched)
        else:
            row = self._out(entry)
        if row is not None:
            del self._entries[uid]
        return row

    def remove(self, uid: int) -> tuple[Cache, Sequence[int]] | None:
        entry = self._entries.pop(uid, None)
        if entry is None:
            return None
        if entry.batched is not None:
            return self.batch.remove(entry.batched)
        with mx.stream(generation_stream):
            state = entry.single.leave() if entry.single is not None else cast(RowState, entry.state)
            eval_cache(state.cache)
        return state.cache, state.tokens

    def clear(self) -> None:
        self._entries.clear()
        self.batch.clear()

    def close(self) -> None:
        self._entries.clear()
        self.batch.close()

    def _enter(self, sampler: Sampler, processors: Processors, drafts: RowDrafts | None) -> _Entry:
        self._uid += 1
        self._entries[self._uid] = entry = _Entry(self._uid, sampler, processors, drafts or RowDrafts())
        return entry

    # --- alone ------------------------------------------------------------------

    def _alone(self, entry: _Entry) -> list[DecodeRow]:
        if entry.batched is not None:
            row = self.batch.suspend(entry.batched)
            if row is None:  # it has not begun there, or ends with its next token
                return self._batched()
            entry.batched, entry.state = None, self._suspended(row, entry.left, entry)
        with mx.stream(generation_stream):
            if entry.single is None:
                entry.single, entry.state = self._single(entry, cast(RowState, entry.state)), None
            drafter = entry.drafts.drafter() if entry.drafts.drafter is not None else None
            if drafter is not None:
                entry.single.offer(drafter)
            return entry.single.step()

    def _single(self, entry: _Entry, state: RowState) -> SingleRow:
        return SingleRow(
            entry.uid,
            self._model,
            state,
            eos=self._eos,
            gate=self._gate if entry.drafts.drafter is not None else None,
            quantise=self._quantise,
            quantised_from=self._quantised_from,
        )

    def _suspended(self, row: Suspended, left: int, entry: _Entry) -> RowState:
        tokens = list(row.tokens)
        state = RowState(row.cache, tokens, row.token, left, entry.sampler, entry.processors, fresh=False)
        return self._counted(state, entry)

    @staticmethod
    def _counted(state: RowState, entry: _Entry) -> RowState:
        state.counts = entry.drafts.counts
        return state

    def _out(self, entry: _Entry) -> Suspended | None:
        """The row as it leaves its own loop; ``None`` if it has not begun or ends with its next token."""
        if entry.single is None:
            state = cast(RowState, entry.state)
        else:
            with mx.stream(generation_stream):
                state = entry.single.leave()
                eval_cache(state.cache)
        if state.fresh:
            return None
        token = state.newest if isinstance(state.newest, int) else cast(int, state.newest.item())
        return None if token in self._eos or state.left <= 1 else Suspended(state.cache, state.tokens, token)

    # --- several ----------------------------------------------------------------

    def _several(self) -> list[DecodeRow]:
        rows = []
        for entry in self._entries.values():
            if entry.batched is None:
                rows += self._join(entry)
        return rows + self._batched()

    def _join(self, entry: _Entry) -> list[DecodeRow]:
        """Puts a row into the batch, unless it ends with its next token."""
        row = self._out(entry)
        state = entry.single.state if entry.single is not None else cast(RowState, entry.state)
        entry.left = state.left
        if row is not None:
            entry.batched = self.batch.resume(
                row, max_tokens=state.left, sampler=entry.sampler, processors=entry.processors
            )
        elif state.fresh:
            tokens = [*state.tokens, cast(int, state.newest)]
            entry.batched = self.batch.insert(
                tokens, state.cache, max_tokens=state.left, sampler=entry.sampler, processors=entry.processors
            )
        else:
            return self._alone(entry)
        entry.state = entry.single = None
        return []

    def _batched(self) -> list[DecodeRow]:
        entries = {entry.batched: entry for entry in self._entries.values() if entry.batched is not None}
        rows = self.batch.decode() if entries else []
        for row in rows:
            entry = entries[row.uid]
            entry.drafts.counts.forwards += 1
            entry.left -= 1
            row.uid = entry.uid
        return rows
