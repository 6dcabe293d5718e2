"""Quantised KV, in the caches of a row. Model thread only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from start_llm.core.errors import NotSupported
from start_llm.engine.decode.row import Cache
from start_llm.kvcache.kinds import kind_of, leaves

# mlx-vlm's, of Qwen3.8-Flash-Next: keys and values are quantised, the keys of its index are not.
_INDEXED = "QSAKVCache"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """`bits` and `group_size` of `mx.quantize`; rows of `start` tokens or more are quantised as a whole."""

    bits: int
    group_size: int
    start: int

    def apply(self, cache: Cache, start: int | None = None) -> bool:
        """Quantises, in place, every layer that can be, if the row is long enough. False: nothing was changed.

        Windowed and recurrent layers stay as they are: they do not grow. To be called after each pass.
        """
        changed = False
        for index, layer in enumerate(cache):
            plain = type(layer) is KVCache or type(layer).__name__ == _INDEXED
            if plain and layer.offset >= (self.start if start is None else start):
                cache[index] = layer.to_quantized(group_size=self.group_size, bits=self.bits)
                mx.eval(cache[index].keys, cache[index].values)  # layer by layer: what was plain is freed at once
                changed = True
        return changed

    def holds(self, cache: Cache) -> bool:
        """Whether the row is quantised."""
        return any(kind_of(layer).form(layer).bits for layer in leaves(cache))

    def check(self, model: Any) -> None:
        """Computes with quantised KV once. Raises NotSupported if it does not work or nothing is quantised."""
        cache = make_prompt_cache(model)
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
