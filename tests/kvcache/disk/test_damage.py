"""Random damage to the files of stored KV: the next start serves, and nothing wrong is ever restored."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from start_llm.kvcache.store import KVStore
from tests.files.damage import damage_somewhere
from tests.kinds import rounds
from tests.kvcache.disk.test_paging import store_on
from tests.kvcache.test_store import put, restored, run
from tests.kvcache.tiny import read_known

TEXTS = [run(0, 300), run(0, 120) + run(1000, 80), run(0, 120) + run(1000, 40) + run(2000, 50), run(5000, 200)]


def prepared(folder: Path, hybrid: bool) -> None:
    store = store_on(folder, hybrid)
    for text in TEXTS:
        put(store, text[: len(text) // 2], hybrid)
        put(store, text, hybrid)
    store.close()


def right(store: KVStore, text: list[int]) -> int:
    """Nothing but the beginning of `text` is restored. Returns its length."""
    plan = store.lookup(tuple(text))
    found = store.restore(tuple(text), plan)
    if found.length:
        assert read_known(found.cache) == text[: found.length]
    return found.length


def goes_on(store: KVStore, seed: int, hybrid: bool) -> None:
    for text in TEXTS:
        right(store, text)
    new = run(10_000 * seed, 90)
    put(store, new, hybrid)
    store.idle()
    store.disk.flush(60)
    assert restored(store, new) == new


def survives(whole: Path, folder: Path, chance: random.Random, hybrid: bool) -> int:
    """One damage while it is stopped and one while it runs. Returns the tokens found at the end."""
    shutil.copytree(whole, folder)
    inside = next(folder.iterdir())
    for number in (1, 2):
        damage_somewhere(inside, chance)
        store = store_on(folder, hybrid)
        goes_on(store, number, hybrid)
        damage_somewhere(inside, chance)
        goes_on(store, number + 10, hybrid)
        store.close()
    store = store_on(folder, hybrid)
    put(store, run(150_000, 60), hybrid)
    assert store.disk.flush(60), "the tier does not write any more"
    found = sum(right(store, text) for text in TEXTS)
    store.close()
    again = store_on(folder, hybrid)
    assert restored(again, run(150_000, 60)) == run(150_000, 60)
    again.close()
    shutil.rmtree(folder)
    return found


@pytest.mark.parametrize("hybrid", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize(
    "count", [rounds(8, 2), pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_random_damages(tmp_path: Path, hybrid: bool, count: int) -> None:
    prepared(tmp_path / "whole", hybrid)
    chance = random.Random(7)
    found = [survives(tmp_path / "whole", tmp_path / str(number), chance, hybrid) for number in range(count)]
    assert any(found), "a damage must not cost everything every time"
