from __future__ import annotations

from itertools import pairwise

from start_llm.kvcache.budget import Policy, checkpoints_below, rank, thin_after, thin_under_pressure, value
from start_llm.kvcache.pieces import Checkpoint, WindowPiece
from start_llm.kvcache.pieces import Window as WindowState
from tests.kvcache.segments import fake_tree, grow

PLAIN = Policy(cuttable=True, recent=2, grid=20)
HYBRID = Policy(cuttable=False, recent=2, grid=20)


def test_value_is_cost_times_use_by_bytes_and_age() -> None:
    tree = fake_tree()
    leaf = grow(tree, list(range(10)))
    leaf.seconds_per_token, leaf.uses, leaf.used = 0.5, 3, 100.0
    assert value(leaf, 109.0) == (0.5 * 10) * 3 / (100 * 10)


def test_rank_goes_from_useless_to_protected() -> None:
    tree = fake_tree()
    useless, side, plain, young, old = (grow(tree, [n, n + 1], checkpoint=n > 0) for n in range(0, 50, 10))
    side.one_shot = True
    strengths = {id(young): (1, 5.0), id(old): (2, -3.0)}
    leaves = [old, plain, young, side, useless]
    ordered = sorted(leaves, key=lambda s: rank(s, strengths, HYBRID, 10.0))
    assert ordered == [useless, side, plain, young, old]
    assert rank(useless, {}, PLAIN, 10.0)[0] == 2  # where all can be cut, no checkpoint is missed


def test_a_grown_conversation_keeps_recent_checkpoints_and_the_grid() -> None:
    tree = fake_tree()
    for stop in range(10, 101, 10):
        end = grow(tree, list(range(stop)), checkpoint=True)
        for segment in thin_after(end, HYBRID):
            segment.checkpoint = None
    places = sorted(s.end for s in tree if s.checkpoint is not None)
    assert places[-3:] == [80, 90, 100]
    assert all(b - a <= 20 for a, b in pairwise(places))
    assert len(places) < 10


def test_thinning_stops_at_a_branch() -> None:
    tree = fake_tree()
    for stop in range(5, 51, 5):
        grow(tree, list(range(stop)), checkpoint=True)
    grow(tree, [*range(50), 900], checkpoint=True)
    end = grow(tree, [*range(50), 800], checkpoint=True)
    assert thin_after(end, HYBRID) == []


def test_pressure_thins_wider_and_wider_and_spares_leaves() -> None:
    tree = fake_tree()
    for stop in range(10, 201, 10):
        grow(tree, list(range(stop)), checkpoint=True, used=float(stop))
    order = []
    for segment in thin_under_pressure(tree, HYBRID):
        segment.checkpoint = None
        order.append(segment.end)
    assert order[0] == 10  # the longest unused first
    assert 200 not in order
    firsts = order[: order.index(max(order)) + 1]
    assert all(stop <= 180 for stop in firsts[:5])


def test_checkpoints_below() -> None:
    tree = fake_tree()
    first = grow(tree, list(range(10)), checkpoint=True)
    grow(tree, list(range(20)), checkpoint=True)
    end = grow(tree, list(range(30)), checkpoint=True)
    assert (checkpoints_below(first, 5), checkpoints_below(end, 5)) == (2, 0)
    assert checkpoints_below(first, 1) >= 1


def test_shared_pieces_are_counted_once() -> None:
    shared, own = (WindowPiece(at, at + 5, (None, None), 100) for at in (0, 5))
    first = Checkpoint((WindowState((shared,), 0, 5, 10), []), own_bytes=7)
    second = Checkpoint((WindowState((shared, own), 0, 10, 10), []), own_bytes=7)
    assert (first.hold(), second.hold()) == (107, 107)
    assert first.nbytes == 57
    assert (first.release(), second.release()) == (7, 207)
