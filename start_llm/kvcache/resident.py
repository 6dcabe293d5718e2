"""What of the tree is in memory. The one place that fills and empties segments, counts their bytes and shows them."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from start_llm.core.report import MOST_SEGMENTS, StoredSegment, StoredTree
from start_llm.kvcache.events import KVListener
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.rows import RowKV, Run, divided
from start_llm.kvcache.tree import Segment, SegmentTree, chain_of
from start_llm.kvcache.types import Checkpoint, Form, KVReader, Slices, StoredRows

COUNTERS = ("stored_tokens", "copied_bytes", "paged_tokens", "evicted", "refused")
"""Events since the start. ``evicted`` counts segments."""
_SPARE_SHARE = 24  # a row at rest may have room for this part of its tokens that no segment fills


class ResidentKV:
    """Model thread only.

    Attributes:
        tree: all segments, those whose KV is gone included.
        nbytes: KV in memory, checkpoints included; what checkpoints share counts once, what is lent does not count: it
            is the request's. Exact after `tidy`.
        ghosts: tokens remembered without KV in memory.
    """

    def __init__(self, kit: LayerKit, listener: KVListener | None = None) -> None:
        self._kit, self._listener = kit, listener
        self.tree = SegmentTree(partial(divided, kit))
        self._lent: dict[int, RowKV] = {}  # by the `id` of the caches
        self._ragged: set[RowKV] = set()  # at rest, and segments of them have gone since; counted as if cut already
        self.nbytes = 0
        self.ghosts = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._token_bytes: dict[tuple[Form, ...], float] = {}  # of the last rows of each form
        self._state_bytes = 0  # of the largest checkpoint so far

    def learn(self, rows: StoredRows, checkpoint: Checkpoint | None) -> None:
        """What a sample takes, so that rows can be estimated before anything was held."""
        self._token_bytes[rows.forms] = rows.nbytes / rows.length
        if checkpoint is not None:
            self._state_bytes = max(self._state_bytes, checkpoint.nbytes)

    def fill(self, segment: Segment, rows: StoredRows) -> None:
        """The segment, a ghost until now, holds its rows."""
        self.learn(rows, None)
        self._hold(segment, rows)
        self.ghosts -= segment.length

    def fill_from(self, segment: Segment, cache: Sequence[Any]) -> None:
        """`fill` from a request's caches: a run of them if they are lent, else a copy."""
        row = self._lent.get(id(cache))
        if row is None:
            self.fill(segment, self._kit.slice(cache, segment.start, segment.end))
        else:
            row.measure()
            self.fill(segment, Run(row, segment.start, segment.length))

    def attach(self, segment: Segment, checkpoint: Checkpoint) -> None:
        """The segment, without a checkpoint until now, has one."""
        segment.checkpoint = checkpoint
        self.nbytes += checkpoint.hold()
        self._state_bytes = max(self._state_bytes, checkpoint.nbytes)

    def drop(self, segment: Segment) -> Segment | None:
        """The segment becomes a ghost. Returns the one above it, if that is a leaf now."""
        self._empty(segment)
        self.tell_evicted(segment)
        self.tree.absorb(segment)
        self.counters["evicted"] += 1
        return segment.parent if segment.parent is not None and segment.parent.is_leaf else None

    def drop_checkpoint(self, segment: Segment) -> None:
        """The segment's checkpoint goes, its rows stay."""
        if segment.checkpoint is not None:
            self.nbytes -= segment.checkpoint.release()
            segment.checkpoint = None

    def drop_all(self) -> None:
        """Everything becomes a ghost."""
        for segment in self.tree:
            self._empty(segment)
        if self._listener is not None:
            self._listener.cleared()

    def tell_evicted(self, segment: Segment) -> None:
        """Tells the listener of a segment whose KV is neither in memory nor on disk any more."""
        if self._listener is not None and segment.is_ghost and segment.parent is not None:
            self._listener.evicted(chain_of(segment.parent), segment.start, segment.raw)

    def forget_ghosts(self, down_to: int) -> None:
        """Removes the longest unused ghosts that are not on disk either, until at most so many tokens are left."""
        turns = itertools.count()  # of those used at the same time the first goes
        queue = [(s.used, next(turns), s) for s in self.tree if _forgettable(s)]
        heapq.heapify(queue)
        while queue and self.ghosts > down_to:
            _, _, segment = heapq.heappop(queue)
            above = segment.parent
            self.ghosts -= segment.length
            self.tree.remove(segment)
            if above is not None and above.parent is not None and _forgettable(above):
                heapq.heappush(queue, (above.used, next(turns), above))

    def use(self, path: Sequence[Segment], now: float) -> None:
        """A request went along `path`."""
        for segment in path:
            segment.used = now
            segment.uses += 1

    @property
    def token_bytes(self) -> float:
        """Bytes of the rows of one token, judged by what was held or learnt so far; 0 before that."""
        return min(list(self._token_bytes.values()), default=0.0)

    def estimate(self, tokens: int) -> int:
        """Bytes of a row of so many tokens, judged by what was held or learnt so far; 0 before that.

        Where some rows are quantised and others not yet, a long row is judged by the quantised ones.
        """
        return int(tokens * self.token_bytes) + self._state_bytes

    # --- rows that are lent -----------------------------------------------------

    def lend(
        self, path: Sequence[Segment], checkpoint: Checkpoint | None, length: int, spare: int
    ) -> tuple[list[Any], int]:
        """Caches of the first `length` tokens of `path`, for a request to continue until `take_back`, and what was
        copied in bytes.

        KV of the path that no other path has in the same buffers moves there, layer by layer; the rest is copied. What
        is stored from these caches meanwhile are runs of them. What was moved is gone if this raises.
        """
        if path and path[-1].end > length:
            path = [*path[:-1], self.tree.split(path[-1], length - path[-1].start)]
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
                self._hold(segment, Run(row, segment.start, segment.length))
            self._lent[id(cache)] = row
            self._count(row)
            done = True
        finally:
            if not done:
                self._lose(moved)
        return cache, copied

    def moved(self, cache: Sequence[Any], reader: KVReader | None) -> None:
        """The KV of these caches lies in a batch now, where `reader` finds it; ``None``: in the caches themselves.

        Others than lent ones are ignored.
        """
        if (row := self._lent.get(id(cache))) is not None:
            row.reader = reader

    def take_back(self, cache: Sequence[Any], *, valid: bool = True) -> None:
        """The request of these caches has ended: their buffers are the tree's. Others than lent ones are ignored.

        `valid`: they hold what was stored from them; else that is gone. So it is if they have not come out of a batch.
        """
        row = self._lent.get(id(cache))
        if row is None:
            return
        segments, done = self._runs_of(row), False
        del self._lent[id(cache)]
        try:
            if valid and segments and row.reader is None:
                row.rest(max(segment.end for segment in segments))
                used = row.tokens * row.token_bytes
                if (row.nbytes - used) * _SPARE_SHARE > used:
                    self._ragged.add(row)
                self._count(row)
                done = True
        finally:
            if not done:
                self._lose(segments)
                row.clear()
        self.tidy()

    @property
    def lent_bytes(self) -> int:
        """Of the buffers that running requests have taken over, or are going to give back."""
        return sum(row.nbytes for row in self._lent.values())

    def is_lent(self, segment: Segment) -> bool:
        """Its KV is in a running request's row: giving it up would free nothing."""
        return isinstance(segment.rows, Run) and segment.rows.row.lent_to is not None

    def tidy(self) -> None:
        """Frees what segments that have gone leave in rows at rest: those that stay get buffers of their own."""
        for row in list(self._ragged):
            segments, done = self._runs_of(row), False
            try:
                copies = self._kit.parts([s.rows for s in segments if s.rows is not None], row.free_layer)
                for segment, rows in zip(segments, copies, strict=True):
                    self._hold(segment, rows)
                done = True
            finally:
                if not done:
                    self._lose(segments)

    def _movable(self, path: Sequence[Segment]) -> list[Segment]:
        """The segments of `path` whose buffers hold nothing else. A few others in the same row get their own first."""
        tokens: Counter[RowKV] = Counter()
        for segment in path:
            if isinstance(segment.rows, Run) and segment.rows.row.lent_to is None:
                tokens[segment.rows.row] += segment.length
        for row, count in tokens.items():
            if 0 < row.tokens - count <= count:
                others = [segment for segment in self._runs_of(row) if segment not in path]
                copies = self._kit.parts([s.rows for s in others if s.rows is not None], lambda layer: None)
                for segment, rows in zip(others, copies, strict=True):
                    self._hold(segment, rows)
        return [s for s in path if not isinstance(s.rows, Run) or s.rows.row.tokens == tokens[s.rows.row]]

    def _runs_of(self, row: RowKV) -> list[Segment]:
        return [s for s in self.tree if isinstance(s.rows, Run) and s.rows.row is row]

    def _lose(self, segments: Sequence[Segment]) -> None:
        """The KV of these is gone: all that stands on it goes, too."""
        todo = list(segments)
        for segment in todo:
            todo += [child for child in segment.children.values() if child.rows is not None]
        for segment in reversed(todo):
            if segment.rows is not None:
                self.drop(segment)

    def _hold(self, segment: Segment, rows: StoredRows | None) -> None:
        """The segment holds these rows from now on, and lets go of what it held."""
        before, segment.rows = segment.rows, rows
        for held, sign in ((rows, 1), (before, -1)):
            if isinstance(held, Run):
                held.row.tokens += sign * held.length
                if sign < 0 and held.row.lent_to is None:
                    self._ragged.add(held.row)
                self._count(held.row)
            elif held is not None:
                self.nbytes += sign * held.nbytes

    def _count(self, row: RowKV) -> None:
        """Counts a row's bytes: none while it is lent."""
        if row.lent_to is None and not row.tokens:
            row.clear()
        if row.lent_to is not None or not row.tokens:
            self._ragged.discard(row)
            counted = 0
        else:
            counted = row.tokens * row.token_bytes if row in self._ragged else row.nbytes
        self.nbytes += counted - row.counted
        row.counted = counted

    def _empty(self, segment: Segment) -> None:
        if segment.rows is not None:
            self.ghosts += segment.length
            self._hold(segment, None)
        self.drop_checkpoint(segment)


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


