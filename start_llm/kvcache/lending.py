"""Rows that running requests have taken over from the tree: lends them, and takes them back.

What a row is, and when it is lent or at rest, stands in `rows`. Knows nothing of evicting, of what a request is, and of
what the segments that are not in a row cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.resident import ResidentKV
from start_llm.kvcache.rows import RowKV, Run
from start_llm.kvcache.tree import Segment
from start_llm.kvcache.types import Checkpoint, KVReader


class LentRows:
    """Model thread only. If MLX raises in a method, the KV that it was moving is lost, and the tree says so."""

    def __init__(self, kit: LayerKit, resident: ResidentKV) -> None:
        self._kit, self._resident = kit, resident
        self._rows: dict[int, RowKV] = {}  # by the `id` of the request's caches

    @property
    def nbytes(self) -> int:
        """Of the buffers that running requests have taken over, or are going to give back: what is not stored yet and
        spare room included. Of a row in a batch its tokens alone count; states of layers that cannot be cut nowhere."""
        return sum(row.nbytes for row in self._rows.values())

    def lend(
        self, path: Sequence[Segment], checkpoint: Checkpoint | None, length: int, spare: int
    ) -> tuple[list[Any], int]:
        """Makes caches of the first `length` tokens of `path`. A request writes behind them and then calls `take_back`.

        KV that shares its buffers with no other path moves into the caches, layer by layer. Other KV is copied. What is
        stored from these caches before `take_back` copies nothing: its segments become runs of this row.

        Args:
            spare: tokens that copied buffers get room for behind the path.

        Returns:
            The caches, and how many bytes were copied.
        """
        if path and path[-1].end > length:
            path = [*path[:-1], self._resident.tree.split(path[-1], length - path[-1].start)]
        moved = self._movable(path)
        rows = {segment.rows.row if isinstance(segment.rows, Run) else None for segment in moved}
        row = rows.pop() if len(moved) == len(path) and len(rows) == 1 else None  # all of the path lies in it
        with ExitStack() as failed:
            failed.callback(self._resident.drop_subtrees, moved)
            if row is not None:
                cache, copied = self._kit.adopt(*row.lend(), checkpoint, length)
                row.lent_to = cache
            else:
                runs = [segment.rows for segment in path if segment.rows is not None]
                own = [segment.rows for segment in moved if segment.rows is not None]
                cache, copied = self._kit.build(runs, checkpoint, length, spare, own)
                row = RowKV(self._kit, cache)
                row.measure()
            for segment in moved:
                self._resident.hold(segment, Run(row, segment.start, segment.length))
            self._rows[id(cache)] = row
            failed.pop_all()
        return cache, copied

    def fill_from(self, segment: Segment, cache: Sequence[Any]) -> None:
        """`ResidentKV.fill` from a request's caches: a run of them if they are lent, else a copy."""
        if (row := self._rows.get(id(cache))) is None:
            self._resident.fill(segment, self._kit.slice(cache, segment.start, segment.end))
        else:
            run = Run(row, segment.start, segment.length)
            self._resident.fill(segment, run, row.measure())

    def moved(self, cache: Sequence[Any], reader: KVReader | None) -> None:
        """The KV of these caches has moved into a batch, where `reader` finds it, or (``None``) back into the caches.

        Caches that are not lent are ignored.
        """
        if (row := self._rows.get(id(cache))) is not None:
            row.reader = reader

    def take_back(self, cache: Sequence[Any], *, valid: bool = True) -> None:
        """The request of these caches has ended: the tree gets their buffers. Caches that are not lent are ignored.

        `valid`: they still hold what was stored from them. Otherwise, and if they never came out of a batch, those
        segments become ghosts.
        """
        row = self._rows.pop(id(cache), None)
        if row is None:
            return
        segments = self._resident.runs_of(row)
        with ExitStack() as lost:
            lost.callback(row.clear)
            lost.callback(self._resident.drop_subtrees, segments)
            if valid and segments and row.reader is None:
                row.rest(max(segment.end for segment in segments))
                self._resident.count_at_rest(row)
                lost.pop_all()
        self._resident.tidy()

    def _movable(self, path: Sequence[Segment]) -> list[Segment]:
        """The segments of `path` whose buffers hold no other path's KV.

        Where other segments have the smaller part of a row, they get buffers of their own first.
        """
        tokens: Counter[RowKV] = Counter()
        for segment in path:
            if isinstance(segment.rows, Run) and segment.rows.row.lent_to is None:
                tokens[segment.rows.row] += segment.length
        for row, count in tokens.items():
            if 0 < row.tokens - count <= count:
                others = [segment for segment in self._resident.runs_of(row) if segment not in path]
                self._resident.copy_out(others, moved=False)
        return [s for s in path if not isinstance(s.rows, Run) or s.rows.row.tokens == tokens[s.rows.row]]
