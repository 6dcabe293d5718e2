"""What the scheduler asks of a model: prefill and decode. Model thread only.

A row that is alone is decoded by `SingleRow`, on the very cache that it came with, and verifies drafts. Several rows
are decoded in a batch; two to four of them verify drafts there, too (`together`). If a second row comes, both go into
the batch; if the last but one leaves, the row that stays comes back. With quantised KV there are two batches: of rows
that are still plain, and of those that are quantised. A row changes over between two of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.prompt import ImageSpan
from start_llm.engine.decode.batch import BatchRunner, eval_cache
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.gate import DraftGate
from start_llm.engine.decode.row import Cache, DecodeRow, RowState
from start_llm.engine.decode.together import verify_together
from start_llm.engine.decode.verify import PAUSE, SingleRow
from start_llm.engine.ranks.interface import Ranks

if TYPE_CHECKING:  # takes seconds to import, and few need it
    from start_llm.engine.decode.quantised import Quantisation

_CLEAR_EVERY = 512  # steps after which memory that MLX keeps for later use is given back, as `BatchGenerator` does it


@dataclass(slots=True)
class _InBatch:
    """Where a row of a batch is: its uid there, and the tokens in its KV."""

    batch: BatchRunner
    uid: int
    length: int


@dataclass(slots=True)
class _Row:
    """A row, and where it is: between two loops, alone, or in a batch."""

    uid: int
    drafts: RowDrafts
    place: RowState | SingleRow | _InBatch


def _of_all_ranks[**P, T](method: Callable[Concatenate[ModelRunner, P], T]) -> Callable[Concatenate[ModelRunner, P], T]:
    """The same method; what it raises ends all ranks, where there are several (`Ranks.passing`)."""

    @wraps(method)
    def passing(self: ModelRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._ranks.passing():
            return method(self, *args, **kwargs)

    return passing


class ModelRunner:
    """
    Args:
        gate: decides about drafts, and learns what passes cost; ``None``: there are no drafts.
        quantisation: of a row's KV, as it grows.
        batches: several rows are decoded together; else each by itself, one after the other.
        landmarks: see `SingleRow`. A row in a batch keeps no states.
        call_openers: the tokens that begin a call; none: it cannot be told by tokens.
        ranks: that compute the model together; an error of one ends all of them. ``None``: this process alone.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos: Iterable[int],
        max_rows: int,
        gate: DraftGate | None = None,
        quantisation: Quantisation | None = None,
        batches: bool = True,
        landmarks: Iterable[int] = (),
        call_openers: Iterable[int] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self.max_rows = max_rows
        self._model, self._eos, self._gate, self._quantisation = model, frozenset(eos), gate, quantisation
        self._together, self._landmarks, self._ranks = batches, frozenset(landmarks), ranks or Ranks()
        self._call_openers = frozenset(call_openers)
        self._clock = time.perf_counter if gate is None else gate.clock
        kinds = 1 if quantisation is None else 2  # of KV: plain, quantised
        self._batches = [BatchRunner(model, eos=self._eos, max_rows=max_rows) for _ in range(kinds)]
        self._rows: dict[int, _Row] = {}
        self._uid = self._steps = 0
        self._batch_step = 0.0  # when the last one without drafts was over

    @_of_all_ranks
    def sample(self) -> tuple[int, Cache]:
        """A row of a few tokens, and how many, in the form that long rows are held in: what does a token take?"""
        tokens, cache = (0, 0), make_prompt_cache(self._model)
        self._batches[0].prefill(cache, tokens)
        if self._quantisation is not None:
            self._quantisation.apply(cache, start=0)
            eval_cache(cache)
        return len(tokens), cache

    @_of_all_ranks
    def prefill(self, cache: Cache, tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> int:
        """Runs `tokens` through the model and evaluates the cache.

        Returns the most bytes that were allocated meanwhile, less what was allocated before. `images`: those among the
        tokens, each of them whole; their starts count from the first token.
        """
        taken = self._batches[0].prefill(cache, tokens, images)
        if self._quantisation is not None and self._quantisation.apply(cache):
            eval_cache(cache)
            mx.clear_cache()
        return int(self._ranks.agree(taken))

    def calls(self, answer: Sequence[int]) -> bool | None:
        """Whether there is a call in the answer; ``None``: that cannot be told by its tokens."""
        return not self._call_openers.isdisjoint(answer) if self._call_openers else None

    def insert(self, row: RowState) -> int:
        """Begins, or goes on, to decode a row, which belongs to the runner then. Returns its uid."""
        self._uid += 1
        self._rows[self._uid] = _Row(self._uid, row.drafts, row)
        return self._uid

    @_of_all_ranks
    def decode(self) -> list[DecodeRow]:
        """One step of every row, called by `Rows.step`; it may yield several tokens of a row, in order. A row that was
        just inserted may yield its first token a step later."""
        if not self._rows:
            return []
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()
        if len(self._rows) > 1 and self._together:
            waiting = [row for row in self._rows.values() if not isinstance(row.place, _InBatch)]
            results = [result for row in waiting for result in self._join(row)] + self._decode_batches()
        else:
            results = [result for row in self._rows.values() for result in self._alone(row)]
        for result in results:
            if result.finish is not None:
                del self._rows[result.uid]
        return results

    @_of_all_ranks
    def suspend(self, uid: int) -> RowState | None:
        """Takes a row out so that `insert` can go on as if nothing had happened.

        Its sampler and processors keep their state. ``None``: the row stays where it is, because it has not begun or
        ends with its next token.
        """
        row = self._rows.get(uid)
        if row is None:
            return None
        state = row.place.batch.suspend(row.place.uid) if isinstance(row.place, _InBatch) else _left(row)
        if state is None or state.fresh or self._ends(state):
            return None
        del self._rows[uid]
        return state

    @_of_all_ranks
    def remove(self, uid: int) -> tuple[Cache, Sequence[int]] | None:
        """Takes a row out and returns its KV and the tokens in it."""
        row = self._rows.pop(uid, None)
        if row is None:
            return None
        if isinstance(row.place, _InBatch):
            return row.place.batch.remove(row.place.uid)
        state = _left(row)
        return state.cache, state.tokens

    def clear(self) -> None:
        """Drops all rows, in whatever state a failed step has left them."""
        self._rows.clear()
        for batch in self._batches:
            batch.clear()

    def close(self) -> None:
        self._rows.clear()
        for batch in self._batches:
            batch.close()

    def _alone(self, row: _Row) -> list[DecodeRow]:
        """A step of a row by itself. Of a row that cannot leave its batch yet, a step of the batches."""
        if isinstance(row.place, _InBatch):
            state = row.place.batch.suspend(row.place.uid)
            if state is None:  # it has not begun there, or ends with its next token
                return self._decode_batches()
            row.place = state
        with mx.stream(generation_stream):
            if isinstance(row.place, RowState):
                gate = None if row.drafts.find_drafter is None else self._gate
                row.place = SingleRow(
                    row.uid,
                    self._model,
                    row.place,
                    eos=self._eos,
                    gate=gate,
                    quantisation=self._quantisation,
                    landmarks=self._landmarks,
                )
            find = None if row.place.text is not None else row.drafts.find_drafter
            if find is not None and (drafter := find()) is not None:
                row.place.offer(drafter)
            return row.place.step()

    def _join(self, row: _Row) -> list[DecodeRow]:
        """Puts a row into its batch, unless it ends with its next token."""
        state = _left(row)
        if not state.fresh and self._ends(state):
            return self._alone(row)
        row.place = self._in_batch(state)
        return []

    def _in_batch(self, state: RowState) -> _InBatch:
        """Puts a row into a batch: that of plain KV or that of quantised KV."""
        batch, quantisation = self._batches[0], self._quantisation
        if quantisation is not None:
            if not state.fresh:  # else a pass comes first, as it does alone
                quantisation.apply(state.cache)
            if quantisation.holds(state.cache):
                batch, state.cache = self._batches[1], quantisation.batchable(state.cache)
        length = len(state.tokens) + state.fresh
        return _InBatch(batch, batch.insert(state), length)

    def _decode_batches(self) -> list[DecodeRow]:
        """One pass of each batch; with drafts where they pay, and never for rows whose KV is to be quantised."""
        results = []
        for batch in self._batches:
            places = [(row, row.place) for row in self._rows.values() if isinstance(row.place, _InBatch)]
            there = {place.uid: (row, place) for row, place in places if place.batch is batch}
            drafted = None
            if self._gate is not None and self._quantisation is None:
                drafted = verify_together(self._gate, batch, {uid: row.drafts for uid, (row, _) in there.items()})
            for result in drafted or (self._timed(batch, there) if there else ()):
                row, place = there[result.uid]
                row.drafts.counts.forwards += drafted is None
                place.length += 1
                result.uid = row.uid
                results.append(result)
        if self._quantisation is not None:
            self._change_over(self._quantisation.start)
        return results

    def _timed(self, batch: BatchRunner, there: dict[int, tuple[_Row, _InBatch]]) -> list[DecodeRow]:
        """A step of a batch. It waits for the pass that the step before it began, so it takes as long as a pass."""
        began, since = self._clock(), self._batch_step
        results = batch.decode()
        now = self._batch_step = self._clock()
        if self._gate is not None and began - since < PAUSE:
            held = sum(place.length for _, place in there.values())
            self._gate.costs.observe(len(there), held, now - since)
        return results

    def _change_over(self, start: int) -> None:
        """Moves the rows that have grown to `start` tokens into the batch of those that are quantised."""
        for row in self._rows.values():
            place = row.place
            if isinstance(place, _InBatch) and place.batch is self._batches[0] and place.length >= start:
                state = place.batch.suspend(place.uid)
                if state is not None:
                    row.place = self._in_batch(state)

    def _ends(self, state: RowState) -> bool:
        """Whether a row that has begun ends with its next token."""
        return state.newest in self._eos or state.left <= 1


def _left(row: _Row) -> RowState:
    """Takes a row that is in no batch out of its loop. Returns its state, with its KV evaluated and its token known."""
    with mx.stream(generation_stream):
        if isinstance(row.place, SingleRow):
            row.place = row.place.leave()
        assert isinstance(row.place, RowState)
        eval_cache(row.place.cache)
        if isinstance(row.place.newest, mx.array):
            row.place.newest = cast(int, row.place.newest.item())
    return row.place
