"""Which loop decodes: a row that is alone verifies drafts, several rows are decoded in a batch. Model thread only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.core.prompt import ImageSpan
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.rewind import leaves
from start_llm.engine.decode.runner import Cache, DecodeRow, DecodeRunner, Processors, Sampler, Suspended
from start_llm.engine.decode.text import eval_cache
from start_llm.engine.decode.verify import KVQuantisation, RowState, SingleRow

_CLEAR_EVERY = 512  # steps after which memory that MLX keeps for later use is given back, as `BatchGenerator` does it


@dataclass(slots=True)
class _Row:
    """A row and where it is.

    Attributes:
        place: between two loops (`RowState`), alone (`SingleRow`), or in the batch (its uid there).
        left: tokens that it may still report; only kept up to date while it is in the batch.
    """

    uid: int
    sampler: Sampler
    processors: Processors
    drafts: RowDrafts
    place: RowState | SingleRow | int = -1
    left: int = 0


class AloneRunner:
    """Implements `DecodeRunner` on another one, which gets the rows that are not alone.

    A row that is alone is decoded on the very cache that it came with. If another one comes, both go into the batch;
    if the last but one leaves, the row that stays comes back. A row changes over between two of its tokens.

    Attributes:
        batch: decodes several rows.

    Args:
        gate: decides about drafts, and learns what passes cost; ``None``: there are no drafts.
        quantisation: of a row's KV, as it grows.
        batches: several rows are decoded together; else each by itself, one after the other.
    """

    def __init__(
        self,
        model: Any,
        batch: DecodeRunner,
        *,
        eos: Iterable[int],
        gate: DraftGate | None = None,
        quantisation: KVQuantisation | None = None,
        batches: bool = True,
    ) -> None:
        self.max_rows = batch.max_rows
        self.batch = batch
        self._model, self._eos, self._gate, self._quantisation = model, frozenset(eos), gate, quantisation
        self._rows: dict[int, _Row] = {}
        self._batches = batches
        self._uid = self._steps = 0

    def sample(self) -> tuple[int, Cache]:
        return self.batch.sample()

    def prefill(self, cache: Cache, tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> int:
        held, began = _held(cache), time.perf_counter()
        taken = self.batch.prefill(cache, tokens, images)
        if self._gate is not None and not images:
            # A chunk is a wide pass for nothing. Its tokens see half of the chunk, on average.
            self._gate.costs.observe(len(tokens), held + len(tokens) // 2, time.perf_counter() - began)
        return taken

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
        row = self._add(sampler, processors, drafts)
        row.place = RowState(cache, list(tokens[:-1]), tokens[-1], max_tokens, sampler, processors, drafts=row.drafts)
        return row.uid

    def resume(
        self,
        row: Suspended,
        *,
        max_tokens: int,
        sampler: Sampler,
        processors: Processors,
        drafts: RowDrafts | None = None,
    ) -> int:
        added = self._add(sampler, processors, drafts)
        added.place = _resumed(row, added, max_tokens)
        return added.uid

    def decode(self) -> list[DecodeRow]:
        if not self._rows:
            return []
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()
        if len(self._rows) > 1 and self._batches:
            results = self._several()
        else:
            results = [result for row in self._rows.values() for result in self._alone(row)]
        for result in results:
            if result.finish is not None:
                del self._rows[result.uid]
        return results

    def suspend(self, uid: int) -> Suspended | None:
        row = self._rows.get(uid)
        if row is None:
            return None
        suspended = self.batch.suspend(row.place) if isinstance(row.place, int) else self._taken_out(row.place)
        if suspended is not None:
            del self._rows[uid]
        return suspended

    def remove(self, uid: int) -> tuple[Cache, Sequence[int]] | None:
        row = self._rows.pop(uid, None)
        if row is None:
            return None
        if isinstance(row.place, int):
            return self.batch.remove(row.place)
        state = _left(row.place)
        return state.cache, state.tokens

    def clear(self) -> None:
        self._rows.clear()
        self.batch.clear()

    def close(self) -> None:
        self._rows.clear()
        self.batch.close()

    def _add(self, sampler: Sampler, processors: Processors, drafts: RowDrafts | None) -> _Row:
        self._uid += 1
        self._rows[self._uid] = row = _Row(self._uid, sampler, processors, drafts or RowDrafts())
        return row

    def _alone(self, row: _Row) -> list[DecodeRow]:
        if isinstance(row.place, int):
            suspended = self.batch.suspend(row.place)
            if suspended is None:  # it has not begun there, or ends with its next token
                return self._batched()
            row.place = _resumed(suspended, row, row.left)
        find_drafter = row.drafts.drafter
        with mx.stream(generation_stream):
            if isinstance(row.place, RowState):
                gate = None if find_drafter is None else self._gate
                row.place = SingleRow(
                    row.uid, self._model, row.place, eos=self._eos, gate=gate, quantisation=self._quantisation
                )
            drafter = None if find_drafter is None else find_drafter()
            if drafter is not None:
                row.place.offer(drafter)
            return row.place.step()

    def _several(self) -> list[DecodeRow]:
        results = []
        for row in self._rows.values():
            if not isinstance(row.place, int):
                results += self._join(row, row.place)
        return results + self._batched()

    def _join(self, row: _Row, place: RowState | SingleRow) -> list[DecodeRow]:
        """Puts a row into the batch, unless it ends with its next token."""
        suspended = self._taken_out(place)
        state = place.state if isinstance(place, SingleRow) else place
        row.left = state.left
        how: dict[str, Any] = {"max_tokens": state.left, "sampler": row.sampler, "processors": row.processors}
        if suspended is not None:
            row.place = self.batch.resume(suspended, **how)
        elif state.fresh:
            row.place = self.batch.insert([*state.tokens, _token(state)], state.cache, **how)
        else:
            return self._alone(row)
        return []

    def _batched(self) -> list[DecodeRow]:
        rows = {row.place: row for row in self._rows.values() if isinstance(row.place, int)}
        results = self.batch.decode() if rows else []
        for result in results:
            row = rows[result.uid]
            row.drafts.counts.forwards += 1
            row.left -= 1
            result.uid = row.uid
        return results

    def _taken_out(self, place: RowState | SingleRow) -> Suspended | None:
        """The row as it leaves its own loop; ``None`` if it has not begun or ends with its next token."""
        state = _left(place) if isinstance(place, SingleRow) else place
        if state.fresh:
            return None
        token = _token(state)
        return None if token in self._eos or state.left <= 1 else Suspended(state.cache, state.tokens, token)


def _left(place: RowState | SingleRow) -> RowState:
    """The row outside of its loop, with its KV evaluated."""
    with mx.stream(generation_stream):
        state = place.leave() if isinstance(place, SingleRow) else place
        eval_cache(state.cache)
    return state


def _token(state: RowState) -> int:
    return state.newest if isinstance(state.newest, int) else int(state.newest.item())


def _resumed(row: Suspended, entry: _Row, left: int) -> RowState:
    return RowState(
        row.cache,
        list(row.tokens),
        row.token,
        left,
        entry.sampler,
        entry.processors,
        fresh=False,
        drafts=entry.drafts,
    )


def _held(cache: Cache) -> int:
    """Tokens in a row's KV, as far as a layer counts them."""
    return max((leaf.offset for leaf in leaves(cache) if hasattr(leaf, "offset")), default=0)
