"""The tree of stored prefixes as people see it, and what is told of where a prompt leaves it."""

from __future__ import annotations

import numpy as np
import pytest

from start_llm.core.report import StoredSegment
from start_llm.kvcache.planner import plan
from start_llm.kvcache.resident import snapshot
from start_llm.kvcache.sessions import Sessions
from start_llm.kvcache.types import FilePart
from tests.kvcache.segments import A_TOKEN, fake_tree, grow


def test_every_segment_is_told_with_its_parent_its_state_and_its_use() -> None:
    tree = fake_tree()
    one = grow(tree, [1, 2, 3, 4], used=90.0)
    two = grow(tree, [1, 2, 7], used=95.0)
    one.uses, one.seconds_per_token = 3, 0.5
    two.rows, two.file = None, FilePart("f")
    sessions = Sessions(0, 2)
    sessions.add_end("older", one, 1.0)
    sessions.add_end("newer", two, 2.0)
    told = snapshot(tree, sessions.ends(), 100.0, 10.0)
    head, *rest = told.segments
    assert (head.parent, head.tokens, head.memory, head.disk) == (-1, 2, 2 * A_TOKEN, False)
    assert StoredSegment(0, 2, 2 * A_TOKEN, False, 10.0, 3, 1.0) in rest
    assert StoredSegment(0, 1, 0, True, -1.0, 0, 0.0) in rest
    names = [(name, told.segments[at].tokens) for name, at, _ in told.conversations]
    assert names == [("newer", 1), ("older", 2)] and told.left_out == 0


def test_a_tree_that_is_too_large_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("start_llm.kvcache.resident.MOST_SEGMENTS", 5)
    tree = fake_tree()
    for first in range(20):
        grow(tree, [first, 1])
    told = snapshot(tree, [], 0.0, 0.0)
    assert len(told.segments) == 5 and told.left_out == 15


@pytest.mark.parametrize(
    ("asked", "behind"),
    [([1, 2, 9, 9], (3, 4)), ([1, 2, 3, 4], ()), ([1, 2], (3, 4)), ([8, 8], ()), ([1, 2, 3, 4, 5], ())],
)
def test_a_plan_tells_what_is_stored_behind_the_match(asked: list[int], behind: tuple[int, ...]) -> None:
    tree = fake_tree()
    grow(tree, [1, 2, 3, 4])
    assert plan(tree.walk(np.array(asked, np.int32)), len(asked), True).behind == behind


def test_of_several_ways_on_the_last_used_one_is_told() -> None:
    tree = fake_tree()
    grow(tree, [1, 5], used=1.0)
    grow(tree, [1, 6], used=3.0)
    grow(tree, [1, 7], used=2.0)
    assert plan(tree.walk(np.array([1, 8], np.int32)), 2, True).behind == (6,)
