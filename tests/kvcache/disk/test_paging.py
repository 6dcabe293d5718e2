from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from start_llm.kvcache.disk import paging
from start_llm.kvcache.disk.tier import DiskTier
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from tests.clock import Clock
from tests.files.damage import damage_somewhere
from tests.kinds import rounds
from tests.kvcache import tiny
from tests.kvcache.segments import adjusted
from tests.kvcache.test_store import TOKEN_BYTES, held_bytes, put, restored, run, store_of
from tests.memory_folder import memory_folder

MAX = 100 << 20


def store_on(folder: Path, hybrid: bool = False, budget_tokens: int = 1 << 20, **options: Any) -> KVStore:
    tier = adjusted(queue_bytes=options.pop("queue_bytes", 1 << 30))(folder, "model", MAX)
    assert tier.ready
    return store_of(hybrid, budget_tokens, disk=tier, **options)


def test_division_of_what_is_on_disk(tmp_path: Path) -> None:
    store = store_on(tmp_path)
    put(store, run(0, 100))
    put(store, run(0, 30) + run(500, 10))  # divides in memory, file stays
    put(store, run(0, 70) + run(600, 10))  # divides the lower part again
    store.close()
    again = store_on(tmp_path)
    put(again, run(0, 50) + run(700, 10))  # divides what is on disk only
    again.close()
    third = store_on(tmp_path)
    for tokens in (run(0, 100), run(0, 30) + run(500, 10), run(0, 70) + run(600, 10), run(0, 50) + run(700, 10)):
        assert restored(third, tokens) == tokens


def test_kv_is_told_as_evicted_once_it_is_not_on_disk_either(tmp_path: Path) -> None:
    listener, clock = Mock(), Clock()

    def told() -> list[list[int]]:
        return [list(memoryview(raw).cast("i")) for (_, _, raw), _ in listener.evicted.call_args_list]

    store = store_on(tmp_path, budget_tokens=150, clock=clock, listener=listener)
    for number in range(3):
        clock.now += 1
        put(store, run(number * 1000, 90))
        assert store.disk.flush()
    assert store.stats()["evicted"] and told() == []
    for file in next(tmp_path.iterdir()).glob("r*"):
        file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    tokens = tuple(run(0, 90))
    assert store.restore(tokens, store.lookup(tokens)).length == 0
    assert told() == [run(0, 90)]


def test_damage_costs_the_rest_of_the_path_only(tmp_path: Path) -> None:
    store = store_on(tmp_path)
    put(store, run(0, 40))
    put(store, run(0, 80))
    put(store, run(0, 120))
    store.close()
    again = store_on(tmp_path)
    files = sorted((p for p in next(tmp_path.iterdir()).glob("r*")), key=lambda p: int(p.name[1:].split("-")[0]))
    files[1].write_bytes(files[1].read_bytes()[:-4] + b"\0\0\0\1")
    plan = again.lookup(tuple(run(0, 120)))
    assert plan.length == 120  # not known yet
    got = again.restore(tuple(run(0, 120)), plan)
    assert got.length == 40 and tiny.read_known(got.cache) == run(0, 40)
    assert again.lookup(tuple(run(0, 120))).reason == "evicted"
    put(again, run(0, 120))
    again.close()
    third = store_on(tmp_path)
    assert restored(third, run(0, 120)) == run(0, 120)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    store = store_on(tmp_path, hybrid=True)
    put(store, run(0, 40), hybrid=True)
    put(store, run(0, 80), hybrid=True)
    store.close()
    again = store_on(tmp_path, hybrid=True)
    plan = again.lookup(tuple(run(0, 80)))
    newest = max(next(tmp_path.iterdir()).glob("c*"), key=lambda p: p.stat().st_mtime_ns)
    newest.write_bytes(b"")
    got = again.restore(tuple(run(0, 80)), plan)
    assert got.length == 40 and tiny.read_known(got.cache) == run(0, 40)


def test_side_requests_are_written_with_what_stands_on_them_or_when_the_model_is_unloaded(tmp_path: Path) -> None:
    store = store_on(tmp_path)
    put(store, run(0, 50), one_shot=True)
    put(store, run(500, 50), one_shot=True)
    store.disk.flush()
    assert store.stats()["disk_files"] == 0
    put(store, run(0, 80))  # something lasting stands on the first one now
    store.disk.flush()
    assert store.stats()["disk_files"] == 2
    store.disk.write_all()
    store.close()
    again = store_on(tmp_path)
    assert restored(again, run(0, 80)) == run(0, 80)
    assert restored(again, run(500, 50)) == run(500, 50)


def test_outgrown_checkpoints_leave_the_disk(tmp_path: Path) -> None:
    store = store_on(tmp_path, hybrid=True, checkpoints_recent=2, checkpoint_grid=100)
    for end in range(10, 301, 10):
        put(store, run(0, end), hybrid=True)
    store.disk.flush()
    assert len(list(next(tmp_path.iterdir()).glob("c*"))) == store.stats()["checkpoints"] <= 12


def test_large_checkpoints_wait_until_the_conversation_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "_LARGE", 0)
    store = store_on(tmp_path, hybrid=True)
    for end in range(10, 101, 10):
        put(store, run(0, end), hybrid=True)
    assert store.stats()["disk_waiting_large"] == 10
    store.idle()
    store.close()
    assert len(list(next(tmp_path.iterdir()).glob("c*"))) == 3  # of ten, those at the end
    again = store_on(tmp_path, hybrid=True)
    assert restored(again, run(0, 100)) == run(0, 100)


