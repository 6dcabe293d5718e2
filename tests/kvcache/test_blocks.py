from __future__ import annotations

import hashlib
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from start_llm.kvcache.blocks import PathHash, as_tokens, common_prefix

tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200)


@given(tokens)
def test_all_forms_are_the_same_tokens(values: list[int]) -> None:
    array = np.array(values, np.int32)
    for form in (values, tuple(values), array, array.astype(np.int64)):
        made = as_tokens(form)
        assert made.dtype == np.int32 and made.tolist() == values
    assert as_tokens(array) is array


@given(tokens, st.integers(0, 200))
def test_common_prefix(values: list[int], cut: int) -> None:
    a = np.array(values * 2, np.int32)
    b = a.copy()
    assert common_prefix(a, b) == len(a)
    assert common_prefix(a, b[:cut]) == min(cut, len(a))
    if cut < len(b):
        b[cut] ^= 1
        assert common_prefix(a, b) == common_prefix(b, a) == cut


@given(st.lists(tokens, max_size=5), st.randoms())
def test_the_hash_of_a_path_is_the_chain_of_its_tokens_whoever_asks_first(
    runs: list[list[int]], chance: random.Random
) -> None:
    path = [PathHash()]
    for run in runs:
        path.append(PathHash(path[-1], np.array(run, np.int32).tobytes()))
    for end in chance.sample(range(len(path)), len(path)):
        before = np.array([token for run in runs[:end] for token in run], "<i4")
        assert path[end].chain().digest() == hashlib.sha256(before.tobytes()).digest()
        assert path[end].chain() is path[end].chain()
