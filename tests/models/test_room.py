"""Which models share the memory: pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.errors import OutOfMemory
from start_llm.models.device import GIB, LEAST_CACHE_BYTES, PREFILL_BYTES, Device, check_fit
from start_llm.models.room import PoolLimits, Resident, Weights, least_bytes, outlived, room_for, to_free, together


def model(key: str, weights: int = GIB, used: float = 0.0, working: bool = False, pinned: bool = False) -> Resident:
    return Resident(key, f"name-{key}", Weights(weights), used, working, pinned)


def adapted(key: str, own: int = 0, used: float = 0.0, working: bool = False) -> Resident:
    """One of those that share the GiB of "base"."""
    return Resident(key, f"name-{key}", Weights(own, "base", GIB), used, working)


def new(weights: int) -> Resident:
    return Resident("new", "new", Weights(weights))


def budget(*weights: int) -> PoolLimits:
    return PoolLimits(PREFILL_BYTES + sum(weights) + len(weights) * LEAST_CACHE_BYTES)


def test_what_fits_pushes_nobody_out() -> None:
    assert room_for(new(GIB), [model("a")], budget(GIB, GIB)) == []
    assert room_for(new(GIB), [], budget(GIB)) == []
    assert room_for(new(10**15), [model("a")], PoolLimits(0)) == [], "0 is no limit"


def test_the_one_that_was_not_used_for_longest_goes_first_and_no_more_than_needed() -> None:
    three = [model("late", used=3), model("early", used=1), model("middle", used=2)]
    assert room_for(new(GIB), three, budget(GIB, GIB, GIB)) == ["early"]
    assert room_for(new(2 * GIB), three, budget(GIB, GIB, GIB)) == ["early", "middle"]
    assert room_for(new(GIB), three, PoolLimits(0, most=3)) == ["early"]
    assert room_for(new(GIB), three, PoolLimits(0, most=1)) == ["early", "middle", "late"]


def test_pinned_ones_and_those_at_work_stay() -> None:
    stay = [model("p", used=1, pinned=True), model("w", used=2, working=True), model("free", used=3)]
    assert room_for(new(GIB), stay, budget(GIB, GIB, GIB)) == ["free"]
    with pytest.raises(OutOfMemory) as full:
        room_for(new(2 * GIB), stay, budget(GIB, GIB, GIB))
    for part in ("name-p (1.1 GB, pinned)", "name-w (1.1 GB, at work)", "new has 2.1 GB", "5.1 GB"):
        assert part in full.value.message, full.value.message
    assert full.value.status == 507
    with pytest.raises(OutOfMemory, match=r"MAX_LOADED_MODELS=2.*name-p.*name-w"):
        room_for(new(GIB), stay[:2], PoolLimits(0, most=2))


def test_a_model_that_is_alone_needs_what_the_start_asks_for() -> None:
    """Else the one that a server was started with could go for a small one, and never come back."""
    tight = PoolLimits(PREFILL_BYTES + 4 * GIB)
    assert check_fit("main", 4 * GIB, Device("", "", tight.budget, "cpu", tight.budget)) is not None
    assert room_for(new(1), [model("main", 4 * GIB)], tight) == ["main"]
    assert room_for(new(4 * GIB), [model("small", 1)], tight) == ["small"]
    with pytest.raises(OutOfMemory, match="name-small"):
        room_for(new(4 * GIB), [model("small", 1, pinned=True)], tight)
    with pytest.raises(OutOfMemory, match="POOL_MEMORY_BYTES"):
        room_for(new(4 * GIB + 1), [], tight)


def test_a_model_that_fits_nowhere_pushes_nobody_out() -> None:
    with pytest.raises(OutOfMemory, match=r"9\.7 GB.*POOL_MEMORY_BYTES"):
        room_for(new(9 * GIB), [model("a")], budget(GIB, GIB))
    with pytest.raises(OutOfMemory):
        room_for(new(0), [], PoolLimits(2**20))


def test_kv_of_running_requests_counts() -> None:
    loaded = [model("a", working=True)]
    assert room_for(new(GIB), loaded, budget(GIB, GIB), running=LEAST_CACHE_BYTES) == []
    with pytest.raises(OutOfMemory, match="of KV of running requests"):
        room_for(new(GIB), loaded, budget(GIB, GIB), running=LEAST_CACHE_BYTES + 1)


def test_room_for_kv_comes_from_idle_models() -> None:
    loaded = [model("a", used=2), model("b", used=1), model("c", working=True)]
    assert to_free(1, loaded) == ["b"]
    assert to_free(2 * GIB, loaded) == ["b", "a"]
    assert to_free(2 * GIB + 1, loaded) is None
    assert to_free(0, loaded) == []


def test_shared_weights_are_counted_once() -> None:
    three = [adapted("base"), adapted("base+a", 5), adapted("base+b", 7)]
    assert together(each.weights for each in three) == GIB + 12
    assert together(each.weights for each in (*three, model("other"))) == 2 * GIB + 12
    room = PoolLimits(PREFILL_BYTES + GIB + 12 + 3 * LEAST_CACHE_BYTES)
    assert room_for(three[2], three[:2], room) == []
    assert room_for(adapted("base+b", 8), three[:2], room) == ["base"], "its weights stay; its least KV is free"
    assert room_for(three[1], [three[0], model("other")], PoolLimits(0, most=2)) == []
    assert room_for(model("third"), [*three, model("other", used=1)], PoolLimits(0, most=2)) == [
        "base",
        "base+a",
        "base+b",
    ]


def test_weights_are_free_when_the_last_who_has_them_goes() -> None:
    busy = [adapted("base", used=1), adapted("base+a", 5, used=2), adapted("base+b", 7, used=3, working=True)]
    assert to_free(5, busy) == ["base+a"], "the base alone would free nothing"
    assert to_free(6, busy) is None
    idle = [*busy[:2], adapted("base+b", 7, used=3)]
    assert to_free(GIB, idle) == ["base", "base+a", "base+b"]


def test_a_model_that_was_not_used_for_long_goes() -> None:
    loaded = [model("a", used=10), model("b", used=50), model("p", used=0, pinned=True), model("w", working=True)]
    assert outlived(loaded, now=60, seconds=50) == ["a"]
    assert outlived(loaded, now=10**9, seconds=0) == []
    assert outlived([replace(loaded[0], ttl=40), replace(loaded[1], ttl=11), loaded[1]], 60, None) == ["a"]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9), st.booleans(), st.booleans()), max_size=6),
    st.integers(0, 8),
    st.integers(1, 30),
    st.integers(0, 4),
)
def test_whatever_is_decided_fits_and_nobody_goes_who_has_to_stay(
    shapes: list[tuple[int, int, bool, bool]], weights: int, budget_gib: int, most: int
) -> None:
    residents = [model(str(i), w * GIB, used, works, pin) for i, (w, used, works, pin) in enumerate(shapes)]
    limits = PoolLimits(budget_gib * GIB, most)
    try:
        going = room_for(new(weights * GIB), residents, limits)
    except OutOfMemory:
        stay = [each for each in residents if not each.may_go]
        fits = least_bytes([Weights(weights * GIB), *(each.weights for each in stay)]) <= limits.budget
        assert not fits or (most and len(stay) + 1 > most) or least_bytes([Weights(weights * GIB)]) > limits.budget
        return
    stay = [each for each in residents if each.key not in going]
    assert all(each.may_go for each in residents if each.key in going)
    assert least_bytes([Weights(weights * GIB), *(each.weights for each in stay)]) <= limits.budget
    assert not most or len(stay) < most
