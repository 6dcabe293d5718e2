from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from start_llm.kvcache import layers
from start_llm.kvcache.kinds import undescribed
from start_llm.kvcache.layers import LayerKit, grow_for
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.types import Unstorable
from tests.kvcache import tiny


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text", "llama"])
def test_decoded_tokens_are_stored_like_prefilled_ones(name: str) -> None:
    kit, tokens = LayerKit(lambda: tiny.prompt_cache(name)), tiny.random_tokens(70)
    store, cache = KVStore(kit, StoreConfig(1 << 30)), kit.new()
    held = [*tokens, *tiny.greedy(name, tokens, cache, 26)[:-1]]
    store.put(held, cache)
    tail = tiny.random_tokens(10, seed=3)
    restored = store.restore(held + tail, store.lookup(held + tail))
    assert restored.length == len(held)
    assert tiny.greedy(name, tail, restored.cache, 8) == tiny.greedy(name, tail, copy.deepcopy(cache), 8)


def test_windowed_checkpoint_holds_the_window_only() -> None:
    kit = LayerKit(lambda: [RotatingKVCache(max_size=16)])
    cache = kit.new()
    cache[0].update_and_fetch(mx.ones((1, 1, 300, 4)), mx.ones((1, 1, 300, 4)))
    assert cache[0].keys.shape[2] == 300  # what mlx-lm leaves behind after one chunk
    assert kit.checkpoint(cache).nbytes == 2 * 16 * 4 * 4


def test_overlapping_windows_are_held_once() -> None:
    kit = LayerKit(lambda: [RotatingKVCache(max_size=100)])
    store = KVStore(kit, StoreConfig(1 << 30))
    cache = kit.new()
    tokens = list(range(400))
    a_token = 2 * 64 * 4
    for stop in range(50, 401, 10):
        start = 0 if stop == 50 else stop - 10
        cache[0].update_and_fetch(rows(stop - start, start), rows(stop - start, start))
        store.put(tokens[:stop], cache)
    assert store.stats()["bytes"] <= 400 * a_token
    for stop in (400, 390, 330):
        got = store.restore(tokens[:stop], store.lookup(tokens[:stop])).cache[0]
        assert mx.array_equal(got.keys, rows(100, stop - 100)) and got.offset == stop


def rows(count: int, start: int = 0, heads: int = 1, width: int = 64) -> Any:
    values = mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1)
    return mx.broadcast_to(values, (1, heads, count, width)) + mx.arange(width) / width


def test_a_list_of_layers_that_all_fell_behind_is_not_stored() -> None:
    """One that falls behind is made again of those beside it: one of these must be whole."""
    kit = LayerKit(lambda: [CacheList(KVCache(), KVCache()), KVCache()])
    cache = kit.new()
    for layer, count in ((cache[0][0], 4), (cache[0][1], 4), (cache[1], 9)):
        layer.update_and_fetch(rows(count), rows(count))
    with pytest.raises(Unstorable, match="holds 4 tokens where 9"):
        kit.slice(cache, 0, 9)
    cache[0][0].update_and_fetch(rows(5, 4), rows(5, 4))
    assert [len(arrays) for arrays in kit.slice(cache, 0, 9).arrays] == [2, 0, 2]


def test_quantised_rows_are_cut_and_joined() -> None:
    kit = LayerKit(lambda: [KVCache()])
    plain = kit.new()
    plain[0].update_and_fetch(rows(300), rows(300))
    first = kit.slice(plain, 0, 200)
    quantised = [plain[0].to_quantized(group_size=64, bits=8)]
    second = kit.slice(quantised, 200, 300)
    built, _ = kit.build([first, second], None, 290)
    assert isinstance(built[0], QuantizedKVCache)
    for got, expected in zip(built[0].keys, quantised[0].keys, strict=True):
        assert mx.array_equal(got[..., :290, :], expected[..., :290, :])
    built[0].update_and_fetch(rows(1, 290), rows(1, 290))
    assert built[0].offset == 291
    kit.check_joins(second, plain)
    with pytest.raises(Unstorable, match="change form"):
        kit.check_joins(second, [plain[0].to_quantized(group_size=64, bits=4)])


def test_room_for_the_next_chunk() -> None:
    kit = LayerKit(lambda: [KVCache()])
    cache = kit.new()
    cache[0].update_and_fetch(rows(300), rows(300))
    built, _ = kit.build([kit.slice(cache, 0, 300)], None, 300, spare=512)
    room = built[0].keys.shape[2]
    built[0].update_and_fetch(rows(512, 300), rows(512, 300))
    assert built[0].keys.shape[2] == room == 832


def test_slices_pin_no_larger_buffer() -> None:
    kit = LayerKit(lambda: [KVCache()])
    cache = kit.new()
    cache[0].update_and_fetch(mx.random.normal((1, 1, 4096, 64)), mx.random.normal((1, 1, 4096, 64)))
    mx.eval(cache[0].keys, cache[0].values)
    before = mx.get_active_memory()
    kept = kit.slice(cache, 100, 200)
    del cache
    assert mx.get_active_memory() <= before - 2 * 4096 * 64 * 4 + kept.nbytes + 65536


class Odd:
    """A cache class nobody knows."""

    def __init__(self) -> None:
        self.state: Any = {"seen": mx.array([1.0]), "name": "odd"}


class Sealed:
    offset = 3

    @property
    def state(self) -> Any:
        raise NotImplementedError


def test_unknown_classes_are_saved_whole_or_refused() -> None:
    kit = LayerKit(lambda: [Odd()])
    cache = kit.new()
    assert undescribed([*cache, KVCache()]) == ["Odd"]
    cache[0].state = {"seen": mx.array([4.0]), "name": "odd"}
    built, _ = kit.build([kit.slice(cache, 0, 3)], kit.checkpoint(cache), 3)
    assert built[0].state["seen"].item() == 4.0

    store = KVStore(LayerKit(lambda: [Sealed()]), StoreConfig(1 << 20))
    store.put([1, 2, 3], [Sealed()])
    assert store.stats()["refused"] == 1
    assert store.lookup([1, 2, 3]).seen == 0

    cache[0].state = {"thread": object()}
    with pytest.raises(Unstorable, match="object"):
        kit.checkpoint(cache)


def test_chunked_cache_is_a_checkpoint() -> None:
    kit = LayerKit(lambda: [ChunkedKVCache(8)])
    cache = kit.new()
    cache[0].update_and_fetch(rows(20), rows(20))
    cache[0].maybe_trim_front()
    built, _ = kit.build([kit.slice(cache, 0, 20)], kit.checkpoint(cache), 20)
    assert (built[0].offset, built[0].start_position) == (20, 12)
    assert mx.array_equal(built[0].keys_and_values()[0], rows(8, 12))


@pytest.mark.parametrize("fails_at", range(4))
def test_a_fault_while_rows_grow_leaves_each_layer_what_it_held(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = [tiny.known_cache([1, 2, 3])[0] for _ in range(2)]
    calls, free = iter(range(100)), layers.eval_and_free

    def failing(arrays: Any) -> None:
        if next(calls) == fails_at:
            raise RuntimeError("no room")
        free(arrays)

    monkeypatch.setattr(layers, "eval_and_free", failing)
    with pytest.raises(RuntimeError, match="no room"):
        grow_for([(layer, 3) for layer in cache], 1000)
    assert all(tiny.read_known([layer]) == [1, 2, 3] for layer in cache)
