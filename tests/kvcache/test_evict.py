from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache

from start_llm.kvcache.evict import checkpoint_rank, near_end, nearest_ends, rank, thin_after, value, whole_paths
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.sessions import Claim, Strength
from start_llm.kvcache.store import KVStore
from start_llm.kvcache.types import StoreConfig, StoredEnd
from tests.kinds import rounds
from tests.kvcache.segments import fake_tree, grow

WEAK, STRONG = Strength(Claim.IN_PROGRESS, 0.1, 5.0), Strength(Claim.IN_PROGRESS, 0.2, 5.0)
STRONGEST = Strength(Claim.IN_PROGRESS, 0.3, 5.0)
CONFIG = StoreConfig(0, checkpoints_recent=2, checkpoint_grid=20)


def test_value_is_cost_times_use_by_bytes_and_age() -> None:
    tree = fake_tree()
    leaf = grow(tree, list(range(10)))
    leaf.seconds_per_token, leaf.uses, leaf.used = 0.5, 3, 100.0
    assert value(leaf, 109.0) == (0.5 * 10) * 3 / (100 * 10)


def test_rank_goes_from_useless_to_protected() -> None:
    tree = fake_tree()
    useless, side, plain, young, old = (grow(tree, [n, n + 1], checkpoint=n > 0) for n in range(0, 50, 10))
    side.one_shot = True
    strengths = {id(young): WEAK, id(old): STRONGEST}
    leaves = [old, plain, young, side, useless]
    ordered = sorted(leaves, key=lambda s: rank(s, strengths, False, 10.0))
    assert ordered == [useless, side, plain, young, old]
    assert rank(useless, {}, True, 10.0)[0] == 2  # where all can be cut, no checkpoint is missed
    assert rank(useless, {id(useless): WEAK}, False, 10.0)[0] == 0  # whoever it belongs to


def test_a_path_is_as_strong_as_the_strongest_end_that_stands_on_it() -> None:
    tree = fake_tree(longest=5)
    weak, strong = grow(tree, list(range(20))), grow(tree, [*range(10), *range(50, 60)])
    other = grow(tree, [99])
    ends = {id(weak): WEAK, id(strong): STRONG}
    strengths = whole_paths(tree, ends)
    assert id(other) not in strengths
    for end, above in ((weak, weak.parent), (strong, strong.parent)):
        assert above is not None and strengths[id(end)] == strengths[id(above)] == ends[id(end)]
    assert all(strengths[id(segment)] == ends[id(strong)] for segment in weak.ancestors() if segment.end <= 10)


def test_thinning_stops_at_a_branch() -> None:
    tree = fake_tree()
    for stop in range(5, 51, 5):
        grow(tree, list(range(stop)), checkpoint=True)
    grow(tree, [*range(50), 900], checkpoint=True)
    end = grow(tree, [*range(50), 800], checkpoint=True)
    assert thin_after(end, CONFIG) == []


def test_a_head_outlasts_what_lies_before_and_behind_it() -> None:
    tree = fake_tree()
    for stop in range(10, 101, 10):
        end = grow(tree, list(range(stop)), checkpoint=True)
        end.head = stop == 40
    grow(tree, [*range(40), 500], checkpoint=True)  # another conversation, unprotected
    strengths = whole_paths(tree, {id(end): WEAK})
    ends = nearest_ends(tree, {id(end): WEAK})
    inside = [s for s in tree if s.checkpoint is not None and not s.is_leaf]
    ordered = [s.end for s in sorted(inside, key=lambda s: checkpoint_rank(s, strengths, ends[id(s)], 10.0, 1000))]
    assert ordered[-1] == 40
    assert set(ordered[-3:-1]) == {80, 90}  # the next request may well land here
    leaf = next(s for s in tree if s.is_leaf and s is not end)
    levels = {s.end: checkpoint_rank(s, strengths, ends[id(s)], 10.0, 1000)[0] for s in inside}
    assert levels[40] > rank(leaf, {}, False, 10.0)[0] > levels[50]


