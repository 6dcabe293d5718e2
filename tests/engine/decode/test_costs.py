"""What a draft of a certain length is expected to cost and to yield."""

from __future__ import annotations

import pytest

from start_llm.engine.decode.costs import WIDTHS, Acceptance, CostTable, DraftGate

FLAT = {1: 1.0, 32: 1.0}
STEEP = {1: 1.0, 32: 32.0}
M4_PRO = {1: 1.0, 2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 32: 4.5}
M1_LIKE = {1: 1.0, 2: 1.83, 4: 3.26, 8: 6.1, 32: 6.4}


def gate(costs: dict[int, float], carries: bool = False) -> DraftGate:
    return DraftGate(CostTable({0: costs}), Acceptance(), carries)


def ask(gate: DraftGate, match: int, most: int = 31, carried: int = 0) -> int:
    return gate.length(match, most, carried=carried, context=100)


def test_where_width_costs_nothing_all_is_drafted_and_where_it_costs_in_proportion_nothing_is() -> None:
    assert ask(gate(FLAT), 16) == 31
    assert [ask(gate(STEEP), match) for match in (3, 8, 32)] == [0, 0, 0]


def test_the_length_follows_the_machine_and_the_match() -> None:
    assert (ask(gate(M4_PRO), 3), ask(gate(M4_PRO), 32)) == (2, 31)
    assert (ask(gate(M1_LIKE), 3), ask(gate(M1_LIKE), 4), ask(gate(M1_LIKE), 32)) == (0, 0, 31)


def test_a_model_that_must_carry_drafts_less() -> None:
    cut, carries = gate(M4_PRO), gate(M4_PRO, carries=True)
    assert all(ask(carries, match) <= ask(cut, match) for match in (3, 8, 32))
    halves = {1: 1.0, 2: 1.2, 32: 7.0}
    assert ask(gate(halves, carries=True), 8) < ask(gate(halves), 8)


def test_proposals_that_keep_failing_are_not_drafted_until_they_are_right_again() -> None:
    one = gate(M4_PRO)
    for _ in range(60):
        one.acceptance.observe(3, False)
    assert ask(one, 3) == 0 and not one.hopeful(3, context=0) and one.hopeful(32, context=0)
    for _ in range(60):
        one.acceptance.observe(3, True)
    assert ask(one, 3) > 0


def test_no_more_than_proposed_and_no_match_too_short_gives_hope() -> None:
    assert ask(gate(FLAT), 32, most=4) == 4
    assert not gate(FLAT).hopeful(2, context=0)


def test_costs_lie_on_straight_lines_in_width_and_length() -> None:
    table = CostTable({0: {1: 1.0, 32: 2.0}, 1000: {1: 2.0, 32: 6.0}})
    assert table.seconds(1, 0) == 1.0
    assert table.seconds(1, 500) == pytest.approx(1.5)
    assert table.seconds(1, 2000) == pytest.approx(3.0)
    assert table.seconds(7, 0) == pytest.approx(1 + 6 / 31)
    assert table.seconds(64, 1000) == pytest.approx(12.0)


@pytest.mark.parametrize("width", [1, 7, 32])
@pytest.mark.parametrize("length", [0, 300, 1000, 4000])
def test_what_is_observed_becomes_what_is_expected(width: int, length: int) -> None:
    table = CostTable({0: {1: 1.0, 32: 2.0}, 1000: {1: 2.0, 32: 6.0}})
    goal = 2.5 * table.seconds(width, length)
    for _ in range(200):
        table.observe(width, length, goal)
    assert table.seconds(width, length) == pytest.approx(goal, rel=0.1)
    assert all(table.seconds(w, n) > 0 for w in WIDTHS for n in (0, 500, 1000, 10_000))


def test_one_hiccup_changes_little() -> None:
    table = CostTable({0: {1: 1.0, 32: 2.0}})
    table.observe(1, 0, 1000.0)
    assert table.seconds(1, 0) < 1.25


def test_a_machine_that_was_busy_when_it_was_measured_drafts_again_once_it_is_quiet() -> None:
    """Only passes over one token are seen: nothing is drafted, so nothing else can be."""
    busy = {width: 20.0 * seconds for width, seconds in M4_PRO.items()} | {32: 400.0}
    one = gate(busy)
    for _ in range(100):
        one.costs.observe(1, 100, 1.0)
    assert ask(one, 32) > 0 and one.costs.seconds(32, 100) < 400.0 / 5


def test_a_width_that_costs_more_than_was_measured_is_given_up_though_all_others_follow_it() -> None:
    one = gate({1: 1.0, 32: 1.0})
    for _ in range(200):  # what is drafted takes as long as its tokens one by one
        width = 1 + ask(one, 32)
        one.costs.observe(width, 100, 1.0 * width)
        one.costs.observe(1, 100, 1.0)
    assert all(one.costs.seconds(width, 100) / one.costs.seconds(1, 100) > width / 1.6 for width in WIDTHS[4:])
    assert ask(one, 3) == 0
