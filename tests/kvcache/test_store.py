from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.core.prompt import Prompt
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.types import StoredEnd
from tests.clock import Clock
from tests.kinds import rounds
from tests.kvcache.tiny import WINDOW, known_cache, random_tokens, read_known

TOKEN_BYTES = 8  # of a known_cache: one float32 key and value a token
STATE_BYTES = 8 + WINDOW * TOKEN_BYTES  # of its hybrid form, where no window is shared


def store_of(hybrid: bool = False, budget_tokens: int = 1 << 20, **options: Any) -> KVStore:
    """`options`: `clock`, `disk`, `listener`, and settings of the `StoreConfig`."""
    outside = {name: options.pop(name) for name in ("clock", "disk", "listener") if name in options}
    config = StoreConfig(budget_tokens * TOKEN_BYTES, **options)
    return KVStore(LayerKit(lambda: known_cache([], hybrid)), config, **outside)


def put(store: KVStore, tokens: list[int], hybrid: bool = False, **options: Any) -> None:
    store.put(tuple(tokens), known_cache(tokens, hybrid), StoredEnd(**options))


def restored(store: KVStore, tokens: list[int], limit: int | None = None) -> list[int]:
    plan = store.lookup(tuple(tokens), limit)
    got = store.restore(tuple(tokens), plan)
    assert got.length == plan.length
    held = read_known(got.cache)
    store.take_back(got.cache)
    return held


