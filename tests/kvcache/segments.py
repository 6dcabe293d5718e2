"""Trees without MLX: rows are counted, not held."""

from __future__ import annotations

import numpy as np

from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.tree import Segment, SegmentTree
from start_llm.kvcache.types import Checkpoint, Slices

A_TOKEN = 10  # bytes


def fake_rows(length: int) -> Slices:
    return Slices([], (), 0, length, length * A_TOKEN)


def fake_tree(longest: int = 2048) -> SegmentTree:
    return SegmentTree(lambda rows, at: (fake_rows(at), fake_rows(rows.length - at)), longest)


def grow(tree: SegmentTree, tokens: list[int], checkpoint: bool = False, used: float = 0.0) -> Segment:
    """Stores `tokens` with rows, and a checkpoint at the end if asked; returns the end."""
    path = tree.extend(np.array(tokens, np.int32))
    for segment in path:
        segment.rows = segment.rows or fake_rows(segment.length)
        segment.used = max(segment.used, used)
    if checkpoint:
        path[-1].checkpoint = Checkpoint((), 100)
    return path[-1]


def adjusted(**values: float) -> type[DiskTier]:
    """A disk tier with other limits."""
    return type("AdjustedTier", (DiskTier,), values)