def _forgettable(segment: Segment) -> bool:
    return segment.is_ghost and not segment.children


def snapshot(
    tree: SegmentTree,
    ends: Sequence[tuple[str, Sequence[Segment]]],
    now: float,
    token_bytes: float,
    most: int = MOST_SEGMENTS,
) -> StoredTree:
    """The tree of stored prefixes for people; to be called by `SegmentTree.read_consistently`.

    Args:
        ends: conversations, the last used one first, with the segments that their turns end in.
        now: on the clock that `Segment.used` is of.
    """
    segments: list[StoredSegment] = []
    places: dict[int, int] = {}
    left_out = 0
    todo = [(segment, -1) for segment in list(tree.root.children.values())]
    for segment, parent in todo:  # grows while it is walked: parents first, level by level
        if len(segments) >= most:
            left_out = len(todo) - len(segments)
            break
        places[id(segment)] = len(segments)
        todo += [(child, len(segments)) for child in list(segment.children.values())]
        memory = segment.nbytes if segment.rows is not None else 0
        age = round(max(now - segment.used, 0.0), 1) if segment.uses else -1.0
        cost = round(segment.seconds_per_token * segment.length, 3)
        on_disk = segment.file is not None
        segments.append(StoredSegment(parent, segment.length, memory, on_disk, age, segment.uses, cost))
    named = [(name, places[id(end)]) for name, at in ends for end in at if id(end) in places]
    return StoredTree(tuple(segments), tuple(named), left_out, token_bytes)
