from __future__ import annotations

import numpy as np
import pytest

from start_llm.core.prompt import Prompt
from start_llm.kvcache.planner import plan, stops
from start_llm.kvcache.types import FilePart
from tests.kvcache.segments import fake_tree, grow


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


RUN = list(range(100))


@pytest.mark.parametrize(
    ("limit", "cuttable", "length", "reason"),
    [(100, True, 80, ""), (70, True, 70, "limit"), (100, False, 60, "no_checkpoint"), (60, False, 60, "limit")],
)
def test_plan(limit: int, cuttable: bool, length: int, reason: str) -> None:
    tree = fake_tree()
    grow(tree, RUN[:30], checkpoint=True)
    grow(tree, RUN[:60], checkpoint=True)
    grow(tree, RUN[:80])
    got = plan(tree.walk(array(RUN)), limit, cuttable)
    assert (got.length, got.matched, got.seen, got.reason) == (length, 80, 80, reason)


def test_ghosts_are_seen_and_what_is_on_disk_counts() -> None:
    tree = fake_tree()
    grow(tree, RUN[:30])
    end = grow(tree, RUN[:80])
    end.rows = None
    got = plan(tree.walk(array(RUN)), 100, True)
    assert (got.length, got.matched, got.seen, got.reason) == (30, 30, 80, "evicted")
    end.file = FilePart("f")
    assert plan(tree.walk(array(RUN)), 100, True).length == 80
    assert plan(tree.walk(array(RUN)), 100, False).length == 0
    end.checkpoint_file = "c"
    assert plan(tree.walk(array(RUN)), 100, False).length == 80


def test_no_pause_beyond_the_last_token_or_before_the_start() -> None:
    prompt = Prompt(tuple(RUN), boundaries=(10, 40, 99), system_end=10, generation=100)
    empty = fake_tree().walk(array(RUN))
    assert stops(prompt, empty, 10, recent=8, grid=1000) == (40, 99)
    assert stops(prompt, empty, 99, recent=8, grid=1000) == ()
    assert stops(Prompt((1,)), fake_tree().walk(array([1])), 0, recent=8, grid=10) == ()
    without_recent = Prompt(tuple(RUN), boundaries=(10, 40, 70), system_end=10, generation=90)
    assert stops(without_recent, empty, 0, recent=0, grid=50) == (10, 40, 90)


def test_partings_are_worth_a_pause_if_they_save_something() -> None:
    tree = fake_tree()
    grow(tree, [*RUN[:50], 777, 778], checkpoint=True)
    grow(tree, [*RUN[:50], 888], checkpoint=True)
    prompt = Prompt(tuple(RUN), generation=95)
    match = tree.walk(array(RUN))
    assert match.length == 50
    assert stops(prompt, match, 0, recent=8, grid=1000) == (50, 95)
    assert stops(prompt, match, 40, recent=8, grid=1000) == (95,)
    match.path[-1].checkpoint_file = "c"
    assert stops(prompt, match, 0, recent=8, grid=1000) == (95,)


def test_two_branches_are_enough_to_make_a_parting() -> None:
    tree = fake_tree()
    grow(tree, [*RUN[:50], 777])
    grow(tree, RUN[:70])
    match = tree.walk(array(RUN))
    assert [len(segment.children) for segment in match.path] == [2, 0]
    prompt = Prompt(tuple(RUN), generation=95)
    assert stops(prompt, match, 0, recent=8, grid=1000) == (50, 95)


def test_gaps_are_no_wider_than_the_grid() -> None:
    boundaries = (3, 50, 51, 180, 400)
    prompt = Prompt(tuple(range(1000)), boundaries=boundaries, generation=1000)
    found = stops(prompt, fake_tree().walk(array([1])), 7, recent=1, grid=100)
    assert all(b - a <= 100 for a, b in zip((7, *found), (*found, 999), strict=True))
    assert {51, 400} <= set(found) and list(found) == sorted(set(found))


def test_a_system_text_has_a_grid_of_its_own() -> None:
    prompt = Prompt(tuple(RUN), boundaries=(40, 70), system_end=40, generation=95)
    empty = fake_tree().walk(array([1]))
    assert stops(prompt, empty, 0, recent=8, grid=1000, head_grid=15) == (15, 30, 40, 70, 95)
    assert stops(prompt, empty, 35, recent=8, grid=1000, head_grid=15) == (40, 70, 95)
    assert stops(prompt, empty, 40, recent=8, grid=20, head_grid=15) == (60, 70, 90, 95)


@pytest.mark.parametrize(
    ("asked", "behind"),
    [([1, 2, 9, 9], (3, 4)), ([1, 2, 3, 4], ()), ([1, 2], (3, 4)), ([8, 8], ()), ([1, 2, 3, 4, 5], ())],
)
def test_a_plan_tells_what_is_stored_behind_the_match(asked: list[int], behind: tuple[int, ...]) -> None:
    tree = fake_tree()
    grow(tree, [1, 2, 3, 4])
    assert plan(tree.walk(array(asked)), len(asked), True).behind == behind


def test_of_several_ways_on_the_last_used_one_is_told() -> None:
    tree = fake_tree()
    grow(tree, [1, 5], used=1.0)
    grow(tree, [1, 6], used=3.0)
    grow(tree, [1, 7], used=2.0)
    assert plan(tree.walk(array([1, 8])), 2, True).behind == (6,)
