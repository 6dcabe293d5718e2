"""Requests in any order on a cache with pools, an index and a window, whose rows say which tokens they are of."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache
from mlx_vlm.models.cache import CacheList, PoolingCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache

from start_llm.engine.decode.rewind import Rewinder
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.types import StoredEnd
from tests.kinds import rounds

RATES = (4, 6)
WINDOW = 5
MANY = 1 << 30
CALLS = (
    "slice",
    "checkpoint",
    "part",
    "parts",
    "build",
    "adopt",
    "take_buffers",
    "make_room",
    "unpack",
    "packed",
    "packed_rows",
)


class Fault(Exception):
    """What a call below the store raises."""


def fresh() -> list[Any]:
    return [QSAKVCache(), CacheList(RotatingKVCache(WINDOW), *(PoolingCache(rate) for rate in RATES))]


def feed(cache: list[Any], tokens: Sequence[int]) -> None:
    """A pass: rows of these tokens; pooled rows are the sums of their groups."""
    flat = mx.array(np.asarray(tokens, dtype=np.float32)[None, :, None])
    wide, (index, (window, *pools)) = flat[:, None], cache
    at = index.offset
    index.update_indexer(flat, mx.arange(at, at + len(tokens))[None, None] + mx.zeros((3, 1, 1), mx.int32))
    index.update_and_fetch(wide, -wide)
    window.update_and_fetch(wide, -wide)
    for pool in pools:
        ready, _, _ = pool.accumulate_windows(flat, -flat, at)
        closed = ready.reshape(1, -1, pool.ratio, 1).sum(axis=2) if ready.shape[1] else mx.zeros((1, 0, 1))
        pool.update_and_fetch(closed)
    mx.eval([layer.state for layer in cache])


def read(cache: list[Any]) -> list[int]:
    """The tokens that the cache is of; every layer has to agree."""
    index, (window, *pools) = cache
    count = index.offset
    if index.keys is None:
        assert index.index_keys is None and window.keys is None and all(pool.pooled is None for pool in pools)
        return []
    tokens = np.array(index.keys)[0, 0, :count, 0]
    assert (np.array(index.values)[0, 0, :count, 0] == -tokens).all()
    assert (np.array(index.index_keys)[0, :, 0] == tokens).all()
    assert np.array(index.index_position_ids)[1, 0].tolist() == list(range(count))
    kept = np.array(window._temporal_order(window.keys))[0, 0, -min(WINDOW, count) :, 0]
    assert window.offset == count and (kept == tokens[-WINDOW:]).all()
    for pool in pools:
        whole = count // pool.ratio * pool.ratio
        sums = tokens[:whole].reshape(-1, pool.ratio).sum(axis=1)
        assert pool.offset == len(sums) and (not len(sums) or (np.array(pool.pooled)[0, :, 0] == sums).all())
        assert pool.remainder == count - whole
        assert (np.array(pool.buf_kv)[0, : pool.remainder, 0] == tokens[whole:]).all()
        assert (np.array(pool.buf_gate)[0, : pool.remainder, 0] == -tokens[whole:]).all()
    return [int(token) for token in tokens]


class Orders:
    """Requests that fork, are cancelled, draft in vain, and end; evictions, faults and restarts in between."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random, self.folder = random.Random(seed), folder
        self.most_arrays = (0, 24, 60)[seed % 3]
        self.rows: list[tuple[list[int], list[Any]]] = []
        self.said: list[list[int]] = []  # what was stored once
        self.raise_in = -1
        self.restored = 0
        self.open()

    def open(self) -> None:
        kit = LayerKit(fresh)
        for name in CALLS:
            setattr(kit, name, self.failing(name, getattr(kit, name)))
        config = StoreConfig(MANY, checkpoint_grid=8, checkpoints_recent=2, most_arrays=self.most_arrays)
        self.store = KVStore(kit, config, disk=DiskTier(self.folder, "pools", MANY))
        self.store.resident.tree._longest = self.random.choice([7, 64])

    def failing(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.raise_in -= 1
            if self.raise_in == 0:
                raise Fault(name)
            return method(*args, **kwargs)

        return call

    def text(self, most: int) -> list[int]:
        return [self.random.randint(1, 2) for _ in range(self.random.randint(1, most))]

    def begin(self) -> None:
        tokens = self.text(30)
        if self.said:
            known = self.random.choice(self.said)
            tokens = known[: self.random.choice([len(known), self.random.randint(0, len(known))])] + tokens
        try:
            cache = self.store.restore(tokens, self.store.lookup(tokens, len(tokens) - 1)).cache
        except Fault:
            cache = fresh()
        held = read(cache)
        assert held == tokens[: len(held)]
        self.restored += len(held)
        feed(cache, tokens[len(held) :])
        self.rows.append((tokens, cache))

    def go_on(self) -> None:
        tokens, cache = self.random.choice(self.rows)
        for token in self.text(5):
            feed(cache, [token])
            tokens.append(token)
        if self.random.random() < 0.5:
            rewinder, wrong = Rewinder(cache), [*self.text(6), 9]
            saved = rewinder.save()
            feed(cache, wrong)
            rewinder.restore(saved, len(wrong))
        assert read(cache) == tokens

    def put(self) -> None:
        tokens, cache = self.random.choice(self.rows)
        self.store.put(list(tokens), cache, StoredEnd(session=str(len(tokens) % 3)))
        self.said.append(list(tokens))

    def look(self) -> None:
        tokens = list(self.random.choice(self.rows)[0])
        got = self.store.restore(tokens, self.store.lookup(tokens, self.random.randint(0, len(tokens))))
        assert read(got.cache) == tokens[: got.length]
        self.store.take_back(got.cache)

    def end(self) -> None:
        tokens, cache = self.rows.pop(self.random.randrange(len(self.rows)))
        try:
            if self.random.random() < 0.7:  # else it was cancelled
                self.store.put(list(tokens), cache)
                self.said.append(list(tokens))
        finally:
            self.store.take_back(cache, valid=self.random.random() < 0.9)

    def squeeze(self) -> None:
        self.store.set_budget(self.random.choice([MANY, 800, 3000]))

    def restart(self) -> None:
        while self.rows:
            self.end()
        self.store.close()
        self.open()

    def play(self, steps: int) -> None:
        for _ in range(steps):
            kinds = [self.begin, self.squeeze]
            if self.rows:
                kinds += [self.go_on] * 3 + [self.put] * 3 + [self.look, self.end, self.restart]
            if len(self.rows) > 3:
                kinds = [self.end]
            if self.random.random() < 0.3:
                self.raise_in = self.random.randint(1, 12)
            with suppress(Fault):
                self.random.choice(kinds)()
            self.raise_in = -1
        self.restart()
        self.store.close()


def play(seeds: range) -> None:
    restored = 0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            orders = Orders(seed, Path(folder))
            orders.play(30)
            restored += orders.restored
    assert restored > 10 * len(seeds), "hardly anything came from stored KV"


def test_no_order_of_requests_reads_wrong_pools() -> None:
    play(range(rounds(12)))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_five_hundred_orders_of_requests(part: int) -> None:
    play(range(1000 + 50 * part, 1050 + 50 * part))