def test_a_head_stays_as_long_as_kv_of_a_conversation_that_begins_with_it() -> None:
    """However often that KV was used: without the head, nothing of it may be left to go on from."""
    tree = fake_tree()
    head = grow(tree, list(range(10)), checkpoint=True)
    head.head = True
    end = grow(tree, list(range(100)), checkpoint=True)
    end.uses = 10**6
    weak, strong = WEAK, STRONG
    strengths = whole_paths(tree, {id(end): weak})
    its = checkpoint_rank(head, strengths, (1, 90), 9.0, 1000)
    assert rank(end, strengths, False, 9.0) < its < rank(end, {id(end): strong}, False, 9.0)
    head.used = 5.0
    later = checkpoint_rank(head, {}, (1000, 0), 9.0, 1000)
    head.used = 8.0
    assert later < checkpoint_rank(head, {}, (1000, 0), 9.0, 1000), (
        "with nobody in progress the least valuable goes first"
    )


def test_a_few_checkpoints_stay_until_the_end_has_gone() -> None:
    tree = fake_tree()
    for stop in range(2000, 40001, 2000):
        end = grow(tree, list(range(stop)), checkpoint=True, used=5.0)
    ends = {id(end): WEAK}
    strengths, nearest = whole_paths(tree, ends), nearest_ends(tree, ends)
    ranks = {s.end: checkpoint_rank(s, strengths, nearest[id(s)], 9.0, 5000) for s in tree if not s.is_leaf}
    first = rank(end, strengths, False, 9.0)
    # Windows are 5,000 wide up to 16,384 tokens from the end, then 10,000 and, at 2,000 to 7,232, 20,000.
    assert [place for place, its in ranks.items() if its > first] == [10000, 20000, 26000, 30000, 36000]
    assert ranks[2000] < rank(grow(tree, [7]), {}, True, 9.0)


@pytest.mark.parametrize("width, window", [(4, 512), (16, 1024), (100, 2560), (400, 5120)])
def test_windows_are_as_wide_as_the_square_root_of_a_state(width: int, window: int) -> None:
    """So a model with small states loses little where KV has to go at a checkpoint, and one with large states does not
    lose its memory to them."""
    kept = states_kept(width)
    far = [place for place in kept if place <= 12_000]
    assert set(far) >= set(range(window, 12_001, window))
    assert len(far) <= 12_000 // window + 1


def long_conversation(width: int, budget_bytes: int = 1 << 40, most: int = 16_000, **about: Any) -> KVStore:
    """A conversation with a state each 64 tokens that takes as much as the KV of `width` tokens, 4 bytes each."""
    kit = LayerKit(lambda: [KVCache(), ArraysCache(1)])
    store = KVStore(kit, StoreConfig(budget_bytes, checkpoint_grid=64, checkpoints_recent=0))
    converse(store, width, most, **about)
    return store


def converse(
    store: KVStore, width: int, most: int, first: int = 0, session: str | None = "a", states_each: int = 64
) -> None:
    """`first`: the first token. `states_each`: after so many tokens a state is stored."""
    cache: list[Any] = [KVCache(), ArraysCache(1)]
    for stop in range(64, most + 1, 64):
        rows = mx.zeros((1, 1, 64, 1), mx.float16)
        cache[0].update_and_fetch(rows, rows)
        cache[1][0] = mx.zeros((1, 2 * width), mx.float16)
        end = StoredEnd(session=session, answered=stop == most, checkpoint=stop % states_each == 0)
        store.put(range(first, first + stop), cache, end)


def states_kept(width: int) -> list[int]:
    """Places of the states of a conversation of 16,000 tokens, with memory for its KV and five of them."""
    store = long_conversation(width, 4 * (16_000 + 5 * width))
    return [s.end for s in store.resident.tree if s.checkpoint is not None]


def test_the_last_states_of_a_conversation_go_after_kv_of_nobody_in_progress() -> None:
    store = long_conversation(4, most=1024)
    converse(store, 4, 192, first=5000, session=None)
    inside = sum(s.checkpoint_bytes for s in store.resident.tree if not s.is_leaf)
    store.set_budget(store.resident.nbytes - inside)
    assert {s.end for s in store.resident.tree if s.checkpoint is not None} == {512, 896, 960, 1024}
    assert not store.lookup(range(5000, 5192)).length


