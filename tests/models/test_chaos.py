"""Requests in any order on tiny models with sparse attention are answered as upstream's own loop answers them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kinds import rounds
from tests.models.chaos import TYPES, play

HAPPENS = ("forks", "reused", "faults", "restarts", "cancels", "squeezes", "evicted segments", "files read", "drafts")


def check(counts: Counter[str], orders: int) -> None:
    """Enough happened, and most were answered all the same."""
    assert all(counts[name] for name in HAPPENS), counts
    assert counts["reused"] > 100 * orders and counts["answered"] > counts["requests"] / 2


def test_forks_faults_and_restarts_change_no_answer() -> None:
    orders = rounds(2, 1)
    check(play(TYPES[0], range(orders)), orders)


@pytest.mark.thorough
@pytest.mark.parametrize("name", TYPES[1:])
def test_the_same_of_other_types(name: str) -> None:
    check(play(name, range(2)), 2)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("name", TYPES)
def test_five_hundred_orders_of_each_type(name: str, part: int) -> None:
    check(play(name, range(1000 + 50 * part, 1050 + 50 * part)), 50)
