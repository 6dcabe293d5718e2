"""Quantised KV, in the caches of a row and of a batch. Model thread only.

A module of its own because mlx-vlm, which brings the batch of quantised KV, takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_vlm.models.cache import BatchQuantizedKVCache

from start_llm.core.errors import NotSupported
from start_llm.engine.decode.layerwise import Layerwise, merged
from start_llm.engine.decode.row import Cache
from start_llm.kvcache.kinds import kind_of, leaves

_INDEXED = "QSAKVCache"
"""mlx-vlm's, of Qwen3.8-Flash-Next: keys and values are quantised, the keys of its index are not."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """`bits` and `group_size` of `mx.quantize`; rows of `start` tokens or more are quantised as a whole."""

    bits: int
    group_size: int
    start: int

    def apply(self, cache: Cache, start: int | None = None) -> bool:
        """Behind each pass: quantises every layer that can be, in place, if the row is long enough. False: none was.

        Windowed and recurrent layers stay as they are: they do not grow. A layer of positions is one wide, and stays.
        """
        changed, start = False, self.start if start is None else start
        for index, layer in enumerate(cache):
            plain = type(layer) is KVCache or type(layer).__name__ == _INDEXED
            if plain and layer.offset >= start and layer.keys.shape[-1] > 1:
                cache[index] = layer.to_quantized(group_size=self.group_size, bits=self.bits)
                mx.eval(cache[index].keys, cache[index].values)  # layer by layer: what was plain is freed at once
                changed = True
        return changed

    def holds(self, cache: Cache) -> bool:
        """Whether the row is quantised."""
        return any(kind_of(layer).read(layer)[1].bits for layer in leaves(cache))

    def batchable(self, cache: Cache) -> Cache:
        """The same layers; `BatchGenerator` will merge those that are quantised."""
        for layer in cache:
            if type(layer) is QuantizedKVCache:
                layer.merge = _merge_rows  # it asks the first row's layer
        return cache

    def check(self, model: Any) -> bool:
        """Computes with quantised KV once. Whether rows can be decoded together then: of quantised layers with
        an index there is no batch. Raises NotSupported if it does not work or nothing is quantised."""
        cache = make_prompt_cache(model)
        together = all(type(layer).__name__ != _INDEXED for layer in cache)
        try:
            model(mx.array([[0, 0]]), cache=cache)
            self.apply(cache, start=0)
            mx.eval(model(mx.array([[0]]), cache=cache))
        except (ValueError, TypeError, AttributeError) as error:
            raise NotSupported(
                f"KV_BITS={self.bits} with KV_GROUP_SIZE={self.group_size}: this model cannot use quantised KV: {error}"
            ) from error
        if not self.holds(cache):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in cache}))
            raise NotSupported(f"KV_BITS={self.bits}: this model's {kinds} layers cannot be quantised.")
        return together and all(type(layer) is not KVCache for layer in cache)  # positions stay: no batch is right then


def _merge_rows(layers: Sequence[QuantizedKVCache]) -> _Batch:
    first = layers[0]
    return merged([_Batch([0], group_size=first.group_size, bits=first.bits) for _ in layers], layers)


class _Batch(Layerwise, BatchQuantizedKVCache):  # type: ignore[misc]
    """mlx-vlm's batch, made from and taken apart into mlx-lm's rows."""

    def extract(self, index: int) -> QuantizedKVCache:
        row = super().extract(index)
        if type(row) is QuantizedKVCache:
            return row
        made = self._row()
        made.keys, made.values, made.offset = row.keys, row.values, row.offset
        return made

    def _row(self) -> QuantizedKVCache:
        return QuantizedKVCache(group_size=self.group_size, bits=self.bits)
