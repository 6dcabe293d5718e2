"""What of the tree is in memory. The one place that fills and empties segments, counts their bytes and shows them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from start_llm.core.report import MOST_SEGMENTS, StoredSegment, StoredTree
from start_llm.kvcache.events import KVEvents
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.rows import RowKV, Run
from start_llm.kvcache.tree import Segment, SegmentTree, path_hash
from start_llm.kvcache.types import Checkpoint, RowForm, Slices, StoredRows

COUNTERS = ("stored_tokens", "copied_bytes", "paged_tokens", "evicted", "refused")
"""Events since the start. ``evicted`` counts segments."""
_SPARE_SHARE = 24  # a row at rest may have room for this part of its tokens that no segment fills
_PACKED_AT_ONCE, _PACKED_BYTES = 4, 64 << 20  # segments and bytes of a step, which takes some milliseconds
_TRIMMED_SHARE = 128  # of its tokens; where memory is short, a row with more room than this is copied to be rid of it


class Sizes:
    """What KV takes, judged by what was held or learnt so far; 0 before that."""

    def __init__(self) -> None:
        self._token_bytes: dict[tuple[RowForm, ...], float] = {}  # of the last rows of each form
        self._state_bytes = 0  # of the largest checkpoint so far

    def learn(self, rows: StoredRows, forms: tuple[RowForm, ...]) -> None:
        """`rows`: of a sample, or of a segment; of these forms."""
        self._token_bytes[forms] = rows.nbytes / rows.length

    def learn_state(self, checkpoint: Checkpoint) -> None:
        self._state_bytes = max(self._state_bytes, checkpoint.nbytes)

    @property
    def token_bytes(self) -> float:
        """Bytes of the rows of one token."""
        return min(list(self._token_bytes.values()), default=0.0)

    def estimate(self, tokens: int) -> int:
        """Bytes of a row of so many tokens.

        Where some rows are quantised and others not yet, a long row is judged by the quantised ones.
        """
        return int(tokens * self.token_bytes) + self._state_bytes


class ResidentKV:
    """Model thread only.

    Attributes:
        tree: all segments, those whose KV is gone included.
        nbytes: KV in memory, checkpoints included; what checkpoints share counts once, what is lent does not count: it
            is the request's. Exact after `tidy`.
        arrays: how many arrays `nbytes` is of: each is a buffer of the device.
        sizes: what a token and a checkpoint take.
        ghosts: tokens remembered without KV in memory.
    """

    def __init__(self, kit: LayerKit, listener: KVEvents | None = None) -> None:
        self._kit, self._listener = kit, listener
        self.tree = SegmentTree(self._divide)
        # rows at rest with more room than their segments need; counted as if `tidy` had cut them already
        self._oversized: set[RowKV] = set()
        self._loose: list[Segment] = []  # their arrays were not packed, the last ones are the first to be
        self._packed = 0  # so many arrays there were when all were packed
        self.nbytes = self.arrays = 0
        self.ghosts = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.sizes = Sizes()

    def fill(self, segment: Segment, rows: StoredRows, forms: tuple[RowForm, ...] | None = None) -> None:
        """The segment, a ghost until now, holds its rows, of these forms."""
        self.sizes.learn(rows, forms or rows.forms)
        self.hold(segment, rows)
        self.ghosts -= segment.length

    def attach(self, segment: Segment, checkpoint: Checkpoint) -> None:
        """The segment, without a checkpoint until now, has one."""
        segment.checkpoint = checkpoint
        self._add(*checkpoint.count(1))
        self.sizes.learn_state(checkpoint)

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
            self._add(*segment.checkpoint.count(-1))
            segment.checkpoint = None

    def pack(self, wait: int) -> bool:
        """Packs arrays of segments, those first that were not used for longest, in a short step. The tree stays as it
        is. True: more may be left. `wait`: so many arrays have to come before the tree is searched anew."""
        if searched := not self._loose:
            self._packed = min(self._packed, self.arrays)
            if self.arrays < self._packed + wait:
                return False
            self._loose = sorted(filter(_is_loose, self.tree), key=lambda segment: -segment.used)
        left = _PACKED_BYTES
        while self._loose and left > 0:
            segment = self._loose.pop()
            left -= max(segment.nbytes, _PACKED_BYTES // _PACKED_AT_ONCE)
            self._pack(segment)
        self._packed = self.arrays
        if left < _PACKED_BYTES:
            self._kit.free_buffers()
        return bool(self._loose) or not searched

    def _pack(self, segment: Segment) -> None:
        if isinstance(rows := segment.rows, Slices) and not rows.packed:
            self.hold(segment, self._kit.packed_rows(rows))
        if (loose := segment.checkpoint) is not None and not loose.packed:
            before = loose.all_arrays
            segment.checkpoint = self._kit.packed(loose)
            self._add(0, segment.checkpoint.all_arrays - before)

    def drop_all(self) -> None:
        """All segments become ghosts; the listener is told once."""
        for segment in self.tree:
            self._empty(segment)
        self._loose.clear()
        if self._listener is not None:
            self._listener.cleared()

    def tell_evicted(self, segment: Segment) -> None:
        """Tells the listener of a segment whose KV is neither in memory nor on disk any more."""
        if self._listener is not None and segment.is_ghost and segment.parent is not None:
            self._listener.evicted(path_hash(segment.parent), segment.start, segment.raw)

    # --- segments whose KV lies in a row ---------------------------------------

    def runs_of(self, row: RowKV) -> list[Segment]:
        """The segments whose KV lies in the row."""
        return [s for s in self.tree if isinstance(s.rows, Run) and s.rows.row is row]

    def count_at_rest(self, row: RowKV, share: int = _SPARE_SHARE) -> None:
        """The row belongs to the tree. Where it has more room than this share that no segment fills, `tidy` cuts it."""
        if _spare_bytes(row) * share > row.tokens * row.token_bytes:
            self._oversized.add(row)
        self._count(row)

    def trim(self, down_to: int) -> None:
        """Counts the spare room of rows at rest as free, the largest first, until at most so many bytes are held;
        `tidy` frees it. To copy a row takes less time than to compute even a hundredth of it again."""
        rows = {s.rows.row: None for s in self.tree if isinstance(s.rows, Run) and s.rows.row.lent_to is None}
        for row in sorted(rows, key=_spare_bytes, reverse=True):
            if self.nbytes <= down_to:
                return
            self.count_at_rest(row, _TRIMMED_SHARE)

    def copy_out(self, segments: Sequence[Segment], *, moved: bool) -> None:
        """These segments get buffers of their own. `moved`: they let go of each layer that was copied."""
        copies = self._kit.parts([s.rows for s in segments if s.rows is not None], moved=moved)
        for segment, rows in zip(segments, copies, strict=True):
            self.hold(segment, rows)

    def tidy(self) -> None:
        """Frees what segments that have gone leave in rows at rest: those that stay get buffers of their own."""
        for row in list(self._oversized):
            segments = self.runs_of(row)
            with ExitStack() as failed:
                failed.callback(self.drop_subtrees, segments)
                self.copy_out(segments, moved=True)
                failed.pop_all()

    def drop_subtrees(self, segments: Sequence[Segment]) -> None:
        """The KV of these segments is lost: they and all below them become ghosts."""
        todo = list(segments)
        for segment in todo:
            todo += [child for child in segment.children.values() if child.rows is not None]
        for segment in reversed(todo):
            if segment.rows is not None:
                self.drop(segment)

    def _divide(self, rows: StoredRows, at: int) -> tuple[StoredRows, StoredRows]:
        """The first `at` rows of a segment's, and the others: runs of the same row, or copies, which are not packed."""
        if isinstance(rows, Run):
            rows.row.runs += 1
            self._count(rows.row)
            return Run(rows.row, rows.start, at), Run(rows.row, rows.start + at, rows.length - at)
        parts = self._kit.part(rows, 0, at), self._kit.part(rows, at, rows.length)
        if isinstance(rows, Slices):
            self._add(0, sum(part.count for part in parts) - rows.count)
        return parts

    def hold(self, segment: Segment, rows: StoredRows | None) -> None:
        """Replaces the rows of a segment (``None``: by nothing) and counts the bytes of both."""
        before, segment.rows = segment.rows, rows
        for held, sign in ((rows, 1), (before, -1)):
            if isinstance(held, Run):
                held.row.tokens += sign * held.length
                held.row.runs += sign
                if sign < 0 and held.row.lent_to is None:
                    self._oversized.add(held.row)
                self._count(held.row)
            elif isinstance(held, Slices):
                self._add(sign * held.nbytes, sign * held.count)

    def _count(self, row: RowKV) -> None:
        """Counts a row's bytes: none while it is lent."""
        if row.lent_to is None and not row.tokens:
            row.clear()
        if row.lent_to is not None or not row.tokens:
            self._oversized.discard(row)
            counted = 0
        else:
            counted = int(row.tokens * row.token_bytes) if row in self._oversized else row.nbytes
        arrays = row.count * (row.runs if row in self._oversized else 1) if counted else 0
        self._add(counted - row.counted, arrays - row.counted_arrays)
        row.counted, row.counted_arrays = counted, arrays

    def _add(self, nbytes: int, arrays: int) -> None:
        self.nbytes += nbytes
        self.arrays += arrays

    def _empty(self, segment: Segment) -> None:
        if segment.rows is not None:
            self.ghosts += segment.length
            self.hold(segment, None)
        self.drop_checkpoint(segment)