def run(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_wrong_length_is_refused_loudly() -> None:
    with pytest.raises(ValueError, match="holds 5 tokens, but 6"):
        store_of().put(tuple(range(6)), known_cache(run(0, 5)))


def test_hybrid_restores_at_checkpoints_only() -> None:
    store = store_of(hybrid=True)
    put(store, run(0, 40), hybrid=True, checkpoint=False)
    plan = store.lookup(tuple(run(0, 40)))
    assert (plan.length, plan.matched) == (0, 40)
    put(store, run(0, 40), hybrid=True)
    put(store, run(0, 90), hybrid=True)
    plan = store.lookup(tuple(run(0, 89)))
    assert (plan.length, plan.matched, plan.reason) == (40, 89, "no_checkpoint")
    assert restored(store, run(0, 91)) == run(0, 90)
    assert restored(store, run(0, 90), limit=89) == run(0, 40)
    assert store.stats()["bytes"] == 90 * TOKEN_BYTES + 2 * STATE_BYTES
    put(store, run(0, 60), hybrid=True)  # inside of what is stored
    assert restored(store, [*run(0, 70), 7]) == run(0, 60)
    assert store.stats()["bytes"] == 90 * TOKEN_BYTES + 3 * STATE_BYTES


def test_states_of_an_answer_are_checkpoints_inside_of_it() -> None:
    store = store_of(hybrid=True)
    put(store, run(0, 40), hybrid=True)
    states = [(length, known_cache(run(0, length), hybrid=True)) for length in (40, 60)]
    put(store, run(0, 90), hybrid=True, states=states)
    assert restored(store, [*run(0, 70), 7]) == run(0, 60)  # a call that came back in other words
    assert restored(store, [*run(0, 55), 7]) == run(0, 40)
    assert restored(store, run(0, 90)) == run(0, 90)
    assert store.stats()["checkpoints"] == 3


def test_pauses_stand_at_boundaries_and_partings() -> None:
    store = store_of(hybrid=True, checkpoints_recent=2, checkpoint_grid=1000)
    tokens = run(0, 100)
    prompt = Prompt(tuple(tokens), boundaries=(10, 30, 50, 80), system_end=20, transient=90, generation=95)
    assert store.stops(prompt, 0) == (20, 50, 80, 90, 95)
    assert store.stops(prompt, 50) == (80, 90, 95)
    assert store_of().stops(prompt, 0) == ()
    put(store, run(0, 40) + run(900, 10), hybrid=True)
    assert store.stops(prompt, 0) == (20, 40, 50, 80, 90, 95)  # 40: where this prompt leaves the stored path
    put(store, run(0, 40), hybrid=True)
    put(store, tokens, hybrid=True)
    assert 40 not in store.stops(prompt, 0)  # has its checkpoint now


def test_side_requests_and_sub_agents_do_not_push_a_session_out() -> None:
    clock = Clock()
    for hybrid in (False, True):
        main = random_tokens(8000)
        store = store_of(hybrid, budget_tokens=3 * 8100, clock=clock)
        put(store, main[:4000], hybrid, session="main", seconds_per_token=0.01)
        put(store, main, hybrid, session="main", seconds_per_token=0.01, calls=True)
        for n in range(80):
            clock.now += 1
            put(store, random_tokens(500, seed=n + 10), hybrid, one_shot=True, session="main")
        for n in range(8):
            agent = main[:100] + random_tokens(4900, seed=n + 1000)  # the same tools
            for turn in (3000, 4000, 5000):
                clock.now += 1
                put(store, agent[:turn], hybrid, session=f"agent {n}", seconds_per_token=0.01, calls=turn < 5000)
        assert store.lookup(tuple(main)).length == 8000
        assert store.stats()["bytes"] <= 3 * 8100 * TOKEN_BYTES
        assert store.lookup((*main[:100], *random_tokens(4900, seed=1007))).length == 5000  # the one that ran last
        assert store.lookup((*main[:100], *random_tokens(4900, seed=1000))).length <= 100


def test_room_for_work_that_nobody_asked_for() -> None:
    clock = Clock()
    store = store_of(budget_tokens=1000, clock=clock, session_idle_seconds=60)
    put(store, run(0, 600), session="main")
    put(store, run(5000, 400), one_shot=True)
    assert store.has_room(400) and not store.has_room(401)
    clock.now += 61
    assert store.has_room(1000)


def test_one_owner_does_not_shift_what_another_ones_session_of_the_same_name_keeps() -> None:
    clock = Clock()
    store = store_of(budget_tokens=1000, clock=clock)
    put(store, run(0, 400), session="main", owner="ann")
    for start in (2000, 4000, 6000):  # more ends than are kept of one conversation
        clock.now += 1
        put(store, run(start, 200), session="main", owner="bob")
    put(store, run(9000, 300))  # of no conversation
    assert store.lookup(tuple(run(0, 400))).length == 400
    assert store.lookup(tuple(run(2000, 200))).length == 0, "bob's oldest end, which he has left behind"
    assert store.stats()["sessions"] == 2


def test_costly_and_often_used_leaves_stay() -> None:
    clock = Clock()
    store = store_of(budget_tokens=250, clock=clock)
    put(store, run(0, 100), seconds_per_token=0.1)
    put(store, run(1000, 100), seconds_per_token=0.001)
    put(store, run(2000, 100), seconds_per_token=0.1)
    assert [store.lookup(tuple(run(s, 100))).length for s in (0, 1000, 2000)] == [100, 0, 100]
    assert store.lookup(tuple(run(1000, 100))).seen == 100


def test_time_to_live_works_while_nothing_runs() -> None:
    clock = Clock()
    store = store_of(ttl_seconds=100, clock=clock)
    put(store, run(0, 50))
    clock.now += 60
    put(store, run(100, 50))
    clock.now += 50
    store.idle()
    assert store.lookup(tuple(run(0, 50))).reason == "evicted"
    assert [store.lookup(tuple(run(start, 50))).length for start in (0, 100)] == [0, 50]
    clock.now += 60
    put(store, run(200, 50))  # whoever stores looks at it, too
    assert (store.stats()["bytes"], store.lookup(tuple(run(100, 50))).length) == (50 * TOKEN_BYTES, 0)


@pytest.mark.parametrize("how", ["bytes", "age", "budget", "clear"])
def test_memory_of_evicted_kv_goes_back_to_the_system(how: str) -> None:
    clock = Clock()
    store = store_of(budget_tokens=50_000, ttl_seconds=100, clock=clock)
    put(store, run(0, 40_000))
    running = known_cache(run(100_000, 40_000))
    mx.clear_cache()
    before = mx.get_active_memory()
    clock.now += 101 if how == "age" else 0
    {
        "bytes": lambda: store.put(tuple(run(100_000, 40_000)), running),
        "age": store.idle,
        "budget": lambda: store.set_budget(1000),
        "clear": store.clear,
    }[how]()
    assert mx.get_cache_memory() < 100 * TOKEN_BYTES
    assert how == "bytes" or mx.get_active_memory() <= before - 40_000 * TOKEN_BYTES
    assert running


def test_a_row_is_estimated_by_what_was_stored() -> None:
    store = store_of()
    assert store.resident.sizes.estimate(1000) == 0
    put(store, run(0, 50))
    assert store.resident.sizes.estimate(1000) == 1000 * TOKEN_BYTES
    hybrid = store_of(hybrid=True)
    put(hybrid, run(0, 50), hybrid=True)
    put(hybrid, run(0, 52), hybrid=True)  # shares most of its window with the checkpoint before
    assert hybrid.resident.sizes.estimate(1000) == 1000 * TOKEN_BYTES + STATE_BYTES


def test_evicted_text_is_remembered_within_bounds() -> None:
    clock = Clock()
    store = store_of(budget_tokens=100, ghost_tokens=500, clock=clock)
    for n in range(20):
        clock.now += 1
        put(store, run(n * 100, 90))
    assert store.stats()["ghost_tokens"] <= 500
    assert store.lookup(tuple(run(0, 90))).seen == 0  # the oldest is forgotten
    assert store.lookup(tuple(run(1800, 90))).seen == 90


def test_texts_that_were_used_at_the_same_time_are_forgotten_from_their_ends() -> None:
    store = store_of(clock=Clock())
    put(store, run(0, 90))
    put(store, [*run(0, 60), *run(1000, 30)])
    store.clear()
    assert (store.stats()["ghost_tokens"], store.stats()["bytes"]) == (0, 0) and not list(store.resident.tree)


def test_old_checkpoints_thin_out_to_the_grid() -> None:
    store = store_of(hybrid=True, checkpoints_recent=4, checkpoint_grid=100)
    for end in range(10, 1010, 10):
        put(store, run(0, end), hybrid=True)
    stats = store.stats()
    assert stats["checkpoints"] <= 4 + 1000 / 100 * 2 + 1
    previous = 0
    for limit in range(1001):
        length = store.lookup(tuple(run(0, 1000)), limit=limit).length
        assert length >= previous and limit - length <= 100
        previous = length
    for end in (960, 970, 980, 990, 1000):
        assert store.lookup(tuple(run(0, 1000)), limit=end).length == end, "the most recent ones stay"
    assert store.lookup(tuple(run(0, 1000)), limit=959).length < 950


def test_a_system_text_outlasts_the_conversations_behind_it() -> None:
    clock = Clock()
    system = random_tokens(500)
    store = store_of(hybrid=True, budget_tokens=1100, clock=clock, checkpoint_grid=100)
    for n in range(12):
        clock.now += 1
        tokens = tuple(system + random_tokens(200, seed=n + 1))
        prompt = Prompt(tokens, boundaries=(500, 600), system_end=500, generation=700)
        plan = store.lookup(tokens)
        assert n == 0 or plan.length == 500
        start = store.restore(tokens, plan).length
        for stop in store.stops(prompt, start):
            put(store, list(tokens[:stop]), hybrid=True, session=str(n), system_end=stop == prompt.system_end)
        put(store, list(tokens), hybrid=True, session=str(n))


def test_another_agent_of_the_same_client_computes_its_difference() -> None:
    """Its tools part from the first one's somewhere in the system text, far in front of that text's end."""
    head, parting = random_tokens(4000), 1000
    store = store_of(hybrid=True)
    put(store, random_tokens(2, seed=1), hybrid=True)  # what a token takes is known
    prompt = Prompt(tuple(head + random_tokens(200, seed=2)), boundaries=(4000,), system_end=4000, generation=4195)
    for stop in store.stops(prompt, 0):
        put(store, list(prompt.tokens[:stop]), hybrid=True, session="main", system_end=stop == 4000, answered=False)
    put(store, list(prompt.tokens), hybrid=True, session="main")
    other = tuple(head[:parting] + random_tokens(500, seed=3))
    assert parting - 128 <= store.lookup(other).length <= parting


@pytest.mark.parametrize(("budget", "lost"), [(1070, 0), (1030, 60)])
def test_checkpoints_thin_before_a_session_loses_tokens_and_these_are_at_its_end(budget: int, lost: int) -> None:
    """But for those that are kept to the last, without which its end could not go alone."""
    store = store_of(hybrid=True, budget_tokens=budget, checkpoints_recent=64, checkpoint_grid=10)
    for end in range(20, 1001, 20):
        put(store, run(0, end), hybrid=True, session="main")
    assert store.lookup(tuple(run(0, 1000))).length >= 1000 - lost
    stats = store.stats()
    assert stats["bytes"] <= budget * TOKEN_BYTES and 1 <= stats["checkpoints"] <= 40


small = st.lists(st.integers(0, 2), min_size=1, max_size=24)
operations = st.lists(st.tuples(st.sampled_from(["put", "extend", "find", "wait"]), small), max_size=25)


@settings(max_examples=rounds(80), deadline=None)
@given(operations, st.booleans(), st.sampled_from([15, 40, 10_000]))
def test_against_a_list_of_sequences(steps: list[tuple[str, list[int]]], hybrid: bool, budget_tokens: int) -> None:
    clock = Clock()
    store = store_of(hybrid, budget_tokens=budget_tokens, clock=clock, checkpoint_grid=8, checkpoints_recent=2)
    stored: list[list[int]] = []
    for kind, tokens in steps:
        clock.now += 1
        if kind == "wait":
            clock.now += 100
        elif kind == "find":
            check_lookup(store, stored, tokens, hybrid, budget_tokens)
        else:
            if kind == "extend" and stored:
                tokens = stored[-1] + tokens
            put(store, tokens, hybrid, session=str(tokens[0]), one_shot=tokens[-1] == 0)
            stored.append(tokens)
            check_lookup(store, stored, tokens, hybrid, budget_tokens)
        check_accounts(store, budget_tokens)


def check_lookup(store: KVStore, stored: list[list[int]], tokens: list[int], hybrid: bool, budget: int) -> None:
    longest = max((shared(tokens, other) for other in stored), default=0)
    plan = store.lookup(tuple(tokens))
    assert plan.length <= plan.matched <= plan.seen == longest
    if budget >= 10_000 and not hybrid:
        assert plan.length == longest
    if budget >= 10_000 and hybrid and tokens in stored[-1:]:
        assert plan.length == longest
    assert restored(store, tokens) == tokens[: plan.length]


def held_bytes(store: KVStore) -> int:
    """Counted afresh: rows, states, and every shared piece once."""
    checkpoints = [s.checkpoint for s in store.resident.tree if s.checkpoint is not None]
    pieces = {id(piece): piece.nbytes for checkpoint in checkpoints for piece in checkpoint.pieces()}
    return (
        sum(s.nbytes - s.checkpoint_bytes for s in store.resident.tree)
        + sum(c.own_bytes for c in checkpoints)
        + sum(pieces.values())
    )


def check_accounts(store: KVStore, budget_tokens: int) -> None:
    segments = list(store.resident.tree)
    assert store.stats()["bytes"] == held_bytes(store) <= budget_tokens * TOKEN_BYTES
    assert store.stats()["ghost_tokens"] == sum(len(s.tokens) for s in segments if s.rows is None)
    for segment in segments:
        assert segment.rows is None or segment.rows.length == len(segment.tokens)
        above = segment.parent
        assert above is not None and above.end == segment.start and above.children[int(segment.tokens[0])] is segment
        if segment.rows is not None and above.parent is not None:
            assert above.rows is not None


def shared(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