@settings(max_examples=rounds(15), deadline=None)
@given(st.integers(4, 900), st.integers(2000, 8000))
def test_kv_goes_down_to_the_deepest_state_that_there_is_room_for(width: int, budget_tokens: int) -> None:
    """Whichever states would have stayed anyway."""
    store = long_conversation(width, most=8000)
    store.set_budget(4 * budget_tokens)
    kept = [s.end for s in store.resident.tree if s.checkpoint is not None]
    left = store.lookup(range(8000)).length
    assert store.stats()["bytes"] <= 4 * budget_tokens
    assert left == max(kept, default=0)
    # There was no room to end one state later, with all that stay in front of it.
    assert left + 64 + width * (len(kept) + 1) > budget_tokens


def two_conversations() -> KVStore:
    """Of 640 tokens each, with a state each 64 tokens that takes as much as the KV of 20. The first one is weaker."""
    store = long_conversation(20, most=640)
    converse(store, 20, 640, first=5000, session="b")
    return store


@pytest.mark.parametrize(("tokens", "left"), [(0, 640), (1, 576), (64, 576), (65, 512), (500, 128), (620, 0)])
def test_the_weakest_conversation_goes_down_to_a_state_that_there_is_room_for(tokens: int, left: int) -> None:
    """So many tokens have to go beside all states inside conversations; the state at its end goes with it."""
    store = two_conversations()
    store.set_budget(store.resident.nbytes - 4 * (18 * 20 + tokens))
    assert store.lookup(range(640)).length == left
    assert store.lookup(range(5000, 5640)).length == 640
    assert store.stats()["checkpoints"] == 1 + (left > 0)


@pytest.mark.parametrize(
    ("session", "tokens", "left", "kept"), [("a", 1, 512, 576), (None, 1, 0, 576), ("a", 80, 512, 512)]
)
def test_the_last_state_in_front_of_kv_that_has_none_comes_back(
    session: str | None, tokens: int, left: int, kept: int
) -> None:
    """That of a conversation in progress, and no other one, even where more of what has none goes. So many `tokens`
    have to go beside all states inside."""
    store = long_conversation(20, most=640, session=session, states_each=128)
    store.set_budget(store.resident.nbytes - 4 * (4 * 20 + tokens))
    assert store.lookup(range(640)).length == left
    assert store.stats()["tokens"] == kept
    assert store.stats()["checkpoints"] == (left > 0)


def test_a_running_conversation_is_not_cut() -> None:
    store = two_conversations()
    running = store.restore(range(641), store.lookup(range(641)))
    store.set_budget(store.resident.nbytes - 4 * (18 * 20 + 300))
    assert 0 < store.lookup(range(5000, 5640)).length < 640 == store.lookup(range(640)).length
    store.take_back(running.cache)


def test_ends_below_a_place_are_told_by_the_nearest() -> None:
    tree = fake_tree()
    grow(tree, list(range(10)), checkpoint=True)
    far = grow(tree, list(range(50)), checkpoint=True)
    near = grow(tree, [*range(10), *range(90, 95)], checkpoint=True)
    other = grow(tree, [700])
    nearest = nearest_ends(tree, {id(far): WEAK, id(near): WEAK})
    assert near.parent is not None and nearest[id(near.parent)] == (1, 5)
    assert nearest[id(far)] == nearest[id(near)] == (0, 0) and id(other) not in nearest


def test_checkpoints_are_worth_what_their_loss_costs() -> None:
    tree = fake_tree()
    near, far = (grow(tree, list(range(stop)), checkpoint=True) for stop in (10, 90))
    grow(tree, list(range(100)), checkpoint=True)
    assert checkpoint_rank(near, {}, (9, 0), 0.0, 1000) < checkpoint_rank(far, {}, (9, 0), 0.0, 1000)  # 10 back, or 80
    near.landed = 9
    assert checkpoint_rank(near, {}, (9, 0), 0.0, 1000) > checkpoint_rank(far, {}, (9, 0), 0.0, 1000)
    far.checkpoint = None
    after = checkpoint_rank(grow(tree, list(range(95)), checkpoint=True), {}, (9, 0), 0.0, 1000)
    far.checkpoint = near.checkpoint
    assert after > checkpoint_rank(tree.walk(np.arange(95, dtype=np.int32)).path[-1], {}, (9, 0), 0.0, 1000)


def test_near_end() -> None:
    tree = fake_tree()
    ends = [grow(tree, list(range(stop)), checkpoint=True) for stop in (10, 20, 30, 40)]
    assert [near_end(end) for end in ends] == [False, True, True, True]
