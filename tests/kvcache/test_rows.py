"""KV that moves between the tree and the rows of requests: what is read, what is counted, what is freed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from start_llm.kvcache.kinds import held_tokens
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.rows import Run
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.tree import Segment
from start_llm.kvcache.types import Checkpoint, Slices, StoredEnd
from tests.kinds import rounds
from tests.kvcache.orders import Requests
from tests.kvcache.tiny import known_cache, read_known

LAYERS = 3
TOKEN_BYTES = LAYERS * 2 * 4
MANY = 1 << 30
GROUP = 64  # values that are quantised together; equal ones lose nothing by it


def caches(tokens: list[int], hybrid: bool = False) -> list[Any]:
    """`known_cache` with more layers that can be cut."""
    return [*known_cache(tokens, hybrid), *(known_cache(tokens)[0] for _ in range(LAYERS - 1))]


def plain(arrays: Sequence[Any]) -> tuple[Any, Any]:
    """Keys and values of a cut layer, whatever form they are held in."""
    if len(arrays) == 2:
        return arrays[0], arrays[1]
    keys, values = (mx.dequantize(*arrays[i : i + 3], group_size=GROUP, bits=8) for i in (0, 3))
    return keys, values


def as_plain(layer: Any) -> Any:
    if not isinstance(layer, QuantizedKVCache) or layer.keys is None:
        return layer
    made = KVCache()
    made.keys, made.values = plain((*layer.keys, *layer.values))
    made.offset = layer.offset
    return made


def read(cache: list[Any]) -> list[int]:
    layers = [as_plain(layer) for layer in cache]
    first, *others = layers[-(LAYERS - 1) :]
    known = read_known([first])
    assert all(read_known([layer]) == known for layer in others)
    assert read_known(layers[: 1 - LAYERS]) == known
    return known


def append(cache: list[Any], new: list[int], width: int = 1) -> None:
    """As a pass over these tokens does it. `width`: of the layers that can be cut."""
    rows = mx.array(np.asarray(new, dtype=np.float32).reshape(1, 1, -1, 1))
    wide = mx.repeat(rows, width, axis=3)
    for layer in cache:
        if isinstance(layer, KVCache | QuantizedKVCache):
            layer.update_and_fetch(wide, -wide)
        elif hasattr(layer, "max_size"):
            layer.update_and_fetch(rows, -rows)
        else:
            before = (float(layer[0].item()), int(layer[1].item())) if layer[0] is not None else (0.0, 0)
            layer[0], layer[1] = mx.array([[before[0] + sum(new)]]), mx.array([[before[1] + len(new)]])
    mx.eval([layer.state for layer in cache])


def make_store(hybrid: bool = False, budget_bytes: int = MANY, most_arrays: int = 0) -> KVStore:
    config = StoreConfig(budget_bytes, checkpoint_grid=8, checkpoints_recent=2, most_arrays=most_arrays)
    return KVStore(LayerKit(lambda: caches([], hybrid)), config)


def begin(store: KVStore, tokens: list[int]) -> list[Any]:
    """A request for `tokens` that has the stored part of them."""
    return store.restore(tokens, store.lookup(tokens)).cache


def turn(store: KVStore, tokens: list[int]) -> None:
    """A whole request."""
    cache = begin(store, tokens)
    append(cache, tokens[len(read(cache)) :])
    store.put(tokens, cache, StoredEnd(session="s"))
    store.take_back(cache)


def stored(count: int, hybrid: bool = False) -> tuple[KVStore, list[int]]:
    """A store that a conversation of so many tokens has gone through."""
    store, tokens = make_store(hybrid), numbers(1, count)
    turn(store, tokens)
    return store, tokens


def known_rows(segment: Segment) -> tuple[list[int], list[int]]:
    """The keys and values of a segment in `known_cache`."""
    tokens = segment.tokens.tolist()
    return tokens, [-token for token in tokens]


def buffers(arrays: Sequence[Any]) -> int:
    """How many buffers of the device these are in: parts of one stand side by side."""
    places = [np.array(a, copy=False).__array_interface__["data"][0] for a in arrays]
    begun = {place: place + a.nbytes for place, a in zip(places, arrays, strict=True)}
    return len(begun.keys() - set(begun.values()))


def check(store: KVStore, running: int = 0, expected: Callable[[Segment], Any] = known_rows) -> None:
    """Every segment holds its own tokens' KV, and every byte is counted once."""
    resident, lent_rows = store.resident, store.lent_rows._rows.values()
    assert len(lent_rows) == running
    at_rest, own = {}, 0
    tokens: dict[int, int] = {}
    for segment in resident.tree:
        rows = segment.rows
        if rows is None:
            continue
        assert rows.length == segment.length
        for keys, values in map(plain, filter(None, rows.arrays)):
            assert (np.array(keys)[0, 0, :, 0].tolist(), np.array(values)[0, 0, :, 0].tolist()) == expected(segment)
        if isinstance(rows, Slices):
            own += rows.nbytes
        elif isinstance(rows, Run):
            assert rows.start == segment.start
            tokens[id(rows.row)] = tokens.get(id(rows.row), 0) + rows.length
            assert (rows.row.lent_to is not None) == (rows.row in lent_rows)
            if rows.row.lent_to is None:
                at_rest[id(rows.row)] = rows.row
    for row in [*at_rest.values(), *lent_rows]:
        assert row.tokens == tokens.get(id(row), 0)
    checkpoints = [segment.checkpoint for segment in resident.tree if segment.checkpoint is not None]
    pieces = {id(piece): piece for checkpoint in checkpoints for piece in checkpoint.pieces()}
    states = sum(checkpoint.own_bytes for checkpoint in checkpoints) + sum(p.nbytes for p in pieces.values())
    assert resident.nbytes == own + states + sum(row.nbytes for row in at_rest.values())
    arrays = 0
    for layers in (segment.rows.arrays for segment in resident.tree if isinstance(segment.rows, Slices)):
        arrays += buffers([a for layer in layers for a in layer])
    arrays += sum(len(layer) for row in at_rest.values() for layer in row._layers)
    for checkpoint in checkpoints:
        arrays += buffers([leaf for _, leaf in tree_flatten(checkpoint.states) if isinstance(leaf, mx.array)])
    arrays += buffers([a for piece in pieces.values() for a in piece.arrays])
    assert resident.arrays == arrays
    assert resident.ghosts == sum(segment.length for segment in resident.tree if segment.rows is None)


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def put_texts(store: KVStore, which: Iterable[int], hybrid: bool = False) -> None:
    """Each of 20 tokens that no other one has."""
    for number in which:
        store.put(numbers(1000 * number, 20), caches(numbers(1000 * number, 20), hybrid))


