"""Draws the tree of stored prefixes for people. Reads only, on any thread, without delaying the model thread."""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.core.report import MOST_SEGMENTS, StoredSegment, StoredTree
from start_llm.kvcache.tree import Segment, SegmentTree


def snapshot(
    tree: SegmentTree,
    ends: Sequence[tuple[str, Sequence[Segment]]],
    now: float,
    token_bytes: float,
    most: int = MOST_SEGMENTS,
) -> StoredTree:
    """To be called by `SegmentTree.read_consistently`.

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
        segments.append(_seen(segment, parent, now))
    named = [(name, places[id(end)]) for name, at in ends for end in at if id(end) in places]
    return StoredTree(tuple(segments), tuple(named), left_out, token_bytes)


def _seen(segment: Segment, parent: int, now: float) -> StoredSegment:
    return StoredSegment(
        parent,
        segment.length,
        segment.nbytes if segment.rows is not None else 0,
        segment.file is not None,
        round(max(now - segment.used, 0.0), 1) if segment.uses else -1.0,
        segment.uses,
        round(segment.seconds_per_token * segment.length, 3),
    )
