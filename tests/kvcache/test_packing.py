"""Many small arrays become parts of few: equal bit for bit, counted and freed as what they are."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.packing import packed, packed_rows
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.tree import Segment
from start_llm.kvcache.types import Slices, StoredEnd
from tests.kvcache import tiny
from tests.kvcache.test_rows import buffers

CUTTABLE = ["llama", "glm4_moe_lite"]
STATEFUL = ["qwen3_next", "gemma3_text", "gpt_oss", "nemotron_h", "lfm2"]


def test_a_packed_checkpoint_of_many_layers_is_one_array_for_each_type() -> None:
    """Each array is a buffer of the device, which has room for so many."""
    kit = LayerKit(lambda: [KVCache(), *(ArraysCache(2) for _ in range(24))])
    cache = kit.new()
    cache[0].update_and_fetch(mx.zeros((1, 1, 4, 8)), mx.zeros((1, 1, 4, 8)))
    for number, layer in enumerate(cache[1:]):
        layer[0], layer[1] = mx.full((1, 64, 64), number), mx.full((1, 3, 8), number, mx.float16)
    mx.eval([layer.state for layer in cache])
    before = mx.get_active_memory()
    loose = kit.checkpoint(cache)
    assert loose.own_arrays == 48
    assert mx.get_active_memory() - before < 1000, "what the model gave is kept, not copied"
    made = packed(loose)
    assert made.own_arrays == 2 and made.own_bytes == loose.own_bytes == 24 * (64 * 64 * 4 + 3 * 8 * 2)
    del loose
    assert mx.get_active_memory() - before < 1.1 * made.own_bytes, "it holds no second copy"
    restored, _ = kit.build([kit.slice(cache, 0, 4)], made, 4, 0)
    for number, layer in enumerate(restored[1:]):
        assert (layer[0] == number).all() and (layer[1] == number).all() and layer[1].dtype == mx.float16


def rows(start: int, stop: int) -> Any:
    return mx.arange(start, stop, dtype=mx.float32)[None, None, :, None] + mx.zeros((1, 2, 1, 4))


def random_rows(layers: int, dtype: Any, bits: int = 0) -> tuple[LayerKit, list[Any]]:
    """Caches of 40 tokens; every third layer stores no rows."""
    kit = LayerKit(lambda: [ArraysCache(1) if place % 3 == 1 else KVCache() for place in range(layers)])
    cache = kit.new()
    for place, layer in enumerate(cache):
        if isinstance(layer, KVCache):
            layer.update_and_fetch(*mx.random.normal((2, 1, 3, 40, 64), key=mx.random.key(place)).astype(dtype))
            if bits:
                cache[place] = layer.to_quantized(group_size=32, bits=bits)
    return kit, cache


@pytest.mark.parametrize(("dtype", "bits", "most"), [(mx.float32, 0, 4), (mx.bfloat16, 0, 4), (mx.float16, 4, 8)])
@pytest.mark.parametrize("layers", [1, 2, 7, 24])
def test_packed_rows_are_equal_and_in_few_arrays(dtype: Any, bits: int, most: int, layers: int) -> None:
    kit, cache = random_rows(layers, dtype, bits)
    loose = kit.slice(cache, 3, 40)
    made = packed_rows(loose)
    assert made.packed and made.count <= min(most, loose.count) and made.nbytes == loose.nbytes
    assert made.forms == loose.forms and [len(layer) for layer in made.arrays] == [len(x) for x in loose.arrays]
    for one, other in zip(made.arrays, loose.arrays, strict=True):
        assert all(a.dtype == b.dtype and mx.array_equal(a, b) for a, b in zip(one, other, strict=True))
    copies, meta = kit.pack(made)
    assert all(copy.base is None for copy in copies.values()), "another thread may keep them"
    again = kit.unpack(copies, meta)
    assert isinstance(again, Slices) and not again.packed and again.count == loose.count
    assert all(
        mx.array_equal(a, b) for (_, a), (_, b) in zip(*map(tree_flatten, (again.arrays, loose.arrays)), strict=True)
    )


def test_a_request_that_takes_packed_rows_over_has_a_part_of_them_twice() -> None:
    kit = LayerKit(lambda: [KVCache() for _ in range(16)])
    cache = kit.new()
    for layer in cache:
        layer.update_and_fetch(mx.ones((1, 1, 2048, 64)), mx.ones((1, 1, 2048, 64)))
    made = packed_rows(kit.slice(cache, 0, 2048))
    del cache, layer
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    built, _ = kit.build([made], None, 2048, 0, [made])
    assert mx.get_peak_memory() - before < made.nbytes * 0.4
    assert mx.get_active_memory() - before < made.nbytes * 0.05 and built[0].offset == 2048


def test_rows_of_windows_are_packed_once_for_all_that_share_them() -> None:
    kit = LayerKit(lambda: [RotatingKVCache(max_size=size) for size in (16, 16, 16, 8)])
    store = KVStore(kit, StoreConfig(1 << 30, checkpoints_recent=100))
    cache, types = kit.new(), (mx.float16, mx.float32, mx.float32, mx.float32)
    for stop in range(4, 41, 4):
        for layer, dtype in zip(cache, types, strict=True):
            new = rows(stop - 4, stop).astype(dtype)
            layer.update_and_fetch(new, -new)
        store.put(list(range(stop)), cache, StoredEnd(answered=False))
    resident, nbytes = store.resident, store.resident.nbytes
    assert resident.arrays == 10 * 4 * 2
    while resident.pack(0):
        pass
    assert (resident.arrays, resident.nbytes) == (10 * 3, nbytes), "one for each size of window and type"
    checkpoints = [segment.checkpoint for segment in resident.tree if segment.checkpoint is not None]
    pieces = {id(piece): piece for checkpoint in checkpoints for piece in checkpoint.pieces()}
    assert buffers([array for piece in pieces.values() for array in piece.arrays]) == 10 * 3
    for stop in (40, 20, 8):
        restored = store.restore(list(range(stop)), store.lookup(list(range(stop))))
        for layer in restored.cache:
            start = max(0, stop - layer.max_size)
            assert mx.array_equal(layer.keys, rows(start, stop)) and mx.array_equal(layer.values, -rows(start, stop))
        store.take_back(restored.cache)
    path = resident.tree.walk(np.arange(40, dtype=np.int32)).path
    for segment in path[1::2]:
        resident.drop_checkpoint(segment)
    assert 0 < resident.arrays <= 30
    for segment in path:
        resident.drop_checkpoint(segment)
    assert resident.arrays == resident.nbytes == 0


def stored(layers: int, keys: Any) -> tuple[LayerKit, KVStore, list[Any]]:
    """A store with KV of so many layers."""
    kit = LayerKit(lambda: [KVCache() for _ in range(layers)])
    store, cache = KVStore(kit, StoreConfig(1 << 30)), kit.new()
    for layer in cache:
        layer.update_and_fetch(keys, keys)
    store.put(list(range(keys.shape[2])), cache)
    return kit, store, cache


def test_large_arrays_stay_as_they_are() -> None:
    _, store, _ = stored(2, mx.zeros((1, 4, 2048, 64)))
    store.resident.pack(0)
    assert store.resident.arrays == 4
    store.resident.tree.split(next(iter(store.resident.tree)), 1000)
    assert store.resident.arrays == 8
    store.resident.pack(0)
    assert store.resident.arrays == 2 + 2, "halves of them are small"


def test_the_tree_is_not_searched_again_before_so_many_arrays_have_come() -> None:
    _, store, cache = stored(12, rows(0, 20))
    assert not store.resident.pack(25), "24 arrays have come"
    assert store.resident.arrays == 24
    store.resident.pack(24)
    store.put([7, *range(19)], cache)
    assert store.resident.arrays == 4 + 24 and not store.resident.pack(25) and store.resident.arrays == 28
    store.resident.pack(24)
    assert store.resident.arrays == 8


def test_a_division_of_packed_rows_counts_both_parts_or_none() -> None:
    kit, store, _ = stored(12, rows(0, 20))
    store.resident.pack(0)
    (segment,), part, fails = list(store.resident.tree), kit.part, [False, True]
    assert store.resident.arrays == 4

    def failing(*given: Any) -> Slices:
        if fails and fails.pop(0):
            raise RuntimeError("no room")
        return part(*given)

    kit.part = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no room"):
        store.resident.tree.split(segment, 8)
    assert store.resident.arrays == 4 and segment.length == 20
    store.resident.tree.split(segment, 8)
    assert store.resident.arrays == 48
    store.resident.pack(0)
    assert store.resident.arrays == 8
    store.clear()
    assert store.resident.arrays == 0


def content(kit: LayerKit, cache: list[Any], length: int) -> list[Any]:
    """Every number of rows and states, by its bits."""
    pieces = kit.slice(cache, 0, length), kit.checkpoint(cache)
    return [a for piece in pieces for a in kit.pack(piece)[0].values()]


@pytest.mark.parametrize("name", CUTTABLE + STATEFUL)
def test_models_go_on_from_stored_kv_as_from_their_own(name: str, tmp_path: Path) -> None:
    """As it came, packed, forked, written, and read again from disk."""
    kit = LayerKit(lambda: tiny.prompt_cache(name))
    assert kit.cuttable == (name in CUTTABLE)
    tokens, tail = tiny.random_tokens(70), tiny.random_tokens(30, seed=1)
    stops = (23, 41, 70)
    places = (*stops, 60) if kit.cuttable else stops
    cold = {stop: tiny.greedy(name, tokens[:stop] + tail, kit.new(), 8) for stop in places}
    own: dict[int, list[Any]] = {}

    def opened() -> KVStore:
        return KVStore(kit, StoreConfig(1 << 30), disk=DiskTier(tmp_path, "f" * 64, 1 << 30))

    def restored(store: KVStore, stop: int) -> list[Any]:
        found = store.restore(tokens[:stop] + tail, store.lookup(tokens[:stop] + tail, stop))
        assert found.length == stop
        return found.cache

    def goes_on(store: KVStore, stop: int) -> None:
        cache = restored(store, stop)
        if stop in own:
            now = content(kit, cache, stop)
            assert all(np.array_equal(one, other) for one, other in zip(now, own[stop], strict=True))
        assert tiny.greedy(name, tail, cache, 8) == cold[stop]
        store.take_back(cache)

    store, cache = opened(), kit.new()
    for start, stop in zip((0, *stops), stops, strict=False):
        tiny.prefill(name, tokens[start:stop], cache)
        store.put(tokens[:stop], cache, StoredEnd(answered=False))
        own[stop] = content(kit, cache, stop)
    tiny.prefill(name, tokens[:5], cache)  # what the caller does next does not reach the store
    assert store.disk.flush()
    for stop in (*places, *places):  # nor what is done with what was restored
        goes_on(store, stop)
    for _ in range(2):
        loose = store.resident.arrays
        while store.resident.pack(0):
            pass
        assert all(_is_packed(segment) for segment in store.resident.tree)
        assert store.resident.arrays < loose
        for stop in places:
            goes_on(store, stop)
        store.close()
        store = opened()
        for stop in stops if not kit.cuttable else stops[-1:]:
            store.take_back(restored(store, stop))
        assert store.stats()["paged_tokens"] == 70
    store.close()
    assert not store.resident.arrays


def _is_packed(segment: Segment) -> bool:
    rows = segment.rows
    return (not isinstance(rows, Slices) or rows.packed) and (segment.checkpoint is None or segment.checkpoint.packed)