def test_a_small_queue_is_filled_again_and_again(tmp_path: Path) -> None:
    store = store_on(tmp_path, queue_bytes=1000)
    for n in range(20):
        put(store, run(n * 1000, 90))
    assert store.disk.flush()
    store.idle()
    assert store.stats()["disk_waiting_segments"] == 0
    store.close()
    again = store_on(tmp_path)
    assert all(again.lookup(tuple(run(n * 1000, 90))).length == 90 for n in range(20))


def test_clear_keeps_what_is_on_disk(tmp_path: Path) -> None:
    store = store_on(tmp_path)
    put(store, run(0, 50))
    put(store, run(100, 50), one_shot=True)
    store.clear()
    assert store.stats()["bytes"] == 0
    assert restored(store, run(0, 50)) == run(0, 50)
    assert store.lookup(tuple(run(100, 50))).seen == 0


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_folder_that_another_server_has_is_taken_over(tmp_path: Path, hybrid: bool) -> None:
    first = store_on(tmp_path, hybrid)
    put(first, run(0, 100), hybrid)
    put(first, run(0, 100) + run(200, 50), hybrid)
    put(first, run(0, 60) + run(300, 50), hybrid)
    put(first, run(900, 30), hybrid)
    kit = LayerKit(lambda: tiny.known_cache([], hybrid))
    tier = adjusted(retry_seconds=0.05)(tmp_path, "model", MAX)
    second = KVStore(kit, StoreConfig(1 << 20), disk=tier)
    put(second, run(0, 80), hybrid)  # a part of what the other has, divided elsewhere
    put(second, run(0, 20) + run(400, 10), hybrid)
    put(second, run(0, 60) + run(300, 70), hybrid)
    assert not second.disk.flush(1)
    first.close()
    while tier.detail:
        time.sleep(0.01)
    second.idle()
    for tokens in (run(0, 100) + run(200, 50), run(0, 60) + run(300, 70), run(0, 20) + run(400, 10), run(900, 30)):
        assert restored(second, tokens) == tokens
    put(second, run(0, 120), hybrid)
    assert second.disk.flush()
    assert second.stats()["bytes"] == held_bytes(second)
    second.close()
    third = store_on(tmp_path, hybrid)
    for tokens in (run(0, 100) + run(200, 50), run(0, 60) + run(300, 50), run(0, 120), run(900, 30)):
        assert restored(third, tokens) == tokens


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    store = store_on(tmp_path)
    put(store, run(0, 50))
    store.close()
    tier = DiskTier(tmp_path, "model", MAX)
    other = KVStore(LayerKit(lambda: [KVCache(), KVCache()]), StoreConfig(1 << 20), disk=tier)
    assert other.restore(tuple(run(0, 50)), other.lookup(tuple(run(0, 50)))).length == 0


def right(store: KVStore, tokens: list[int], damaged: bool) -> int:
    """What is restored is the beginning of `tokens`, and what was planned unless something is damaged. Its length."""
    plan = store.lookup(tuple(tokens))
    got = store.restore(tuple(tokens), plan)
    assert tiny.read_known(got.cache) == tokens[: got.length]
    assert damaged or got.length == plan.length
    store.take_back(got.cache)
    return got.length


small = st.lists(st.integers(0, 2), min_size=1, max_size=24)
kinds = st.sampled_from(["put", "extend", "put", "extend", "find", "restart", "damage"])


@settings(max_examples=rounds(120, 20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(kinds, small), max_size=15), st.booleans(), st.sampled_from([20, 10_000]), st.integers())
def test_nothing_is_lost_or_mixed_up(
    steps: list[tuple[str, list[int]]], hybrid: bool, budget_tokens: int, seed: int
) -> None:
    """Damage of any file may lose something, and mixes up nothing; what comes later is kept."""
    with memory_folder() as folder:
        clock, stored, damaged, chance = Clock(), list[list[int]](), False, random.Random(seed)
        store = store_on(folder, hybrid, budget_tokens, clock=clock)
        for kind, tokens in steps:
            clock.now += 1
            if kind == "restart":
                store.close()
                store = store_on(folder, hybrid, budget_tokens, clock=clock)
            elif kind == "find":
                right(store, tokens, damaged)
            elif kind == "damage":
                store.disk.flush(60)
                inside = next(folder.iterdir())
                if any(inside.iterdir()):
                    damage_somewhere(inside, chance)
                damaged = True
            else:
                if kind == "extend" and stored:
                    tokens = stored[-1] + tokens
                put(store, tokens, hybrid)
                stored.append(tokens)
            assert store.stats()["bytes"] == held_bytes(store)
            assert hybrid or store.stats()["bytes"] <= budget_tokens * TOKEN_BYTES
        if not hybrid and not damaged:
            assert [right(store, tokens, damaged) for tokens in stored] == [len(tokens) for tokens in stored]
        store.close()
        store = store_on(folder, hybrid, clock=clock)
        for tokens in stored:
            length = right(store, tokens, damaged)
            assert hybrid or damaged or length == len(tokens)
        if hybrid and not damaged and budget_tokens >= 10_000:
            assert not stored or right(store, stored[-1], damaged) == len(stored[-1])
        put(store, run(9000, 60), hybrid)
        assert store.disk.flush(60), "the tier does not write any more"
        store.close()
        store = store_on(folder, hybrid)
        assert right(store, run(9000, 60), damaged=False) == 60
        store.close()