@pytest.mark.parametrize("hybrid", [False, True])
def test_many_small_arrays_are_given_up_before_the_device_has_no_room_for_them(hybrid: bool) -> None:
    store = make_store(hybrid, most_arrays=100)
    for number in range(100):
        put_texts(store, [number], hybrid)
        check(store)
        assert store.stats()["arrays"] <= 125, "while there is something to pack, a little more is held"
        store.idle()
        assert store.stats()["arrays"] <= 100
    assert store.stats()["evicted"] and store.lookup(numbers(99_000, 20)).length == 20
    assert all(s.rows.packed for s in store.resident.tree if s.used < 50 and isinstance(s.rows, Slices))


def many_states(tokens: list[int]) -> list[Any]:
    states = ArraysCache(12)
    for place in range(12 if tokens else 0):
        states[place] = mx.array([[tokens[0] + place]])
    return [*caches(tokens), states]


def test_arrays_are_packed_in_small_steps_before_anything_goes() -> None:
    """What is stored is handed over as it is; of many arrays few are made where the device's room for them ends."""
    most, packed = 600, Counter[int]()
    store = KVStore(LayerKit(lambda: many_states([])), StoreConfig(MANY, most_arrays=most))

    def pack(checkpoint: Checkpoint) -> Checkpoint:
        packed[number] += 1
        return made(checkpoint)

    made, store._kit.packed = store._kit.packed, pack  # type: ignore[method-assign, assignment]
    for number in range(300):
        tokens = numbers(1000 * number, 20)
        store.put(tokens, many_states(tokens))
        check(store)
        assert packed[number] <= 4 and store.resident.arrays <= most + 20
        if store.stats()["evicted"]:
            break
        assert not packed or number > 20
    held = [s for s in store.resident.tree if isinstance(s.rows, Slices) and s.checkpoint is not None]
    assert len(held) > 100 and not [s for s in held if not (s.checkpoint.packed and s.rows.packed)], (
        "all that stay were packed before the first one went"
    )
    first = store.lookup(numbers(1000 * (number - 50), 21))
    cache = store.restore(numbers(1000 * (number - 50), 21), first).cache
    states = [state.item() for state in cache[-1].cache]
    assert first.length == 20 and states == numbers(1000 * (number - 50), 12)
    store.take_back(cache)
    store.clear()
    assert not store.resident._loose and not store.resident.arrays


