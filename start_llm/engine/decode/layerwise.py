"""Batches whose rows come and go one layer at a time. Model thread only.

mlx-lm copies all layers of a batch at once when a row joins, leaves, or finds no room: the batch is then there several
times. Here each layer is copied and evaluated, and what it replaces is freed, before the next layer is touched. Uses of
mlx-lm's internals: `BatchKVCache._idx`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from start_llm.kvcache.layers import ROOM_SHARE, leaves

_LEAST_ROOM = 256  # tokens


class Layerwise:
    """For a layer of a batch: `keys`, `values` [rows, heads, tokens, width], or tuples of such arrays (quantised).

    The rows end at `_idx` and begin behind their `left_padding`; `offset` is how many tokens each has.
    """

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
        """Adds the rows of another batch, which is empty then."""
        if self.keys is None or other.keys is None:
            super().extend(other)  # type: ignore[misc]
            return
        count, end = self.offset.shape[0], max(self._idx, other._idx)
        first, its_first = end - self._idx, end - other._idx
        made = []
        for mine, its in zip(self._arrays(), other._arrays(), strict=True):
            _, heads, _, width = mine.shape
            joined = mx.zeros((count + its.shape[0], heads, _with_room(end), width), mine.dtype)
            joined[:count, :, first:end, :] = mine[..., : self._idx, :]
            joined[count:, :, its_first:end, :] = its[..., : other._idx, :]
            made.append(joined)
        mx.eval(made)
        self.offset = mx.concatenate([self.offset, other.offset])
        self.left_padding = mx.concatenate([self.left_padding + first, other.left_padding + its_first])
        self._idx, other.keys, other.values = end, None, None
        self._replace(made)

    def filter(self, batch_indices: Iterable[int]) -> None:
        """Keeps these rows. Rows that were extracted before are evaluated with them, and nobody needs the rest then."""
        keep, padding = list(batch_indices), self._padding()
        cut = min(padding[index] for index in keep)
        if keep == list(range(len(padding))) and not cut:
            return
        if self.keys is None:
            super().filter(keep)  # type: ignore[misc]
            return
        end = self._idx - cut
        made = []
        for a in self._arrays():
            _, heads, _, width = a.shape
            kept = mx.zeros((len(keep), heads, _with_room(end), width), a.dtype)
            for place, index in enumerate(keep):
                kept[place : place + 1, :, :end, :] = a[index : index + 1, :, cut : self._idx, :]
            made.append(kept)
        mx.eval(made, [_arrays_of(row) for row in self._extracted()])
        self._extracted().clear()
        self.offset, self.left_padding = self.offset[mx.array(keep)], self.left_padding[mx.array(keep)] - cut
        self._idx = end
        self._replace(made)

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
            row.keys, row.values = _paired([a[index : index + 1, :, first : self._idx, :] for a in self._arrays()])
            row.offset = self._idx - first
        return row

    def make_room(self, tokens: int) -> None:
        """Makes sure that a pass over so many tokens finds room."""
        if self.keys is None or self._idx + tokens <= self._arrays()[0].shape[-2]:
            return
        made = []
        for a in self._arrays():
            rows, heads, _, width = a.shape
            room = mx.zeros((rows, heads, _with_room(self._idx + tokens) - self._idx, width), a.dtype)
            made.append(mx.concatenate([a[..., : self._idx, :], room], axis=-2))
        mx.eval(made)
        self._replace(made)

    def _row(self) -> Any:
        """An empty layer of one row."""
        return KVCache()

    def _padding(self) -> list[int]:
        return cast(list[int], self.left_padding.tolist())

    def _arrays(self) -> tuple[mx.array, ...]:
        return _arrays_of(self)

    def _replace(self, arrays: Sequence[mx.array]) -> None:
        self.keys, self.values = _paired(arrays)
        mx.clear_cache()

    def _extracted(self) -> list[Any]:
        """Rows that `extract` has returned and nobody has evaluated yet."""
        found: list[Any] = self.__dict__.setdefault("_leaving", [])
        return found


class _Batch(Layerwise, BatchKVCache):  # type: ignore[misc]
    """Of plain layers."""


def merge_rows(layers: Sequence[Any]) -> Layerwise:
    """The rows' plain layers in one batch. The layers are emptied."""
    return merged([_Batch([0]) for _ in layers], layers)


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
            layer.merge = merge_rows  # it asks the first row's layer
    return cache


def make_room(batch: Sequence[Any], tokens: int) -> None:
    """Makes sure that a pass over so many tokens finds room in each layer of a batch."""
    for layer in leaves(batch):
        if isinstance(layer, Layerwise):
            layer.make_room(tokens)


def read_row(batch: Sequence[Any], index: int, place: int | None = None) -> list[Any]:
    """One row of a batch: its layers that can be cut; the others as they are. `place`: this layer only."""
    found = list(leaves(batch))
    wanted = found if place is None else found[place : place + 1]
    return [layer.read(index) if isinstance(layer, Layerwise) else layer for layer in wanted]


def eval_rows(caches: Sequence[Sequence[Any]]) -> None:
    """Evaluates rows that have left their batch, layer by layer."""
    for layers in zip(*caches, strict=True):
        mx.eval([layer.state for layer in layers])
        mx.clear_cache()


def _with_room(tokens: int) -> int:
    return tokens + max(_LEAST_ROOM, tokens // ROOM_SHARE)


def _paired(arrays: Sequence[mx.array]) -> tuple[Any, Any]:
    """Keys and values, of the arrays that `_arrays_of` gives."""
    half = len(arrays) // 2
    return (arrays[0], arrays[1]) if half == 1 else (tuple(arrays[:half]), tuple(arrays[half:]))


def _arrays_of(layer: Any) -> tuple[mx.array, ...]:
    if layer.keys is None:
        return ()
    return (layer.keys, layer.values) if isinstance(layer.keys, mx.array) else (*layer.keys, *layer.values)