def use(path: Sequence[Segment], now: float) -> None:
    """A request went along `path`. Model thread only."""
    for segment in path:
        segment.used = now
        segment.uses += 1


def _is_loose(segment: Segment) -> bool:
    """It has small arrays that can be packed. (A row at rest is long.)"""
    return any(isinstance(part, Slices | Checkpoint) and not part.packed for part in (segment.rows, segment.checkpoint))


def _spare_bytes(row: RowKV) -> float:
    """Of a row at rest: room that no segment fills."""
    return row.nbytes - row.tokens * row.token_bytes


def snapshot(
    tree: SegmentTree, ends: Sequence[tuple[str, Sequence[Segment]]], now: float, token_bytes: float
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
        if len(segments) >= MOST_SEGMENTS:
            left_out = len(todo) - len(segments)
            break
        places[id(segment)] = len(segments)
        todo += [(child, len(segments)) for child in list(segment.children.values())]
        memory = segment.nbytes if segment.rows is not None else 0
        age = round(max(now - segment.used, 0.0), 1) if segment.uses else -1.0
        cost = round(segment.seconds_per_token * segment.length, 3)
        on_disk = segment.file is not None
        segments.append(StoredSegment(parent, segment.length, memory, on_disk, age, segment.uses, cost))
    named = [(name, places[id(end)], n) for n, (name, at) in enumerate(ends) for end in at if id(end) in places]
    return StoredTree(tuple(segments), tuple(named), left_out, token_bytes)
