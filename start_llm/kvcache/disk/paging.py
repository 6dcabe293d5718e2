"""Between the tree in memory and the disk tier: what goes out, what comes back. Model thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np

from start_llm.kvcache.blocks import PathHash
from start_llm.kvcache.disk.format import StoredPiece
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.evict import near_end
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.resident import ResidentKV
from start_llm.kvcache.tree import Segment, SegmentTree, path_hash
from start_llm.kvcache.types import Checkpoint, FilePart, Slices

_LARGE = 64 << 20  # bytes of a checkpoint that is written only once its conversation rests

log = logging.getLogger(__name__)


class Paging:
    """Writes new segments behind, finds those of earlier processes, reads them when they are wanted.

    Rows of side requests are not written until something lasting stands on them.
    """

    def __init__(self, kit: LayerKit, disk: DiskTier, resident: ResidentKV) -> None:
        self._kit, self._disk, self._resident = kit, disk, resident
        self._waiting: dict[Segment, None] = {}
        self._last_read: tuple[str, Slices] | None = None
        self.find()

    def find(self) -> None:
        """Enters what the disk tier found, if it has opened its folder since the last call."""
        if found := self._disk.contents():
            self.forget_lost()
        ends = {"": self._resident.tree.root}  # by the name of a run's file
        for piece in found:
            if (end := ends.get(piece.above)) is None:
                continue  # what it stands on was dropped, and so was it
            above = _ending_at(self._resident.tree, end, piece.start)
            end_hash = PathHash(path_hash(above), bytes(piece.tokens))
            if end_hash.chain().digest() != piece.digest:  # its KV would be served for other tokens
                self._disk.drop(piece.name)
            elif piece.tokens:
                ends[piece.name], added = _enter_run(self._resident.tree, above, piece)
                ends[piece.name].path_hash = end_hash
                self._resident.ghosts += added
            else:
                above.checkpoint_file = above.checkpoint_file or piece.name

    # --- out --------------------------------------------------------------------

    def stored(self, path: Sequence[Segment]) -> None:
        """These hold something new; what lasts is queued, as far as the queue has room. Not while the tier pauses."""
        if not self._disk.ready:
            self._waiting.clear()
            return
        self._waiting |= dict.fromkeys(s for s in path if not s.one_shot and _unwritten(s))
        self.write()

    def write_all(self) -> None:
        """The model is going to be unloaded: what is in memory only is to be written, side requests too."""
        if self._disk.ready:
            self._waiting |= dict.fromkeys(s for s in self._resident.tree if _unwritten(s))

    def write(self, *, resting: bool = False) -> None:
        """Queues what still waits, as far as there is room. Large checkpoints wait until nothing runs (`resting`):
        those that a turn leaves behind are not worth their bytes."""
        for segment in list(self._waiting):
            large = segment.checkpoint_bytes > _LARGE
            if large and segment.file is not None and not resting:
                continue
            if not self._disk.has_room(segment.nbytes):
                return
            if _unwritten(segment):
                for part in reversed([segment, *(above for above in segment.ancestors() if above.file is None)]):
                    self._write_rows(part)
                if not large or (resting and near_end(segment)):
                    self._write_checkpoint(segment)
            if resting or not large:
                del self._waiting[segment]

    def _write_rows(self, segment: Segment) -> None:
        if segment.file is not None or segment.rows is None or segment.parent is None:
            return
        above, digest = segment.parent.file, path_hash(segment).chain().digest()
        name = above.name if above is not None else ""
        piece = StoredPiece(digest, name, segment.start, segment.raw, segment.seconds_per_token)
        segment.file = FilePart(self._disk.write(piece, *self._kit.pack(segment.rows)))

    def _write_checkpoint(self, segment: Segment) -> None:
        if segment.checkpoint is None or segment.checkpoint_file is not None or segment.file is None:
            return
        piece = StoredPiece(path_hash(segment).chain().digest(), segment.file.name, segment.end)
        segment.checkpoint_file = self._disk.write(piece, *self._kit.pack(segment.checkpoint))

    def thinned(self, segment: Segment) -> None:
        """The conversation has outgrown this checkpoint."""
        if segment.checkpoint_file is not None:
            self._disk.drop(segment.checkpoint_file)
            segment.checkpoint_file = None

    def given_up(self, segment: Segment) -> None:
        """What was stored of this segment is not to be read again."""
        self.thinned(segment)
        if segment.file is not None:
            self._disk.drop(segment.file.name)
            segment.file = None

    # --- in -----------------------------------------------------------------------

    def read(self, path: Sequence[Segment]) -> bool:
        """Reads what of `path` is on disk only, and the state at its end. False: a file is gone, and forgotten now."""
        try:
            for segment in path:
                if segment.rows is None:
                    rows = self._rows(segment)
                    if rows is None:
                        return False
                    self._resident.fill(segment, rows)
                    self._resident.counters["paged_tokens"] += segment.length
            if path and not self._kit.cuttable and path[-1].checkpoint is None:
                name = path[-1].checkpoint_file
                state = self._read(name) if name is not None else None
                if not isinstance(state, Checkpoint):
                    path[-1].checkpoint_file = None
                    return False
                self._resident.attach(path[-1], state)
            return True
        finally:
            self._last_read = None  # parts of one file are read one after the other, and then no more

    def _rows(self, segment: Segment) -> Slices | None:
        part = segment.file
        whole = self._read(part.name) if part is not None else None
        if part is None or not isinstance(whole, Slices) or whole.length < part.first + segment.length:
            self._lose(segment)
            return None
        if whole.length == segment.length:
            return whole
        return self._kit.part(whole, part.first, part.first + segment.length)

    def _read(self, name: str) -> Slices | Checkpoint | None:
        if self._last_read is not None and self._last_read[0] == name:
            return self._last_read[1]
        found = self._disk.read(name)
        if found is None:
            return None
        try:
            piece = self._kit.unpack(*found)
        except (ValueError, KeyError) as error:
            log.warning("stored KV does not fit this model and is dropped: %s: %s", name, error)
            self._disk.drop(name)
            return None
        self._last_read = (name, piece) if isinstance(piece, Slices) else None
        return piece

    # --- upkeep ---------------------------------------------------------------------

    def used(self, path: Iterable[Segment]) -> None:
        names = tuple(s.file.name for s in path if s.file is not None)
        if names:
            self._disk.touch(names)

    def forget_lost(self) -> None:
        """Takes back references to files that have gone."""
        lost = self._disk.take_lost()
        if not lost:
            return
        for segment in self._resident.tree:
            if segment.file is not None and segment.file.name in lost:
                segment.file = None
                self._resident.tell_evicted(segment)
            if segment.checkpoint_file in lost:
                segment.checkpoint_file = None

    def _lose(self, segment: Segment) -> None:
        """The folder gives up all that stands on a lost file; so does the tree."""
        todo = [segment]
        while todo:
            here = todo.pop()
            here.file = here.checkpoint_file = None
            self._resident.tell_evicted(here)
            todo.extend(here.children.values())

    def written(self) -> bool:
        """Queues what waits, as far as there is room. True: all is on disk, or the tier pauses. Waits for nobody."""
        if not self._disk.ready:
            return True
        self.write(resting=True)
        return not self._waiting and not self._disk.waiting_bytes

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until everything stored so far is on disk. False: not within `timeout` seconds."""
        until = time.monotonic() + timeout
        while self._disk.flush(max(0.0, until - time.monotonic())) and not self._disk.detail:
            if self.written():
                return True
        return False

    def close(self) -> None:
        """Writes what is still to be written."""
        self.flush(20.0)
        self._disk.close()

    def stats(self) -> dict[str, int]:
        found = self._disk.stats()
        large = sum(segment.file is not None for segment in self._waiting)
        return found and {**found, "waiting_segments": len(self._waiting) - large, "waiting_large": large}


