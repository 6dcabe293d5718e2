"""Between the tree in memory and the disk tier: what goes out, what comes back. Model thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from start_llm.kvcache.blocks import PrefixHash
from start_llm.kvcache.budget import near_end
from start_llm.kvcache.disk.index import TokenRun
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.pieces import Checkpoint, FilePart, Slices
from start_llm.kvcache.tree import Segment, SegmentTree

_LARGE = 64 << 20  # bytes of a checkpoint that is written only once its conversation rests

log = logging.getLogger(__name__)


class Paging:
    """Writes new segments behind, finds those of earlier processes, reads them when they are wanted.

    Rows of side requests are not written until something lasting stands on them.
    """

    def __init__(self, kit: LayerKit, disk: DiskTier) -> None:
        self._kit = kit
        self._disk = disk
        self._waiting: dict[int, Segment] = {}  # by id, so that none waits twice
        self._large: dict[int, Segment] = {}
        self._last_read: tuple[str, Slices] | None = None

    def fill(self, tree: SegmentTree) -> int:
        """Enters what the disk tier found when it was opened. Returns the tokens that the tree did not have."""
        runs, checkpoints = self._disk.contents()
        if not runs:
            return 0
        self.forget_lost(tree)
        ends = {PrefixHash().digest(): tree.root}
        added = 0
        for run in runs:
            above = ends.get(run.parent)
            chain = chain_of(above).then(np.frombuffer(run.tokens, np.int32)) if above is not None else None
            # If the hash of all tokens up to there is another one, rows would be served for other tokens.
            if above is None or chain is None or chain.digest() != run.digest:
                self._disk.drop(run.file)
                continue
            made = tree.attach(above, run.tokens)
            if made is not None:
                made.file = FilePart(run.file, run.first)
                made.seconds_per_token = run.seconds
                added += made.length
            else:  # the folder was opened late, and the same text has come in the meantime
                made, more = self._fill_between(tree, above, run)
                added += more
            made.checkpoint_file = made.checkpoint_file or checkpoints.get(run.digest)
            ends[run.digest] = made
        return added

    def _fill_between(self, tree: SegmentTree, above: Segment, run: TokenRun) -> tuple[Segment, int]:
        """Enters a run whose text the tree has in part. Returns the segment at its end, and the tokens added."""
        path = reversed([above, *above.ancestors()])  # of the root, both are without tokens
        tokens = np.frombuffer(b"".join(segment.raw for segment in path) + run.tokens, np.int32)
        known = tree.walk(tokens).length
        parts = [segment for segment in tree.extend(tokens) if segment.start >= run.start]
        for upper, lower in pairwise(parts):
            self._disk.split(run.digest, chain_of(upper).digest(), lower.start - upper.start)
        for part in parts:
            if part.file is None:
                part.file = FilePart(run.file, run.first + part.start - run.start)
                part.seconds_per_token = part.seconds_per_token or run.seconds
        return parts[-1], len(tokens) - known

    # --- out --------------------------------------------------------------------

    def stored(self, path: Sequence[Segment]) -> None:
        """These hold something new; what lasts is queued, as far as the queue has room. Not while the tier pauses."""
        if not self._disk.ready:
            self._waiting.clear()
            self._large.clear()
            return
        self._waiting.update((id(s), s) for s in path if not s.one_shot and _unwritten(s))
        self.write()

    def take_all(self, tree: SegmentTree) -> None:
        """What is in memory only is going to be lost: side requests are written, too."""
        if self._disk.ready:
            self._waiting.update((id(s), s) for s in tree if _unwritten(s))

    def write(self) -> None:
        """Queues what still waits, as far as there is room."""
        while self._waiting and self._disk.has_room((segment := next(iter(self._waiting.values()))).nbytes):
            del self._waiting[id(segment)]
            if not _unwritten(segment):
                continue
            chain = [segment, *(above for above in segment.ancestors() if above.file is None)]
            for part in reversed(chain):
                self._write_rows(part)
            if segment.checkpoint_bytes > _LARGE:
                self._large[id(segment)] = segment
            else:
                self._write_checkpoint(segment)

    def write_large(self) -> None:
        """Queues large checkpoints of conversation ends. Those that a turn leaves behind are not worth their bytes."""
        while self._large and self._disk.has_room((segment := next(iter(self._large.values()))).checkpoint_bytes):
            del self._large[id(segment)]
            if segment.rows is not None and near_end(segment):
                self._write_checkpoint(segment)

    def _write_rows(self, segment: Segment) -> None:
        if segment.file is not None or segment.rows is None or segment.parent is None:
            return
        run = TokenRun(
            digest=chain_of(segment).digest(),
            parent=chain_of(segment.parent).digest(),
            start=segment.start,
            tokens=segment.raw,
            file="",
            seconds=segment.seconds_per_token,
        )
        segment.file = FilePart(self._disk.write_run(run, *self._kit.pack(segment.rows)))

    def _write_checkpoint(self, segment: Segment) -> None:
        if segment.checkpoint is None or segment.checkpoint_file is not None or segment.file is None:
            return
        packed = self._kit.pack(segment.checkpoint)
        segment.checkpoint_file = self._disk.write_checkpoint(chain_of(segment).digest(), *packed)

    def divided(self, upper: Segment, lower: Segment) -> None:
        """`SegmentTree.split` happened: the index follows."""
        if lower.file is not None:
            self._disk.split(chain_of(lower).digest(), chain_of(upper).digest(), upper.length)

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

    def rows(self, segment: Segment) -> Slices | None:
        """Reads a segment's rows; ``None`` if they are gone, and then `segment.file` is too."""
        part = segment.file
        if part is None:
            return None
        whole = self._read(part.name)
        if not isinstance(whole, Slices) or whole.length < part.first + segment.length:
            _lose(segment)
            return None
        if whole.length == segment.length:
            return whole
        return self._kit.part(whole, part.first, part.first + segment.length)

    def checkpoint(self, segment: Segment) -> Checkpoint | None:
        """Reads a segment's checkpoint; ``None`` if it is gone, and then `segment.checkpoint_file` is too."""
        name = segment.checkpoint_file
        piece = self._read(name) if name is not None else None
        if isinstance(piece, Checkpoint):
            return piece
        segment.checkpoint_file = None
        return None

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

    def forget_read(self) -> None:
        """Lets go of the file read last: parts of one file are read one after the other, and then no more."""
        self._last_read = None

    # --- upkeep ---------------------------------------------------------------------

    def used(self, path: Iterable[Segment]) -> None:
        names = tuple(s.file.name for s in path if s.file is not None)
        if names:
            self._disk.touch(names)

    def forget_lost(self, tree: SegmentTree) -> None:
        """Takes back references to files that have gone."""
        lost = self._disk.take_lost()
        if not lost:
            return
        for segment in tree:
            if segment.file is not None and segment.file.name in lost:
                segment.file = None
            if segment.checkpoint_file in lost:
                segment.checkpoint_file = None

    def written(self) -> bool:
        """Queues what waits, as far as there is room. True: nothing waits any more, or the tier pauses."""
        if not self._disk.ready:
            return True
        self.write()
        self.write_large()
        return not self._waiting and not self._large and self._disk.idle

    def flush(self, timeout: float) -> bool:
        """Writes everything that waits. False: not within `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            self.write()
            self.write_large()
            if not self._disk.flush(max(0.0, until - time.monotonic())) or not self._disk.ready:
                return False
            if not self._waiting and not self._large:
                return True

    def close(self) -> None:
        self._disk.close()

    def stats(self) -> dict[str, int]:
        return {**self._disk.stats(), "waiting_segments": len(self._waiting), "waiting_large": len(self._large)}


def _unwritten(segment: Segment) -> bool:
    rows = segment.rows is not None and segment.file is None
    return rows or (segment.checkpoint is not None and segment.checkpoint_file is None)


def _lose(segment: Segment) -> None:
    """The index gives up all that stands on a lost file; so does the tree."""
    todo = [segment]
    while todo:
        here = todo.pop()
        here.file = here.checkpoint_file = None
        todo.extend(here.children.values())


def chain_of(segment: Segment) -> PrefixHash:
    """The hash chain up to the segment's end; remembered along the way."""
    todo = [segment]
    while todo[-1].chain is None and todo[-1].parent is not None:
        todo.append(todo[-1].parent)
    chain = todo[-1].chain or PrefixHash()
    for here in reversed(todo):
        if here.chain is None:
            here.chain = chain = chain.then(here.tokens)
        else:
            chain = here.chain
    return chain
