"""Between the tree in memory and the disk tier: what goes out, what comes back. Model thread only."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from start_llm.kvcache.blocks import PrefixHash
from start_llm.kvcache.budget import near_end
from start_llm.kvcache.disk import DiskTier
from start_llm.kvcache.diskindex import Run
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.pieces import Checkpoint, FilePart, Slices
from start_llm.kvcache.tree import Segment, Tree

_LARGE = 64 << 20  # bytes of a checkpoint that is written only once its conversation rests

log = logging.getLogger(__name__)


class Paging:
    """Writes new segments behind, finds those of earlier processes, reads them when they are wanted.

    Rows of side requests are not written until something lasting stands on them.
    """

    def __init__(self, kit: LayerKit, disk: DiskTier) -> None:
        self._kit = kit
        self._disk = disk
        self._waiting: OrderedDict[int, Segment] = OrderedDict()  # by id, so that none waits twice
        self._large: OrderedDict[int, Segment] = OrderedDict()
        self._last_read: tuple[str, Slices] | None = None

    def fill(self, tree: Tree) -> int:
        """Enters what the disk tier found at start. Returns the tokens entered."""
        runs, checkpoints = self._disk.contents()
        places = {PrefixHash().digest(): tree.root}
        tokens = 0
        for run in runs:
            above = places.get(run.parent)
            made = tree.attach(above, run.tokens) if above is not None else None
            if made is None:  # its parent went, or the same text is there under another division
                self._disk.drop(run.file)
                continue
            made.file = FilePart(run.file, run.first)
            made.checkpoint_file = checkpoints.get(run.digest)
            made.seconds_per_token = run.seconds
            places[run.digest] = made
            tokens += made.length
        return tokens

    # --- out --------------------------------------------------------------------

    def stored(self, path: Sequence[Segment]) -> None:
        """These hold something new; what lasts is queued, as far as the queue has room."""
        self._waiting.update((id(s), s) for s in path if not s.one_shot and _unwritten(s))
        self.write()

    def write(self) -> None:
        """Queues what still waits, as far as there is room."""
        while self._waiting and self._disk.has_room(next(iter(self._waiting.values())).nbytes):
            _, segment = self._waiting.popitem(last=False)
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
        while self._large and self._disk.has_room(next(iter(self._large.values())).checkpoint_bytes):
            _, segment = self._large.popitem(last=False)
            if segment.rows is not None and near_end(segment):
                self._write_checkpoint(segment)

    def _write_rows(self, segment: Segment) -> None:
        if segment.file is not None or segment.rows is None or segment.parent is None:
            return
        run = Run(
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
        """`Tree.split` happened: the index follows."""
        if lower.file is not None:
            self._disk.split(chain_of(lower).digest(), chain_of(upper).digest(), upper.length)

    def thinned(self, segment: Segment) -> None:
        """The conversation has outgrown this checkpoint."""
        if segment.checkpoint_file is not None:
            self._disk.drop(segment.checkpoint_file)
            segment.checkpoint_file = None

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

    def forget_lost(self, tree: Tree) -> None:
        """Takes back references to files that have gone."""
        lost = self._disk.take_lost()
        if not lost:
            return
        for segment in tree:
            if segment.file is not None and segment.file.name in lost:
                segment.file = None
            if segment.checkpoint_file in lost:
                segment.checkpoint_file = None

    def flush(self, timeout: float) -> bool:
        """Writes everything that waits. False: not within `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            self.write()
            self.write_large()
            if not self._disk.flush(max(0.0, until - time.monotonic())):
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