def _unwritten(segment: Segment) -> bool:
    rows = segment.rows is not None and segment.file is None
    return rows or (segment.checkpoint is not None and segment.checkpoint_file is None)


def _ending_at(tree: SegmentTree, here: Segment, offset: int) -> Segment:
    """The segment on the path to `here` that ends at `offset`; one that goes on behind it is divided."""
    while here.start >= offset and here.parent is not None:
        here = here.parent
    return here if here.end == offset else tree.split(here, offset - here.start)


def _enter_run(tree: SegmentTree, above: Segment, piece: StoredPiece) -> tuple[Segment, int]:
    """The segment at its end, and the tokens that the tree did not have."""
    made, known = tree.attach(above, piece.tokens), 0
    parts = [made] if made is not None else []
    if not parts:  # the folder was opened late, and the same text has come in the meantime
        path = reversed([above, *above.ancestors()])
        tokens = np.frombuffer(b"".join(segment.raw for segment in path) + piece.tokens, np.int32)
        known = tree.walk(tokens).length - piece.start
        parts = [segment for segment in tree.extend(tokens) if segment.start >= piece.start]
    for part in parts:
        if part.file is None:
            part.file = FilePart(piece.name, part.start - piece.start)
            part.seconds_per_token = part.seconds_per_token or piece.seconds
    return parts[-1], piece.end - piece.start - known
