from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from start_llm.files.lru import Lru
from tests.together import together

KEYS = st.integers(0, 5)
STEPS = st.lists(
    st.tuples(st.just("put"), KEYS, st.integers(0, 4)) | st.tuples(st.sampled_from(["get", "pop"]), KEYS, st.just(0)),
    max_size=40,
)


@given(st.integers(1, 8), STEPS, st.booleans())
def test_it_does_what_a_list_in_order_of_use_does(most: int, steps: list[tuple[str, int, int]], sized: bool) -> None:
    lru = Lru[int, int](most, (lambda key, value: value) if sized else None)
    model: list[tuple[int, int]] = []  # the one used longest ago first
    for step, key, value in steps:
        known = dict(model).get(key)
        rest = [entry for entry in model if entry[0] != key]
        if step == "put":
            lru.put(key, value)
            model = [*rest, (key, value)]
            while sum(v if sized else 1 for _, v in model) > most and len(model) > 1:
                model.pop(0)
        elif step == "get":
            assert lru.get(key) == known
            model = model if known is None else [*rest, (key, known)]
        else:
            assert lru.pop(key) == known
            model = rest
        assert lru.items() == model and list(lru) == [key for key, _ in model]
        assert len(lru) == len(model) and all(key in lru for key, _ in model)


def test_looking_is_no_use() -> None:
    lru = Lru[str, int](2)
    lru.put("old", 1)
    lru.put("new", 2)
    assert "old" in lru and lru.items()[0] == ("old", 1)
    lru.put("newer", 3)
    assert list(lru) == ["new", "newer"]
    lru.clear()
    assert not lru and lru.get("new") is None


def test_a_value_of_nothing_is_a_value_and_is_counted() -> None:
    lru = Lru[str, str | None](2)
    for _ in range(3):
        lru.put("nobody", None)
    lru.put("a", "a")
    assert "nobody" in lru and list(lru) == ["nobody", "a"]
    lru.put("b", "b")
    assert list(lru) == ["a", "b"]


def test_many_threads_share_one() -> None:
    lru = Lru[int, int](50, lambda key, value: value)

    def use(seed: int) -> None:
        for step in range(2000):
            key = (seed * 31 + step * 7) % 97
            lru.put(key, key % 5)
            lru.get(key)
            lru.pop((key * 3) % 97)

    together(partial(use, seed) for seed in range(4))
    assert sum(value for _, value in lru.items()) <= 50
