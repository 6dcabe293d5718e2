from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from start_llm.files.lru import Lru
from tests.together import together

KEYS = st.integers(0, 5)
VALUES = st.none() | st.integers(1, 4)
USES = st.sampled_from(["get", "pop", "look"])
STEPS = st.lists(st.tuples(st.just("put"), KEYS, VALUES) | st.tuples(USES, KEYS, st.none()), max_size=40)


@given(st.integers(1, 8), STEPS, st.booleans())
def test_it_does_what_a_list_in_order_of_use_does(
    most: int, steps: list[tuple[str, int, int | None]], sized: bool
) -> None:
    """A value of nothing is a value; looking is no use."""
    lru = Lru[int, int | None](most, (lambda key, value: value or 0) if sized else None)
    model: list[tuple[int, int | None]] = []  # the one used longest ago first
    for step, key, value in steps:
        found = [entry for entry in model if entry[0] == key]
        rest = [entry for entry in model if entry[0] != key]
        known = found[0][1] if found else None
        if step == "put":
            lru.put(key, value)
            model = [*rest, (key, value)]
            while sum((v or 0) if sized else 1 for _, v in model) > most and len(model) > 1:
                model.pop(0)
        elif step == "get":
            assert lru.get(key) == known
            model = [*rest, *found]
        elif step == "pop":
            assert lru.pop(key) == known
            model = rest
        else:
            assert (key in lru) == bool(found)
        assert lru.items() == model and list(lru) == [key for key, _ in model] and len(lru) == len(model)
    lru.clear()
    assert not lru and lru.get(0) is None


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
