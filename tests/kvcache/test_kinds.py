"""Cache classes by their description: what is stored of each, and that it is what the model computed.

A model is fed the same pieces with the store and without it: unless it is mended, mlx-vlm's deepseek_v4 pools the
first group of each pass as if there were none before it, so other pieces are other KV.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_vlm.models import cache as vlm_cache
from mlx_vlm.models.deepseek_v4 import language
from mlx_vlm.models.deepseek_v4.config import ModelConfig
from mlx_vlm.models.hy_v4.cache import HyV4KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache, QSAQuantizedKVCache

from start_llm.engine.decode.rewind import Rewinder
from start_llm.kvcache import kinds
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.kinds import kind_of, leaves
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.types import StoredEnd, Unstorable
from start_llm.models.vision import mend_mlx_vlm
from tests.kinds import some
from tests.kvcache import sparse
from tests.models import architectures, vlm_types

NAMES = (*sparse.NAMES, "deepseek_v41")
ENDS = (60, 103, 150, 161, 279)  # not where a group of 4 ends, but for the first
ANSWER = 6
CONFIG = ModelConfig.from_dict(vlm_types.config_of("deepseek_v4"))


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Without mlx's compiler: mlx-vlm's hy_v4 computes other scores with it on the CPU once shapes have changed."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def model(name: str) -> Any:
    return architectures.make(name) if name == "deepseek_v41" else sparse.model(name)


class Served:
    """A model with a store, fed in the pieces that `ENDS` says."""

    def __init__(self, name: str, folder: Path | None = None, budget: int = 1 << 30) -> None:
        self.name, self.model = name, model(name)
        disk = None if folder is None else DiskTier(folder, name, 1 << 30)
        self.store = KVStore(LayerKit(self.model.make_cache), StoreConfig(budget), disk=disk)

    def answer(self, prompt: list[int], *, wrong: int = 0, stored: bool = True) -> tuple[list[int], int]:
        """Greedy tokens, and how many of the prompt were restored. `wrong`: drafts that are taken out again."""
        cache, length = self.model.make_cache(), 0
        if stored:
            restored = self.store.restore(prompt, self.store.lookup(prompt, len(prompt) - 1))
            cache, length = restored.cache, restored.length
        for start, stop in itertools.pairwise([0, *(end for end in ENDS if end < len(prompt)), len(prompt)]):
            if stop > length:
                following = sparse.feed(self.model, prompt[max(start, length) : stop], cache)
                if stored:
                    self.store.put(prompt[:stop], cache, StoredEnd(session="one", answered=False))
        said = []
        while len(said) < ANSWER:
            said.append(following)
            if wrong:
                self.draft_in_vain(cache, wrong)
            following = sparse.feed(self.model, said[-1:], cache)
        if stored:
            self.store.put([*prompt, *said], cache, StoredEnd(session="one"))
            self.store.take_back(cache)
        return said, length

    def draft_in_vain(self, cache: list[Any], width: int) -> None:
        rewinder = Rewinder(cache)
        saved = rewinder.save()
        sparse.feed(self.model, sparse.text(width, seed=9), cache)
        rewinder.restore(saved, width)


@pytest.mark.parametrize("name", some(sorted(NAMES, key=lambda name: name != "hy_v4")))
def test_the_same_tokens_however_they_come_about(name: str, tmp_path: Path) -> None:
    served = Served(name, tmp_path)
    prompt, other = sparse.text(290), sparse.text(20, seed=4)
    cold, _ = served.answer(prompt, stored=False)
    fork = prompt[:103] + other  # inside of a group of 4
    of_fork, _ = served.answer(fork, stored=False)
    assert served.answer(prompt, wrong=3) == (cold, 0)
    assert served.answer(prompt) == (cold, 279 if not served.store._kit.cuttable else 289)
    assert served.answer(fork) == (of_fork, 103)
    if not served.store._kit.cuttable:
        assert served.answer(fork, wrong=5) == (of_fork, 103)
    served.store.close()
    again = Served(name, tmp_path)
    assert again.answer(fork)[0] == of_fork
    assert again.answer(prompt) == (cold, 279 if not again.store._kit.cuttable else 289)
    again.store.set_budget(again.store.stats()["bytes"] // 3)
    assert again.answer(prompt)[0] == cold
    again.store.close()


@pytest.mark.parametrize("name", some(sparse.NAMES, 2))
def test_parts_of_rows_take_what_the_whole_takes(name: str) -> None:
    made, kit = model(name), LayerKit(model(name).make_cache)
    cache = made.make_cache()
    sparse.feed(made, sparse.text(256), cache)
    whole = kit.slice(cache, 0, 256)
    assert kit.part(whole, 0, 103).nbytes + kit.part(whole, 103, 256).nbytes == whole.nbytes


EMPTY = {
    "KVCache": [KVCache(), vlm_cache.KVCache()],
    "QuantizedKVCache": [QuantizedKVCache(), vlm_cache.QuantizedKVCache()],
    "HyV4KVCache": [HyV4KVCache()],
    "ConcatenateKVCache": [vlm_cache.ConcatenateKVCache()],
    "QSAKVCache": [QSAKVCache()],
    "QSAQuantizedKVCache": [QSAQuantizedKVCache()],
    "MiniMaxM3KVCache": [MiniMaxM3KVCache()],
    "PoolingCache": [vlm_cache.PoolingCache(4)],
    "LayerCache": [deepseek_v41.LayerCache(8)],
    "RotatingKVCache": [RotatingKVCache(8), vlm_cache.RotatingKVCache(8)],
    "ChunkedKVCache": [ChunkedKVCache(8), vlm_cache.ChunkedKVCache(8)],
    "ArraysCache": [ArraysCache(2), vlm_cache.ArraysCache(2)],
}


@pytest.mark.parametrize("name", kinds.KINDS)
def test_upstream_has_the_attributes_that_are_described(name: str) -> None:
    for layer in EMPTY[name]:
        kind = kind_of(layer)
        assert kind is kinds.KINDS[name] and type(layer).__name__ == name
        for attribute in {*kind.state, *(column.name for column in kind.columns)} - {*kind.optional}:
            inner: Any = layer
            for part in attribute.split("."):
                assert hasattr(inner, part), attribute
                inner = getattr(inner, part)
        assert not kind.counts or layer.offset == 0


def test_rows_of_an_index_that_were_quantised_join_plain_ones() -> None:
    kit = LayerKit(lambda: [QSAKVCache()])
    cache = kit.new()
    cache[0].update_and_fetch(mx.random.normal((1, 1, 40, 64)), mx.random.normal((1, 1, 40, 64)))
    cache[0].update_indexer(mx.random.normal((1, 40, 8)), mx.arange(40)[None, None] + mx.zeros((3, 1, 1), mx.int32))
    quantised = [cache[0].to_quantized(group_size=64, bits=8)]
    built, _ = kit.build([kit.slice(cache, 0, 13), kit.slice(quantised, 13, 40)], None, 37)
    assert type(built[0]) is QSAQuantizedKVCache and built[0].offset == 37
    assert mx.array_equal(built[0].index_keys, cache[0].index_keys[:, :37])
    assert mx.array_equal(built[0].index_position_ids, cache[0].index_position_ids[..., :37])
    assert mx.array_equal(built[0].keys[0][..., :37, :], quantised[0].keys[0][..., :37, :])


def test_a_layer_that_the_model_makes_again_is_not_stored() -> None:
    """glm5_next holds projected rows beside its latents, and makes them again once they fall behind."""
    served = Served("glm5_next")
    cache = served.model.make_cache()
    sparse.feed(served.model, sparse.text(40), cache)
    sparse.feed(served.model, [7], cache)
    assert sum(leaf.offset == 40 for leaf in leaves(cache) if kind_of(leaf) is kinds.ROWS) > 0
    served.store.put([*sparse.text(40), 7], cache)
    assert served.store.stats()["refused"] == 0 and served.store.stats()["tokens"] == 41


@pytest.mark.parametrize("mended", [False, True])
def test_a_group_is_pooled_with_the_one_before_it_in_whatever_pass_that_was(
    mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-vlm takes the first group of a pass to have none before it. If this fails for what is not mended, mlx-vlm has
    mended it, and `mend_mlx_vlm` need not."""
    mend_mlx_vlm()
    if not mended:
        monkeypatch.setattr(language, "_overlap_compress_kv", language._overlap_compress_kv.__wrapped__)
    compressor = language.Compressor(CONFIG, compress_ratio=4, head_dim=32)
    tokens = mx.random.normal((1, 11, CONFIG.hidden_size), key=mx.random.key(3))
    whole, cut = vlm_cache.PoolingCache(4), vlm_cache.PoolingCache(4)
    compressor(tokens, whole, 0)
    for start, stop in ((0, 4), (4, 7), (7, 8), (8, 11)):
        compressor(tokens[:, start:stop], cut, start)
    assert whole.pooled.shape == cut.pooled.shape == (1, 2, 32)
    assert mx.allclose(whole.pooled[:, 0], cut.pooled[:, 0], atol=1e-5)
    assert bool(mx.allclose(whole.pooled[:, 1], cut.pooled[:, 1], atol=1e-5)) == mended


