"""Batches whose rows come and go half a layer at a time. Model thread only.

mlx-lm copies all layers of a batch at once when a row joins, leaves, or finds no room: the batch is then there several
times. Here the keys of a layer are copied and evaluated, and what they replace is freed, before its values are touched,
and so on layer by layer. Uses of mlx-lm's internals: `BatchKVCache._idx`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from start_llm.kvcache.kinds import ROWS, leaves
from start_llm.kvcache.layers import eval_and_free, grow_for, room_behind

_BATCHES = {"BatchKVCache", "BatchPoolingCache", "BatchQSAKVCache", "MiniMaxM3BatchKVCache"}
"""Upstream's batches whose rows have columns; the first one of classes that are made of `KVCache` (Hy V4)."""


class Layerwise:
    """A layer of a batch: `keys`, `values` [rows, heads, tokens, width], or tuples of such arrays (quantised).

    The rows end at `_idx` and begin behind their `left_padding`; `offset` is how many tokens each has.
    """

    kind = ROWS
    keys: Any
    values: Any
    offset: mx.array
    left_padding: mx.array
    _idx: int

    def hold(self, layer: Any) -> None:
        """Takes over the arrays of one row's layer, as they are."""
        self.keys, self.values, self._idx = layer.keys, layer.values, layer.offset
        self.offset, self.left_padding = mx.array([layer.offset]), mx.array([0])
        layer.keys, layer.values, layer.offset = None, None, 0

    def extend(self, other: Any) -> None:
        """Adds the rows of another batch, which is empty then, if both hold tokens."""
        if self.keys is None or other.keys is None:
            super().extend(other)  # type: ignore[misc]
            return
        count, end = self.offset.shape[0], max(self._idx, other._idx)
        first, its_first = end - self._idx, end - other._idx
        arrays, its_arrays = self._taken(), other._taken()
        for place, mine in enumerate(arrays):
            its, its_arrays[place] = its_arrays[place], None
            _, heads, _, width = mine.shape
            joined = mx.zeros((count + its.shape[0], heads, end + room_behind(end, 0), width), mine.dtype)
            joined[:count, :, first:end, :] = mine[..., : self._idx, :]
            joined[count:, :, its_first:end, :] = its[..., : other._idx, :]
            arrays[place] = joined
            del mine, its, joined
            eval_and_free(arrays[place])
        ROWS.put(self, arrays)
        self.offset = mx.concatenate([self.offset, other.offset])
        self.left_padding = mx.concatenate([self.left_padding + first, other.left_padding + its_first])
        self._idx = end

    def filter(self, batch_indices: Iterable[int]) -> None:
        """Keeps these rows and frees what the others took. Rows that `extract` returned before are evaluated, too."""
        keep, padding = list(batch_indices), self._padding()
        cut = min(padding[index] for index in keep)
        if keep == list(range(len(padding))) and not cut:
            return
        if self.keys is None:
            super().filter(keep)  # type: ignore[misc]
            return
        end = self._idx - cut
        arrays, leaving = self._taken(), [ROWS.read(row)[0] for row in self._extracted()]
        for place, a in enumerate(arrays):
            _, heads, _, width = a.shape
            kept = mx.zeros((len(keep), heads, end + room_behind(end, 0), width), a.dtype)
            for to, index in enumerate(keep):
                kept[to : to + 1, :, :end, :] = a[index : index + 1, :, cut : self._idx, :]
            arrays[place] = kept
            del a, kept
            eval_and_free(arrays[place], [row[place] for row in leaving])
        ROWS.put(self, arrays)
        self._extracted().clear()
        self.offset, self.left_padding = self.offset[mx.array(keep)], self.left_padding[mx.array(keep)] - cut
        self._idx = end

    def extract(self, index: int) -> Any:
        """One row's layer, not evaluated. The only row of a batch has the arrays themselves."""
        if self._padding() == [0] and self.keys is not None:
            row = self._row()
            row.keys, row.values, row.offset = self.keys, self.values, self._idx
            return row
        row = super().extract(index)  # type: ignore[misc]
        self._extracted().append(row)
        return row

    def read(self, index: int) -> Any:
        """The layer of a row that stays: views of the batch, no copies."""
        row, first = self._row(), self._padding()[index]
        if self.keys is not None:
            ROWS.put(row, [a[index : index + 1, :, first : self._idx, :] for a in ROWS.read(self)[0]])
            row.offset = self._idx - first
        return row

    def _row(self) -> Any:
        """An empty layer of one row."""
        return KVCache()

    def _padding(self) -> list[int]:
        return cast(list[int], self.left_padding.tolist())

    def _taken(self) -> list[Any]:
        """Takes the layer's arrays out of it: it is empty until `ROWS.put`."""
        arrays = list(ROWS.read(self)[0])
        self.keys = self.values = None
        return arrays

    def _extracted(self) -> list[Any]:
        """Rows that `extract` has returned and nobody has evaluated yet."""
        found: list[Any] = self.__dict__.setdefault("_leaving", [])
        return found


class _Batch(Layerwise, BatchKVCache):  # type: ignore[misc]
    """Of plain layers."""


def merged[Batch: Layerwise](batches: Sequence[Batch], layers: Sequence[Any]) -> Batch:
    """The rows' layers in the first of these empty batches. The layers are emptied."""
    for batch, layer in zip(batches, layers, strict=True):
        batch.hold(layer)
    first, *others = batches
    for other in others:
        first.extend(other)
    return first


def batchable(cache: Sequence[Any]) -> Sequence[Any]:
    """The same layers; `BatchGenerator` will merge the plain ones into `Layerwise`."""
    for layer in leaves(cache):
        if type(layer) is KVCache:
            layer.merge = lambda rows: merged([_Batch([0]) for _ in rows], rows)  # it asks the first row's layer
    return cache


def make_room(batch: Sequence[Any], tokens: int) -> None:
    """Makes sure that a pass over so many tokens finds room in each layer of a batch."""
    grow_for([(layer, layer._idx) for layer in leaves(batch) if isinstance(layer, Layerwise)], tokens)


def read_row(batch: Sequence[Any], index: int, place: int | None = None) -> list[Any]:
    """A row's layers, views of the batch where that is possible; states as they are, with all rows.

    `place`: only the layer in this place.
    """
    found = list(leaves(batch))
    return [_read(layer, index) for layer in (found if place is None else found[place : place + 1])]


def _read(layer: Any, index: int) -> Any:
    """Of a layer without rows nothing is read. Upstream's batches of other kinds copy, once it is evaluated."""
    if isinstance(layer, Layerwise):
        return layer.read(index)
    return layer.extract(index) if type(layer).__name__ in _BATCHES else layer


def eval_rows(caches: Sequence[Sequence[Any]]) -> None:
    """Evaluates rows that have left their batch, layer by layer."""
    for layers in zip(*caches, strict=True):
        mx.eval([layer.state for layer in layers])
        mx.clear_cache()
