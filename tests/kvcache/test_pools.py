"""Requests in any order on a cache with pools, an index and a window, whose rows say which tokens they are of."""

from __future__ import annotations

from collections.abc import Sequence
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
from tests.kinds import rounds
from tests.kvcache.orders import Requests
from tests.memory_folder import memory_folder

RATES = (4, 6)
WINDOW = 5
MANY = 1 << 30


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


class Orders(Requests):
    """They also draft in vain, and the server ends and begins again with what lies on disk."""

    fresh, read, feed = staticmethod(fresh), staticmethod(read), staticmethod(feed)

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed)
        self.folder, self.most_arrays = folder, (0, 24, 60)[seed % 3]
        self.open()

    def open(self) -> None:
        config = StoreConfig(MANY, checkpoint_grid=8, checkpoints_recent=2, most_arrays=self.most_arrays)
        self.store = KVStore(self.failing(LayerKit(fresh)), config, disk=DiskTier(self.folder, "pools", MANY))
        self.store.resident.tree._longest = self.random.choice([7, 64])

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
            self.step(kinds, faults=0.3)
        self.restart()
        self.store.close()


MANY_ORDERS = [
    pytest.param(range(at, at + 50), marks=[pytest.mark.thorough, pytest.mark.slow]) for at in range(1000, 1500, 50)
]


@pytest.mark.parametrize("seeds", [range(rounds(12)), *MANY_ORDERS])
def test_no_order_of_requests_reads_wrong_pools(seeds: range) -> None:
    restored = 0
    for seed in seeds:
        with memory_folder() as folder:
            orders = Orders(seed, folder)
            orders.play(30)
            restored += orders.restored
    assert restored > 10 * len(seeds), "hardly anything came from stored KV"