def test_what_stays_of_a_pass_is_its_last_group() -> None:
    """Neither the other groups, nor the cache once its request is over."""
    mend_mlx_vlm()
    compressor = language.Compressor(CONFIG, compress_ratio=4, head_dim=32)
    cache = vlm_cache.PoolingCache(4)
    for start in (0, 8192):
        compressor(mx.random.normal((1, 8192, CONFIG.hidden_size)), cache, start)
        mx.eval(cache.state)
    held = mx.get_active_memory()
    cache.last_group = None
    assert held - mx.get_active_memory() < 100_000, "8,192 tokens take 4 MB"
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


def test_a_described_class_that_has_lost_an_attribute_is_not_stored() -> None:
    """Without it a checkpoint would be another state than the model had."""
    kit = LayerKit(lambda: [vlm_cache.PoolingCache(4)])
    cache = kit.new()
    cache[0].accumulate_windows(mx.zeros((1, 3, 8)), mx.zeros((1, 3, 8)), 0)
    assert kit.checkpoint(cache).own_arrays == 2
    del cache[0].buf_gate
    with pytest.raises(Unstorable, match="has no readable state"):
        kit.checkpoint(cache)


def rows_of(name: str, lengths: tuple[int, ...]) -> list[Any]:
    """Layers of one row each, with different content."""
    made: list[Any] = []
    for length in lengths:
        key, wide = mx.random.key(length), mx.random.normal((1, 2, length, 8), key=mx.random.key(length))
        flat = mx.random.normal((1, length, 8), key=key)
        if name == "PoolingCache":
            row: Any = vlm_cache.PoolingCache(4)
            ready, _, _ = row.accumulate_windows(flat, -flat, 0)
            row.update_and_fetch(ready.reshape(1, -1, 4, 8).sum(axis=2))
        elif name == "QSAKVCache":
            row = QSAKVCache()
            row.update_indexer(flat, mx.arange(length)[None, None] + mx.zeros((3, 1, 1), mx.int32))
            row.update_and_fetch(wide, -wide)
        else:
            row = MiniMaxM3KVCache()
            row.update_and_fetch(wide, -wide)
            row.update_index_and_fetch(wide[:, :1])
        made.append(row)
    return made


@pytest.mark.parametrize("name", ["PoolingCache", "QSAKVCache", "MiniMaxM3KVCache"])
def test_upstreams_batches_give_back_what_each_row_had(name: str) -> None:
    """Their `extract`, by which rows in a batch are read and leave it; with shorter rows than others."""
    lengths = (21, 4, 30)
    alone, batch = rows_of(name, lengths), type(rows_of(name, (1,))[0]).merge(rows_of(name, lengths))
    for index, (row, length) in enumerate(zip(alone, lengths, strict=True)):
        kind, found = kind_of(row), batch.extract(index)
        assert kind_of(found) is kind and kind.read(found)[1] == kind.read(row)[1]
        rows = kind.read(row)[1].rows(0, length)
        for mine, its in zip(kind.read(row)[0], kind.read(found)[0], strict=True):
            assert mx.array_equal(mine[..., rows, :], its[..., rows, :])
        assert not kind.counts or found.offset == length
        if name == "PoolingCache":
            left = row.remainder
            assert found.remainder == left
            for open_group in ("buf_kv", "buf_gate") if left else ():
                assert mx.array_equal(getattr(found, open_group)[:, :left], getattr(row, open_group)[:, :left])
