"""Rows that running requests have taken over from the tree: lends them, and takes them back.

What a row is, and when it is lent or at rest, stands in `rows`. Knows nothing of evicting, of what a request is, and of
what the segments that are not in a row cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.resident import ResidentKV
from start_llm.kvcache.rows import RowKV, Run
from start_llm.kvcache.tree import Segment
from start_llm.kvcache.types import Checkpoint, KVReader, Slices


class LentRows:
    """Model thread only. Raises what MLX raises; what was moved or taken back is then gone from the tree."""

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
        """Caches of the first `length` tokens of `path`, for a request to continue until `take_back`, and what was
        copied in bytes.

        KV of the path that no other path has in the same buffers moves there, layer by layer; the rest is copied. What
        is stored from these caches meanwhile are runs of them. What was moved is gone if this raises.

        Args:
            spare: tokens that copied buffers get room for behind the path.
        """
        if path and path[-1].end > length:
            path = [*path[:-1], self._resident.tree.split(path[-1], length - path[-1].start)]
        moved = self._movable(path)
        row = _whole_row(moved) if len(moved) == len(path) else None
        done = False
        try:
            if row is not None:
                cache, copied = self._kit.adopt(*row.lend(), checkpoint, length)
                row.lent_to = cache
            else:
                rows = [segment.rows for segment in path if segment.rows is not None]
                cache, copied = self._kit.build(rows, checkpoint, length, spare, _freeing(moved))
                row = RowKV(self._kit, cache)
                row.measure()
            for segment in moved:
                self._resident.hold(segment, Run(row, segment.start, segment.length))
            self._rows[id(cache)] = row
            done = True
        finally:
            if not done:
                self._resident.lose(moved)
        return cache, copied

    def fill_from(self, segment: Segment, cache: Sequence[Any]) -> None:
        """`ResidentKV.fill` from a request's caches: a run of them if they are lent, else a copy."""
        row = self._rows.get(id(cache))
        if row is None:
            self._resident.fill(segment, self._kit.slice(cache, segment.start, segment.end))
        else:
            row.measure()
            self._resident.fill(segment, Run(row, segment.start, segment.length))

    def moved(self, cache: Sequence[Any], reader: KVReader | None) -> None:
        """The KV of these caches lies in a batch now, where `reader` finds it; ``None``: in the caches themselves.

        Others than lent ones are ignored.
        """
        if (row := self._rows.get(id(cache))) is not None:
            row.reader = reader

    def take_back(self, cache: Sequence[Any], *, valid: bool = True) -> None:
        """The request of these caches has ended: their buffers are the tree's. Others than lent ones are ignored.

        `valid`: they hold what was stored from them; else that is gone. So it is if they have not come out of a batch.
        """
        row = self._rows.pop(id(cache), None)
        if row is None:
            return
        segments, done = self._resident.runs_of(row), False
        try:
            if valid and segments and row.reader is None:
                row.rest(max(segment.end for segment in segments))
                self._resident.count_at_rest(row)
                done = True
        finally:
            if not done:
                self._resident.lose(segments)
                row.clear()
        self._resident.tidy()

    def _movable(self, path: Sequence[Segment]) -> list[Segment]:
        """The segments of `path` whose buffers hold nothing else. A few others in the same row get their own first."""
        tokens: Counter[RowKV] = Counter()
        for segment in path:
            if isinstance(segment.rows, Run) and segment.rows.row.lent_to is None:
                tokens[segment.rows.row] += segment.length
        for row, count in tokens.items():
            if 0 < row.tokens - count <= count:
                others = [segment for segment in self._resident.runs_of(row) if segment not in path]
                self._resident.copy_out(others, lambda layer: None)
        return [s for s in path if not isinstance(s.rows, Run) or s.rows.row.tokens == tokens[s.rows.row]]


def _whole_row(path: Sequence[Segment]) -> RowKV | None:
    """The row that all of these are runs of."""
    rows = {segment.rows.row if isinstance(segment.rows, Run) else None for segment in path}
    return rows.pop() if len(rows) == 1 else None


def _freeing(segments: Sequence[Segment]) -> Callable[[int], None]:
    """Frees a layer of what these hold."""
    own = [segment.rows for segment in segments if isinstance(segment.rows, Slices)]
    shared = {segment.rows.row for segment in segments if isinstance(segment.rows, Run)}

    def free(layer: int) -> None:
        for rows in own:
            rows.arrays[layer] = ()
        for row in shared:
            row.free_layer(layer)

    return free
