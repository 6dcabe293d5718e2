"""Looking at the tree from another thread while its owner changes it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from start_llm.kvcache.blocks import as_tokens
from start_llm.kvcache.tree import Segment, SegmentTree
from start_llm.kvcache.types import Slices, StoredRows
from tests.kvcache.segments import fake_rows, fake_tree


@pytest.fixture
def slow_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever divides a segment lets others run in the middle of it."""
    first = Segment.first.fget  # type: ignore[attr-defined]

    def slow(segment: Segment) -> int:
        time.sleep(0)
        return int(first(segment))

    monkeypatch.setattr(Segment, "first", property(slow))


def test_a_peek_never_sees_half_a_change(slow_changes: None) -> None:
    """One segment is divided and joined again all the time; whoever looks finds all of it, or nothing was there."""
    tree = fake_tree()
    tokens = as_tokens(range(1, 400))
    over = threading.Event()
    counts: list[int] = []

    def change() -> None:
        tree.extend(tokens)
        while not over.is_set():
            (top,) = tree.root.children.values()
            time.sleep(0)
            tree.absorb(tree.split(top, 200))
            time.sleep(0)

    def look() -> None:
        for _ in range(3000):
            counts.append(tree.read_consistently(lambda: tree.walk(tokens).length, seconds=30))
        over.set()

    looking = threading.Thread(target=look)
    changing = threading.Thread(target=change)
    changing.start()
    while not tree.root.children:
        time.sleep(0.001)
    looking.start()
    looking.join(60)
    over.set()
    changing.join(60)
    assert counts == [399] * 3000


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
