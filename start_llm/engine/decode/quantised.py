"""Decoding with quantised KV: rows below the start decode plain, the others quantised, each kind in a batch of its own.

Apart from the other runners because mlx-vlm, which brings the batch of quantised KV, takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_vlm.models.cache import BatchQuantizedKVCache

from start_llm.core.errors import NotSupported
from start_llm.core.prompt import ImageSpan
from start_llm.engine.decode.draft import RowDrafts
from start_llm.engine.decode.runner import Cache, DecodeRow, Processors, Sampler, Suspended
from start_llm.engine.decode.text import BatchRunner, eval_cache


@dataclass(frozen=True, slots=True)
class Quantisation:
    """`bits` and `group_size` of `mx.quantize`; rows of `start` tokens or more are quantised as a whole."""

    bits: int
    group_size: int
    start: int

    def apply(self, cache: Cache) -> bool:
        """Quantises, in place, every layer that can be, if the row is long enough. False: nothing was changed.

        Windowed and recurrent layers stay as they are: they do not grow.
        """
        changed = False
        for index, layer in enumerate(cache):
            if type(layer) is KVCache and layer.offset >= self.start:
                cache[index] = layer.to_quantized(group_size=self.group_size, bits=self.bits)
                changed = True
        return changed


class QuantisingRunner:
    """Two `BatchRunner`s. A row that grows past the start changes over, between two of its tokens.

    Raises:
        NotSupported: the model cannot compute with such KV.
    """

    def __init__(self, model: Any, *, eos: Iterable[int], max_rows: int, how: Quantisation) -> None:
        self.max_rows = max_rows
        self._how = how
        eos = frozenset(eos)
        self._plain = BatchRunner(model, eos=eos, max_rows=max_rows)
        self._quantised = BatchRunner(model, eos=eos, max_rows=max_rows)
        self._rows: dict[int, _Place] = {}
        self._uid = 0
        self._check(model)

    def sample(self) -> tuple[int, Cache]:
        tokens, cache = self._plain.sample()
        replace(self._how, start=0).apply(cache)
        eval_cache(cache)
        return tokens, cache

    def prefill(self, cache: Cache, tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> int:
        taken = self._plain.prefill(cache, tokens, images)
        if self._how.apply(cache):
            eval_cache(cache)
            mx.clear_cache()
        return taken

    def insert(
        self,
        tokens: Sequence[int],
        cache: Cache,
        *,
        max_tokens: int,
        sampler: Sampler,
        processors: Processors,
        drafts: RowDrafts | None = None,
    ) -> int:
        runner = self._runner_for(cache)
        theirs = runner.insert(tokens, _batchable(cache), max_tokens=max_tokens, sampler=sampler, processors=processors)
        return self._enter(_Place(runner, theirs, len(tokens), max_tokens, sampler, processors))

    def decode(self) -> list[DecodeRow]:
        names = {(id(place.runner), place.uid): uid for uid, place in self._rows.items()}
        rows = []
        for runner in (self._plain, self._quantised):
            for row in runner.decode():
                uid = names[id(runner), row.uid]
                place = self._rows[uid]
                place.length += 1
                place.left -= 1
                if row.finish is not None:
                    del self._rows[uid]
                rows.append(DecodeRow(uid, row.token, row.logprobs, row.finish, row.cache, row.tokens))
        for place in self._rows.values():
            if place.runner is self._plain and place.length >= self._how.start:
                self._change_over(place)
        return rows

    def suspend(self, uid: int) -> Suspended | None:
        place = self._rows.get(uid)
        row = place.runner.suspend(place.uid) if place is not None else None
        if row is not None:
            del self._rows[uid]
        return row

    def resume(
        self,
        row: Suspended,
        *,
        max_tokens: int,
        sampler: Sampler,
        processors: Processors,
        drafts: RowDrafts | None = None,
    ) -> int:
        place = _Place(self._plain, -1, len(row.tokens), max_tokens, sampler, processors)
        self._go_on(place, row)
        return self._enter(place)

    def remove(self, uid: int) -> tuple[Cache, Sequence[int]] | None:
        place = self._rows.pop(uid, None)
        return place.runner.remove(place.uid) if place is not None else None

    def clear(self) -> None:
        self._rows.clear()
        self._plain.clear()
        self._quantised.clear()

    def close(self) -> None:
        self._plain.close()
        self._quantised.close()

    def _check(self, model: Any) -> None:
        """Computes with quantised KV once. Raises NotSupported if that does not work or nothing is quantised."""
        how = self._how
        try:
            _, cache = self.sample()
            mx.eval(model(mx.array([[0]]), cache=cache))
        except (ValueError, TypeError, AttributeError) as error:
            raise NotSupported(
                f"KV_BITS={how.bits} with KV_GROUP_SIZE={how.group_size}: this model cannot use quantised KV: {error}"
            ) from error
        if not any(isinstance(layer, QuantizedKVCache) for layer in cache):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in cache}))
            raise NotSupported(f"KV_BITS={how.bits}: this model's {kinds} layers cannot be quantised.")

    def _enter(self, place: _Place) -> int:
        self._uid += 1
        self._rows[self._uid] = place
        return self._uid

    def _change_over(self, place: _Place) -> None:
        row = place.runner.suspend(place.uid)
        if row is not None:
            self._go_on(place, row)

    def _go_on(self, place: _Place, row: Suspended) -> None:
        self._how.apply(row.cache)
        place.runner = self._runner_for(row.cache)
        place.uid = place.runner.resume(
            Suspended(_batchable(row.cache), row.tokens, row.token),
            max_tokens=place.left,
            sampler=place.sampler,
            processors=place.processors,
        )

    def _runner_for(self, cache: Cache) -> BatchRunner:
        return self._quantised if any(isinstance(layer, QuantizedKVCache) for layer in cache) else self._plain


@dataclass(slots=True)
class _Place:
    """Where a row decodes. `length`: tokens in its KV; `left`: tokens it may still report."""

    runner: BatchRunner
    uid: int
    length: int
    left: int
    sampler: Sampler
    processors: Processors


def _batchable(cache: Cache) -> Cache:
    """The same layers, of classes that `BatchGenerator` can batch."""
    return [_Mergeable.of(layer) if type(layer) is QuantizedKVCache else layer for layer in cache]


class _Mergeable(QuantizedKVCache):  # type: ignore[misc]
    """A row's layer that knows its batch."""

    @classmethod
    def of(cls, layer: QuantizedKVCache) -> _Mergeable:
        made = cls(group_size=layer.group_size, bits=layer.bits)
        made.keys, made.values, made.offset = layer.keys, layer.values, layer.offset
        return made

    @classmethod
    def merge(cls, layers: Sequence[QuantizedKVCache]) -> _Batch:
        first, *others = (_Batch.of(layer) for layer in layers)
        for other in others:
            first.extend(other)
        return first


class _Batch(BatchQuantizedKVCache):  # type: ignore[misc]
    """mlx-vlm's batch, made from and taken apart into mlx-lm's rows."""

    @classmethod
    def of(cls, layer: QuantizedKVCache) -> _Batch:
        made = cls([0], group_size=layer.group_size, bits=layer.bits)
        if layer.keys is not None:
            made.keys, made.values = (
                tuple(part[..., : layer.offset, :] for part in parts) for parts in (layer.keys, layer.values)
            )
            made.offset, made._idx = mx.array([layer.offset]), layer.offset
        return made

    def extract(self, index: int) -> QuantizedKVCache:
        row = super().extract(index)
        made = QuantizedKVCache(group_size=self.group_size, bits=self.bits)
        made.keys, made.values, made.offset = row.keys, row.values, row.offset
        return made
