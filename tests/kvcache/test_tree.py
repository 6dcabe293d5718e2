from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.report import StoredSegment
from start_llm.kvcache.blocks import PathHash, as_tokens, common_prefix
from start_llm.kvcache.resident import snapshot
from start_llm.kvcache.sessions import Sessions
from start_llm.kvcache.tree import SegmentTree
from start_llm.kvcache.types import FilePart, Slices, StoredRows
from tests.kvcache.segments import A_TOKEN, fake_rows, fake_tree, grow


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_a_branch_divides_the_segment_that_it_leaves() -> None:
    tree = fake_tree()
    lower = grow(tree, [1, 2, 3, 4])
    lower.file = FilePart("f", 7)
    branch = grow(tree, [1, 2, 9])
    upper = branch.parent
    assert upper is not None and upper is lower.parent
    assert (upper.tokens.tolist(), lower.tokens.tolist(), branch.tokens.tolist()) == ([1, 2], [3, 4], [9])
    assert upper.rows is not None and upper.rows.length == 2
    assert (upper.file, lower.file) == (FilePart("f", 7), FilePart("f", 9))
    assert not upper.is_leaf and lower.is_leaf and branch.is_leaf


def test_walk_says_where_a_sequence_parts() -> None:
    tree = fake_tree()
    grow(tree, [1, 2, 3])
    assert (tree.walk(array(1, 2)).length, tree.walk(array(1, 2)).parted) == (2, True)
    assert (tree.walk(array(1, 2, 3, 4)).length, tree.walk(array(1, 2, 3, 4)).parted) == (3, False)
    assert tree.walk(array(7)).path == ()


def test_only_childless_ghosts_are_removed() -> None:
    tree = fake_tree()
    end = grow(tree, [1, 2])
    with pytest.raises(AssertionError):
        tree.remove(end)
    end.rows = None
    tree.remove(end)
    assert list(tree) == []
    with pytest.raises(AssertionError):
        tree.split(grow(tree, [1, 2]), 2)


def test_ghosts_are_joined() -> None:
    tree = fake_tree()
    for stop in (2, 4, 6):
        grow(tree, [1, 2, 3, 4, 5, 6][:stop])
    top, middle, bottom = sorted(tree, key=lambda s: s.start)
    grow(tree, [1, 2, 3, 4, 5, 6, 7])
    for segment in (next(s for s in tree if s.start == 6), bottom, middle):
        segment.rows = None
        tree.absorb(segment)
    assert [(s.start, s.end) for s in tree] == [(0, 2), (2, 7)]
    assert tree.walk(array(1, 2, 3, 4, 5, 6, 7)).length == 7
    tree.absorb(top)  # holds rows: stays
    middle.file = FilePart("f")
    top.rows = None
    tree.absorb(top)  # its child is on disk: stays
    assert len(list(tree)) == 2
    middle.file = None
    grow(tree, [1, 2, 9]).rows = None
    tree.absorb(top)  # two children: stays
    assert len(list(tree)) == 3


def test_long_ghosts_are_divided_again_before_they_hold_rows() -> None:
    tree = fake_tree(longest=4)
    grow(tree, list(range(10)))
    for segment in sorted(tree, key=lambda s: -s.start):
        segment.rows = None
        tree.absorb(segment)
    assert [s.length for s in tree] == [10]
    grow(tree, list(range(9)))
    assert [(s.start, s.length, s.rows is not None) for s in tree] == [
        (0, 4, True),
        (4, 4, True),
        (8, 1, True),
        (9, 1, False),
    ]


def test_attach_refuses_what_begins_alike() -> None:
    tree = fake_tree()
    assert tree.attach(tree.root, array(1, 2).tobytes()) is not None
    assert tree.attach(tree.root, array(1, 3).tobytes()) is None


def path_tokens(tree: SegmentTree, tokens: list[int]) -> list[int]:
    return [int(t) for segment in tree.walk(np.array(tokens, np.int32)).path for t in segment.tokens]


@given(st.lists(st.lists(st.integers(-1, 1), min_size=1, max_size=12), min_size=1, max_size=20))
def test_every_path_is_what_was_put_in(sequences: list[list[int]]) -> None:
    tree = fake_tree(longest=4)
    for tokens in sequences:
        assert grow(tree, tokens).end == len(tokens)
    for tokens in sequences:
        assert tree.walk(np.array(tokens, np.int32)).length == len(tokens)
        assert path_tokens(tree, tokens)[: len(tokens)] == tokens
    for segment in tree:
        assert segment.length <= 4 and segment.end == segment.start + segment.length
        assert segment.first == int(segment.tokens[0]) and sum(s.length for s in segment.ancestors()) == segment.start
    prefixes = {tuple(tokens[:n]) for tokens in sequences for n in range(1, len(tokens) + 1)}
    assert sum(s.length for s in tree) == len(prefixes)  # nothing is held twice


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
    tokens = as_tokens(range(1, 101))

    def look(seconds: float) -> int:
        return tree.read_consistently(lambda: tree.walk(tokens).length, seconds)

    def divide(rows: StoredRows, at: int) -> tuple[Slices, Slices]:
        with pytest.raises(TimeoutError):
            look(0.05)
        return fake_rows(at), fake_rows(rows.length - at)

    tree = SegmentTree(divide)
    (segment,) = tree.extend(tokens)
    segment.rows = fake_rows(100)
    tree.split(segment, 40)
    assert look(30.0) == 100 and [s.length for s in tree.walk(tokens).path] == [40, 60]


def test_what_a_look_itself_raises_is_raised() -> None:
    tree = fake_tree()
    with pytest.raises(ZeroDivisionError):
        tree.read_consistently(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError), tree._changing():
        raise ZeroDivisionError
    assert tree.read_consistently(lambda: 7) == 7  # a change that failed does not close the tree for ever
