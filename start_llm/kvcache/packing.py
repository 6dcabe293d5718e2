"""Makes few arrays of many small ones: each is a buffer of the device, and the device has room for a number of them.

Of short segments and small states there are so many that this number is reached long before memory is full. What is
packed is read like before: its arrays are parts of larger ones. Model thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from start_llm.kvcache.types import Checkpoint, Slices, Window, WindowPiece

_PACKS = 4  # arrays that a segment's rows become, of each type: while they are taken over, this part is there twice


def packed(checkpoint: Checkpoint) -> Checkpoint:
    """The same with its own arrays of one type as parts of one. So with rows of windows that came together, for all
    checkpoints that share them: all of these layers let go of them at the same place."""
    alike: dict[tuple[int, int, int], list[WindowPiece]] = {}
    for window in checkpoint.states:
        for piece in window.pieces if isinstance(window, Window) else ():
            if not piece.packed:
                alike.setdefault((window.size, piece.start, piece.stop), []).append(piece)
    own = [leaf for _, leaf in tree_flatten(checkpoint.states) if isinstance(leaf, mx.array)]
    parts, (own_arrays, *counts) = _as_one([own, *([a for p in pieces for a in p.arrays] for pieces in alike.values())])
    for pieces, count in zip(alike.values(), counts, strict=True):
        for number, piece in enumerate(pieces):
            piece.arrays = parts[id(piece.arrays[0])], parts[id(piece.arrays[1])]
            piece.count, piece.packed = 0 if number else count, True
    states = tree_map(lambda leaf: parts.get(id(leaf), leaf), checkpoint.states)
    return replace(checkpoint, states=states, own_arrays=own_arrays, packed=True)


def packed_rows(rows: Slices) -> Slices:
    """The same with the arrays of several layers as parts of one for each type. Not of all layers: a request that takes
    the rows over needs them layer by layer, and frees each array with the last of its layers."""
    there = [layer for layer in rows.arrays if layer]
    some = -(-len(there) // _PACKS) or 1
    groups = [there[at : at + some] for at in range(0, len(there), some)]
    parts, counts = _as_one([[a for layer in group for a in layer] for group in groups])
    arrays = [tuple([parts[id(a)] for a in layer]) for layer in rows.arrays]
    return replace(rows, arrays=arrays, count=sum(counts), packed=True)


def _as_one(groups: Sequence[Sequence[Any]]) -> tuple[dict[int, Any], list[int]]:
    """All these by `id`, evaluated: arrays of one group and type are parts of one. And how many each group is in."""
    parts, counts = dict[int, Any](), []
    for arrays in groups:
        types = {a.dtype for a in arrays}
        for dtype in types:
            alike = [a for a in arrays if a.dtype == dtype]
            ends = list(accumulate(a.size for a in alike))
            cut = mx.split(mx.concatenate([a.reshape(-1) for a in alike]), ends[:-1])
            parts |= {id(a): part.reshape(a.shape) for a, part in zip(alike, cut, strict=True)}
        counts.append(len(types))
    mx.eval(list(parts.values()))
    return parts, counts