def test_stores_share_the_devices_room_for_arrays() -> None:
    store = make_store(most_arrays=1000)
    put_texts(store, range(100))
    store.set_budget(None, others=940, stores=2)
    store.idle()
    assert store.resident.arrays > 500, "half of it is sure; up to a quarter more while there is something to pack"
    for _ in range(40):
        store.idle()
    assert store.resident.arrays <= 500 and not store.stats()["evicted"]
    store.set_budget(None)
    before = store.resident.arrays
    put_texts(store, range(100, 110))
    assert store.resident.arrays > before + 50, "what the other one held is free again"


def test_what_was_not_used_for_longest_is_packed_first() -> None:
    now = [0.0]
    store = KVStore(LayerKit(lambda: caches([])), StoreConfig(MANY), clock=lambda: now[0])
    for number in (*range(20), 0, 2):
        now[0] += 1
        put_texts(store, [number])
    store._eviction.most_arrays = 130
    for packed in ([1, 3, 4, 5], [1, 3, 4, 5, 6, 7, 8, 9]):
        store.idle()
        held = [s for s in store.resident.tree if isinstance(s.rows, Slices) and s.rows.packed]
        assert sorted(segment.first // 1000 for segment in held) == packed
        check(store)
    store.idle()
    assert store.resident.arrays == 120 - 8 * 3, "far enough from the limit"


@pytest.mark.parametrize(("most", "gone"), [(200, False), (120, True)])
def test_many_arrays_at_once_are_packed_before_anything_goes(most: int, gone: bool) -> None:
    """But the device may not be left without room meanwhile."""
    store = make_store()
    put_texts(store, range(40))
    assert store.resident.arrays == 40 * 6
    store._eviction.most_arrays = most
    for _ in range(12):
        store.idle()
        check(store)
        assert store.resident.arrays <= 1.25 * most
    assert (store.stats()["evicted"] > 0) == gone
    assert store.resident.arrays <= most


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_request_takes_over_what_it_continues_and_gives_it_back(hybrid: bool) -> None:
    store = make_store(hybrid)
    tokens = numbers(1, 300)
    store.put(tokens, caches(tokens, hybrid))
    check(store)
    states = store.resident.nbytes - 300 * TOKEN_BYTES
    cache = begin(store, [*tokens, 900])
    assert store.resident.nbytes == states, "what is lent is the request's"
    check(store, running=1)
    append(cache, [900, 901])
    store.put([*tokens, 900, 901], cache)
    check(store, running=1)
    store.take_back(cache)
    check(store)
    assert store.lookup([*tokens, 900, 901]).length == 302
    store.take_back(cache)  # a second time: ignored
    check(store)


@pytest.mark.parametrize(("shared", "copied"), [(6000, 0), (5000, 0), (2000, 2000)])
def test_of_a_row_that_two_conversations_share_the_larger_part_stays_where_it_is(shared: int, copied: int) -> None:
    store = make_store()
    turn(store, numbers(1, 6000))
    before, tokens = store.stats()["copied_bytes"], [*numbers(1, shared), *numbers(7000, 5)]
    restored = store.restore(tokens, store.lookup(tokens))
    assert (restored.length, restored.copied_bytes) == (shared, copied * TOKEN_BYTES)
    assert store.stats()["copied_bytes"] == before + restored.copied_bytes
    assert store.lookup(numbers(1, 6000)).length == 6000
    assert store.stats()["held_bytes"] <= (6000 + min(shared, 6000 - shared)) * TOKEN_BYTES * 1.05
    check(store, running=1)
    store.take_back(restored.cache)
    check(store)


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_is_held_counts_spare_room_but_not_that_of_a_batch(hybrid: bool) -> None:
    store, tokens = stored(300, hybrid)
    states = store.stats()["checkpoint_bytes"]
    cache = begin(store, [*tokens, 900])
    append(cache, [900])
    (room,) = {layer.keys.shape[2] for layer in cache if isinstance(layer, KVCache)}
    assert room > 301
    assert store.stats()["bytes"] == states and store.stats()["held_bytes"] == states + room * TOKEN_BYTES
    one_row = caches([*tokens, 900], hybrid)  # as a batch shows it: its tokens and nothing behind them
    for layer in one_row:
        if isinstance(layer, KVCache):
            layer.keys, layer.values = layer.keys[..., :301, :], layer.values[..., :301, :]
    store.lent_rows.moved(cache, lambda place: one_row if place is None else [one_row[place]])
    assert store.stats()["held_bytes"] == states + 301 * TOKEN_BYTES
    store.lent_rows.moved(cache, None)
    store.take_back(cache)
    assert store.stats()["held_bytes"] == store.stats()["bytes"]


@pytest.mark.parametrize("hybrid", [False, True])
def test_spare_room_goes_before_anybody_loses_kv(hybrid: bool) -> None:
    store = make_store(hybrid)
    first, second = numbers(1, 6000), numbers(10_000, 3000)  # with room for 144 and 72 tokens more
    turn(store, first)
    turn(store, second)
    states = store.stats()["checkpoint_bytes"]
    used = states + 9000 * TOKEN_BYTES
    assert store.resident.nbytes == used + 216 * TOKEN_BYTES
    store.set_budget(used + 150 * TOKEN_BYTES)
    assert store.resident.nbytes == used + 72 * TOKEN_BYTES  # the one with more room was enough
    check(store)
    store.set_budget(used)
    assert (store.stats()["tokens"], store.stats()["bytes"]) == (9000, used)
    check(store)
    store.set_budget(used - 10 * TOKEN_BYTES)
    assert store.stats()["tokens"] < 9000
    check(store)


def test_little_spare_room_is_no_reason_to_copy_a_row() -> None:
    store, tokens = stored(6100)  # with room for 44 more
    store.set_budget(6100 * TOKEN_BYTES)
    assert store.lookup(tokens).length < 6100
    check(store)


def test_what_is_lent_does_not_expire() -> None:
    now = [0.0]
    kit = LayerKit(lambda: caches([]))
    store = KVStore(kit, StoreConfig(MANY, ttl_seconds=10), clock=lambda: now[0])
    tokens = numbers(1, 200)
    turn(store, tokens)
    cache = begin(store, [*tokens, 900])
    now[0] = 100
    store.idle()
    assert store.lookup(tokens).length == 200
    check(store, running=1)
    store.take_back(cache)
    now[0] = 200
    store.idle()
    assert store.lookup(tokens).length == store.resident.nbytes == 0


def test_a_row_that_never_came_out_of_its_batch_is_given_up() -> None:
    store, tokens = stored(200)
    cache = begin(store, [*tokens, 900])
    store.lent_rows.moved(cache, lambda place: cache if place is None else [cache[place]])
    store.take_back(cache)
    check(store)
    assert store.lookup(tokens).length == store.resident.nbytes == 0


def test_part_of_a_row_that_goes_is_really_freed() -> None:
    store = make_store()
    turn(store, numbers(1, 30_000))  # MLX does not copy a slice out of a buffer that is hardly larger
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    store.set_budget(10_000 * TOKEN_BYTES)
    check(store)
    assert 7_000 * TOKEN_BYTES <= store.resident.nbytes <= 10_000 * TOKEN_BYTES
    mx.clear_cache()
    assert before - mx.get_active_memory() >= 19_000 * TOKEN_BYTES


def test_a_row_that_is_not_valid_takes_its_kv_along() -> None:
    store, tokens = stored(100)
    turn(store, [*tokens[:60], 900])
    cache = begin(store, [*tokens, 500])
    store.take_back(cache, valid=False)
    check(store)
    assert store.lookup([*tokens, 500]).matched < 100
    turn(store, [*tokens, 500])
    check(store)


def go_on_wide(store: KVStore, tokens: list[int], cache: list[Any], *, quantised: bool) -> None:
    new = np.asarray(tokens[held_tokens(cache) :], dtype=np.float32)
    rows = mx.array(np.repeat(new[None, None, :, None], 64, axis=3))
    for index, layer in enumerate(cache):
        layer.update_and_fetch(rows, -rows)
        if quantised and type(layer) is KVCache:
            cache[index] = layer.to_quantized(group_size=64, bits=8)
    mx.eval([layer.state for layer in cache])
    store.put(tokens, cache)


def test_a_plain_answer_is_stored_and_served_behind_a_beginning_that_was_quantised_meanwhile() -> None:
    store = KVStore(LayerKit(lambda: [KVCache(), KVCache()]), StoreConfig(MANY))
    shared = numbers(1, 200)
    plain, long = [*shared, *numbers(500, 40)], [*shared, *numbers(900, 100)]
    for requests in ([shared], [long, plain]):
        caches = [begin(store, tokens) for tokens in requests]
        for tokens, cache in zip(requests, caches, strict=True):
            go_on_wide(store, tokens, cache, quantised=tokens is long)
        for cache in caches:
            store.take_back(cache)
    assert (store.lookup(plain).length, store.lookup(long).length) == (240, 300)
    assert store.stats()["refused"] == 0
    for layer in begin(store, [*plain, 7]):
        keys = mx.dequantize(*(a[..., :240, :] for a in layer.keys), group_size=64, bits=8)
        assert np.array(keys)[0, 0, :, 0].tolist() == plain


class Interleaving(Requests):
    """In every third one rows that have grown long enough are quantised, in all layers or in some."""

    def __init__(self, seed: int, faults: bool) -> None:
        super().__init__(seed)
        self.faults = 0.4 if faults else 0.0
        self.hybrid, self.quantises = seed % 3 == 0, seed % 3 == 1
        self.width = GROUP if self.quantises else 1
        self.token_bytes = TOKEN_BYTES * self.width
        budget = self.random.choice([MANY, 60 * self.token_bytes, 200 * self.token_bytes])
        self.store = make_store(self.hybrid, budget, most_arrays=(0, 20, 60, 0)[seed % 4])
        self.store.resident.tree._longest = self.random.choice([8, 64, 2048])
        self.failing(self.store._kit)

    def fresh(self) -> list[Any]:
        return caches([], self.hybrid)

    def read(self, cache: list[Any]) -> list[int]:
        return read(cache)

    def feed(self, cache: list[Any], new: list[int]) -> None:
        append(cache, new, self.width)
        if self.quantises and held_tokens(cache) >= 30:
            for index, layer in enumerate(cache):
                if type(layer) is KVCache and self.random.random() < 0.9:
                    cache[index] = layer.to_quantized(group_size=GROUP, bits=8)
            mx.eval([layer.state for layer in cache])

    def go_on(self) -> None:
        tokens, cache = self.random.choice(self.rows)
        new = self.text(10)
        self.feed(cache, new)
        tokens += new
        if not self.hybrid and self.random.random() < 0.3:
            wrong = self.text(4)
            append(cache, wrong, self.width)
            for layer in cache:
                layer.trim(len(wrong))
        if self.random.random() < 0.2:
            self.store._kit.make_room(cache, 300)

    def squeeze(self) -> None:
        self.store.set_budget(self.random.choice([MANY, 30 * self.token_bytes, 120 * self.token_bytes]))

    def forget(self) -> None:
        tokens = self.text(20)
        self.store.forget(tokens, self.random.randint(0, len(tokens)))

    def play(self, steps: int) -> None:
        for _ in range(steps):
            kinds = [self.begin, self.look, self.squeeze, self.forget]
            if self.rows:
                kinds += [self.go_on] * 4 + [self.put] * 3 + [self.end] * 2
            self.step(kinds, self.faults)
            lent = {id(cache) for _, cache in self.rows} & set(self.store.lent_rows._rows)
            check(self.store, running=len(lent))
            assert set(self.store.lent_rows._rows) == lent, "a request that has ended still has KV of the tree"
        while self.rows:
            self.end()
        check(self.store)


MANY_ORDERS = [
    pytest.param(range(at, at + 100), marks=[pytest.mark.thorough, pytest.mark.slow]) for at in range(1000, 2000, 100)
]


@pytest.mark.parametrize("seeds", [range(rounds(12, 3)), *MANY_ORDERS])
@pytest.mark.parametrize("faults", [False, True])
def test_no_order_of_requests_reads_wrong_kv_or_loses_bytes(faults: bool, seeds: range) -> None:
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    for seed in seeds:
        Interleaving(seed, faults).play(25)
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 4096
