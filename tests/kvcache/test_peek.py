"""Looking at the tree from another thread while its owner changes it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from start_llm.kvcache.blocks import as_tokens
from start_llm.kvcache.tree import SegmentTree
from start_llm.kvcache.types import Slices, StoredRows
from tests.kvcache.segments import fake_rows, fake_tree


def test_a_look_into_which_a_change_falls_is_made_again() -> None:
    tree, tokens, seen = fake_tree(), as_tokens(range(1, 400)), []
    (segment,) = tree.extend(tokens)

    def look() -> int:
        match = tree.walk(tokens)
        seen.append([part.length for part in match.path])
        if len(seen) == 1:
            tree.split(segment, 200)
        if len(seen) == 2:
            tree.absorb(tree.root.children[1])
            raise KeyError("a part that is there no more")
        return match.length

    assert tree.read_consistently(look, seconds=30) == 399
    assert seen == [[399], [200, 199], [399]]


def test_a_look_during_a_change_waits_for_its_end() -> None:
    inside, release = threading.Event(), threading.Event()

    def slow(rows: StoredRows, at: int) -> tuple[Slices, Slices]:
        inside.set()
        release.wait(60)
        return fake_rows(at), fake_rows(rows.length - at)

    tree = SegmentTree(slow)
    tokens = as_tokens(range(1, 101))
    (segment,) = tree.extend(tokens)
    segment.rows = fake_rows(100)
    changing = threading.Thread(target=lambda: tree.split(segment, 40))
    changing.start()
    assert inside.wait(60)
    with pytest.raises(TimeoutError):
        tree.read_consistently(lambda: tree.walk(tokens).length, seconds=0.05)
    release.set()
    assert tree.read_consistently(lambda: tree.walk(tokens).length) == 100
    changing.join(60)
    assert [s.length for s in tree.walk(np.asarray(tokens)).path] == [40, 60]


def test_what_a_look_itself_raises_is_raised() -> None:
    tree = fake_tree()
    with pytest.raises(ZeroDivisionError):
        tree.read_consistently(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError), tree._changing():
        raise ZeroDivisionError
    assert tree.read_consistently(lambda: 7) == 7  # a change that failed does not close the tree for ever
