from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from start_llm.kvcache import layers
from start_llm.kvcache.layers import LayerKit, grow_for
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.types import Unstorable
from tests.kvcache import tiny

CUTTABLE = ["llama", "glm4_moe_lite"]
STATEFUL = ["qwen3_next", "gemma3_text", "gpt_oss", "nemotron_h", "lfm2"]


def kit_of(name: str) -> LayerKit:
    return LayerKit(lambda: tiny.prompt_cache(name))


def filled(name: str) -> tuple[KVStore, list[int], list[Any]]:
    """A store that has 70 tokens, with states at 41 and at the end; the tokens, and the caches that were stored."""
    kit = kit_of(name)
    store, tokens, cache = KVStore(kit, StoreConfig(1 << 30)), tiny.random_tokens(70), kit.new()
    for start, stop in ((0, 41), (41, 70)):
        tiny.prefill(name, tokens[start:stop], cache)
        store.put(tokens[:stop], cache)
    return store, tokens, cache


@pytest.mark.parametrize("name", CUTTABLE + STATEFUL)
def test_a_restored_continuation_equals_the_cold_run(name: str) -> None:
    """At the end of what is stored, and where another text leaves it."""
    store, tokens, cache = filled(name)
    cuttable = name in CUTTABLE
    assert store._kit.cuttable == cuttable
    tiny.prefill(name, tokens[:5], cache)  # what the caller does next must not reach the store
    whole, fork = tokens + tiny.random_tokens(30, seed=1), tokens[:60] + tiny.random_tokens(20, seed=2)
    asked = [(whole, 70, 70, ""), (fork, 60 if cuttable else 41, 60, "" if cuttable else "no_checkpoint")]
    for text, length, matched, reason in asked:
        cold = tiny.greedy(name, text, tiny.prompt_cache(name), 12)
        for _ in range(2):  # the second time shows that the first one's writes did not reach the store either
            plan = store.lookup(text, limit=len(text) - 1)
            assert (plan.length, plan.matched, plan.reason) == (length, matched, reason)
            restored = store.restore(text, plan)
            assert restored.length == length
            assert tiny.greedy(name, text[length:], restored.cache, 12) == cold


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text", "llama"])
def test_decoded_tokens_are_stored_like_prefilled_ones(name: str) -> None:
    store, tokens, cache = filled(name)
    held = [*tokens, 5, *tiny.greedy(name, [5], cache, 25)[:-1]]
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


def test_upstream_internals_of_the_rotating_cache() -> None:
    """`layers` relies on these; fails when mlx-lm changes them."""
    cache = RotatingKVCache(max_size=4)
    for token in range(6):
        cache.update_and_fetch(mx.full((1, 1, 1, 1), token), mx.full((1, 1, 1, 1), token))
    assert [int(x) for x in np.array(cache._temporal_order(cache.keys)).ravel()] == [2, 3, 4, 5]
    keys, _, offset, keep, max_size, index = cache.state
    assert (keys.shape[2], offset, keep, max_size, index) == (4, 6, 0, 4, 2)


def rows(count: int, start: int = 0, heads: int = 1, width: int = 64) -> Any:
    values = mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1)
    return mx.broadcast_to(values, (1, heads, count, width)) + mx.arange(width) / width


def test_cache_list_with_both_kinds() -> None:
    kit = LayerKit(lambda: [CacheList(KVCache(), ArraysCache(1)), KVCache()])
    assert not kit.cuttable
    cache = kit.new()
    cache[0][0].update_and_fetch(rows(9), rows(9))
    cache[0][1][0] = mx.array([[5.0]])
    cache[1].update_and_fetch(rows(9), rows(9))
    built, copied = kit.build([kit.slice(cache, 0, 4), kit.slice(cache, 4, 9)], kit.checkpoint(cache), 9)
    assert built[0][0].offset == built[1].offset == 9
    assert mx.array_equal(built[0][0].keys[..., :9, :], rows(9))
    assert built[0][1][0].item() == 5.0
    assert copied == 4 * 9 * 64 * 4 + 4


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


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_pack_and_unpack(dtype: Any) -> None:
    kit = LayerKit(lambda: [KVCache(), ArraysCache(2), RotatingKVCache(max_size=4)])
    cache = kit.new()
    cache[0].update_and_fetch(rows(9).astype(dtype), rows(9).astype(dtype))
    cache[1][0] = mx.array([[1.5]]).astype(dtype)
    cache[2].update_and_fetch(rows(9).astype(dtype), rows(9).astype(dtype))
    for piece in (kit.slice(cache, 2, 7), kit.checkpoint(cache)):
        buffers, meta = kit.pack(piece)
        assert all(b.base is None for b in buffers.values())  # copies: another thread may keep them
        again = kit.unpack(buffers, meta)
        assert again.nbytes == piece.nbytes
        first, second = kit.pack(again)[0], buffers
        assert first.keys() == second.keys()
        assert all((first[k] == second[k]).all() and first[k].dtype == second[k].dtype for k in first)


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
