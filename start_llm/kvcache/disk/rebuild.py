"""Enters what an earlier process left on disk into the tree. Model thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from start_llm.kvcache.disk.format import StoredPiece
from start_llm.kvcache.tree import Segment, SegmentTree, chain_of
from start_llm.kvcache.types import FilePart


def enter(pieces: Iterable[StoredPiece], tree: SegmentTree, drop: Callable[[str], None]) -> int:
    """Returns the tokens that the tree did not have.

    Args:
        pieces: what others stand on first.
        drop: is called with the name of a file that is not what it says.
    """
    ends = {"": tree.root}  # by the name of a run's file
    added = 0
    for piece in pieces:
        if (end := ends.get(piece.above)) is None:
            continue  # what it stands on was dropped, and so was it
        above = _ending_at(tree, end, piece.start)
        chain = chain_of(above).then(np.frombuffer(piece.tokens, np.int32))
        if chain.digest() != piece.digest:  # its KV would be served for other tokens
            drop(piece.name)
        elif piece.tokens:
            ends[piece.name], more = _enter_run(tree, above, piece)
            ends[piece.name].chain = chain
            added += more
        else:
            above.checkpoint_file = above.checkpoint_file or piece.name
    return added


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
